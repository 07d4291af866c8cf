// Tile sizes and shared-memory layout of the volta backward kernels: main kernels (single_role.cuh, warp_specialized.cuh) and
// dq.cuh.
//
// A block of a main kernel owns keys and visits the queries that see them, a step at a time (FlashAttention-2's backward,
// transposed):
//
//   S^T  = K Q^T                 P = exp(scale * S - lse)     dV += P^T dO
//   dP^T = V dO^T - delta        dS = P * dP                  dK += dS^T Q        dQ += dS K  (by atomics)
//
// K and V stay in shared memory, dK and dV in registers. The transposed scores leave the first two products in accumulator
// layout, and go to shared memory as fp16. They are read back as row-major operand A of dV and dK, and as column-major operand
// A of dQ.
//
// Without atomics, dq.cuh computes dQ: its blocks own queries and visit keys. There own rows are Q and dO, and each step brings
// K and V.
#pragma once

#include "tile.cuh"

namespace volta {

// Tiles of P^T and dS^T: rows are keys, of four chunks of eight queries (steps of 16 queries use two of them).
constexpr int kScoreChunks = 4, kScoreRowBytes = kScoreChunks * kChunkBytes;

// A block owns kRows rows (keys, or queries in dq.cuh), and visits the other rows in steps of kStep. ScoreTiles: tiles of P^T
// and dS^T.
template <int Headdim, int Rows, int Step, int Threads, int ScoreTiles>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of a row of Q, K, V, dO

    // Offsets in shared memory, bytes. Tiles are multiples of 512 bytes, so XOR inside a row never leaves it. Own rows are K
    // and V, and each step brings Q and dO; or the other way round. The first of each pair makes S, the second dP.
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes;
    static constexpr int kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kOwnS = 0, kOwnDp = kOwnTile, kStepS = 2 * kOwnTile, kStepDp = kStepS + kStepTile;
    // With ScoreTiles = 0, dS takes the place of the second step tile.
    static constexpr int kScores = ScoreTiles ? kStepDp + kStepTile : kStepDp;
    static constexpr int kSharedBytes = kStepDp + kStepTile + ScoreTiles * kScoreTile;
};

}  // namespace volta
