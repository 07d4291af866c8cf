// Sizes of the tiles in shared memory, and their offsets, of the volta backward kernels: Shape, as S a template argument of the
// main kernels (single_role.cuh, warp_specialized.cuh), of the dq kernel (dq.cuh) and of what they call.
//
// A thread block of a main kernel owns keys and visits the queries that see them, a step at a time (FlashAttention-2's backward,
// transposed; lse is softmax_lse, delta is rowsum(dO * O)):
//
//   S^T  = K Q^T                 P = exp(scale * S - lse)     dV += P^T dO
//   dP^T = V dO^T                dS = P * (dP - delta)        dK += dS^T Q        dQ += dS K
//
// dK and dQ are multiplied by scale at the end. K and V stay in shared memory, dK and dV in registers. P^T and dS^T come from
// accumulators, and go to shared memory as fp16. They are read back as operand A: row-major for dV and dK, column-major for dQ.
//
// dQ is added up by atomics, or stored by a block that has all keys, or left to dq.cuh, whose blocks own queries and visit keys.
// There own rows are Q and dO, and each step brings K and V. "Own" and "Step" in names below are these two sides. S and Dp at the
// end of names are the products S and dP that an operand belongs to.
#pragma once

#include "tile.cuh"  // kChunk (8 fp16 columns), kChunkBytes (16)

namespace volta {

// Tiles of P^T and dS^T: rows are keys, of four chunks (16 bytes, kChunkBytes) of eight queries. Steps of 16 queries use two of the
// four. In dq.cuh tiles are of dS: rows are queries, of four chunks of eight keys.
constexpr int kScoreChunks = 4, kScoreRowBytes = kScoreChunks * kChunkBytes;

// A block owns kRows rows (keys, or queries in dq.cuh), and visits the other rows in steps of kStep. ScoreTiles: how many tiles of
// P^T and dS^T shared memory has (in dq.cuh of dS). The other arguments come from the kernel's entry in the tables of
// src/kernels: columns of Q and K (of V too), Rows own rows, Step rows of a step, Threads of a block.
template <int Headdim, int Rows, int Step, int Threads, int ScoreTiles>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads, kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of a row of Q, K, V, dO

    // Sizes of tiles and offsets in shared memory, bytes. Chunks of a row are permuted by XOR of address bits (chunk_after,
    // tile.cuh). Tiles begin at multiples of 512 bytes, the longest row (headdim 256): no XOR of low bits leaves a row. kOwnS and
    // kStepS have the operands of S (K and Q, in dq.cuh Q and K), kOwnDp and kStepDp those of dP (V and dO, or dO and V).
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes, kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kOwnS = 0, kOwnDp = kOwnTile, kStepS = 2 * kOwnTile, kStepDp = kStepS + kStepTile;
    // With ScoreTiles = 0, as in some dq kernels, dS takes the place of the second step tile.
    static constexpr int kScores = ScoreTiles ? kStepDp + kStepTile : kStepDp;
    static constexpr int kSharedBytes = kStepDp + kStepTile + ScoreTiles * kScoreTile;
};

}  // namespace volta
