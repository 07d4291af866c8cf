// What a block of the main kernels (small.cuh, split.cuh) and of the queries kernel (queries.cuh) owns, and where it lies in
// shared memory. docs/backward-kernel.md tells the design.
//
// A block of the main kernels owns some keys and walks over the queries that see them, a step at a time:
//
//   S^T  = K Q^T - lse/scale     P = exp(scale * S)      dV += P^T dO
//   dP^T = V dO^T - delta        dS = P * dP             dK += dS^T Q        dQ += dS K  (atomically)
//
// K and V stay in shared memory, dK and dV in registers. The transposed scores come out of the first
// two products in the accumulator layout, go to shared memory as fp16, and are read back as the row-major
// A operand of dV and dK and as the column-major A operand of dQ.
//
// Without atomics, dQ is left to the queries kernel, whose blocks own queries and walk over keys. It is made of
// the same parts: what is said here of keys is there true of queries, and the other way round.
#pragma once

#include "tile.cuh"

namespace volta {

// Tiles of P^T and dS^T: rows are keys, of four chunks of eight queries (steps of 16 queries use two of them).
constexpr int kScoreChunks = 4, kScoreRowBytes = kScoreChunks * kChunkBytes;

// A block owns kRows rows, keys in the main kernels and queries in the queries kernel, and walks over the rows of
// the other kind in steps of kStep.
template <int Headdim, int Rows, int Step, int Threads, int ScoreTiles>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of a row of Q, K, V, dO

    // Shared memory, bytes. Tiles are multiples of 512 bytes, so XOR inside a row never leaves it.
    // The block's own rows are K and V, and each step brings Q and dO; or the other way round. The first of
    // each pair makes S, the second dP.
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes;
    static constexpr int kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kOwnS = 0, kOwnDp = kOwnTile, kStepS = 2 * kOwnTile, kStepDp = kStepS + kStepTile;
    // Without a tile of its own, dS takes the place of the second step tile.
    static constexpr int kScores = ScoreTiles ? kStepDp + kStepTile : kStepDp;
    static constexpr int kSharedBytes = kStepDp + kStepTile + ScoreTiles * kScoreTile;
};

}  // namespace volta
