// Products and element-wise steps of the turing backward kernels: scores (S^T, dP^T), gradients of own rows (dK, dV, or dQ in the
// dq kernels), packed P and dS, and the mask on the dq kernels' scores.
//
//   own rows, step rows  rows of the thread block (keys, in dq kernels queries); rows that it visits, S::kStep at a time
//   S (Shape)         sizes (shape.cuh); kRowBytes: bytes of a row of Q, K, V or dO
//   M, N, Tiles       tiles of 16 own rows (m); of 8 step rows (n); of 8 columns of a gradient
//   Accumulator, OperandA  a lane's part of C, 16 own rows by 8 step rows or columns; and of A, 16 own rows by 8 (turing/mma.cuh)
//   by_chunks, by_rows  a lane's address for ldmatrix of four 8x8 matrices, 16 rows by two chunks of eight columns: the first two
//                     matrices are eight rows, or one chunk (fragments.cuh)
#pragma once

#include "backward/probabilities.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Packs P * kProbabilityUnit (2^12, with which small P fit fp16) by conversions, in kernels with one role and dq kernels. The
// integer operations of pack_shifted (softmax.cuh) would save them, but take P times 2^-112, and dS needs P in this unit too. The
// XU pipe has time for conversions, while the tensor cores work.
__device__ __forceinline__ u32 pack_units(float x, float y) { return to_half2(x, y); }
// Returns dS = P * (dP - delta), where delta is rowsum(dO * O). p: P * kProbabilityUnit. neg_delta: -delta / kProbabilityUnit, from
// StepStats::scale. fp32 until the result is packed, because dP - delta may be far beyond fp16 where P is small. Packed dS is
// infinity from 65520 on, which a GradScaler detects.
__device__ __forceinline__ float score_gradient(float p, float dp, float neg_delta) {
    return p * fmaf(dp, 1.f / kProbabilityUnit, neg_delta);
}

// Masks scores of the dq kernels, s[n][m]: 16 queries from query + 16 * m on by 8 keys from key + 8 * n on.
template <int M, int N>
__device__ __forceinline__ void mask_scores(Accumulator (&s)[N][M], const BwdParams& p, int query, int key) {
    const Mask mask = mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z));
    const Lane lane = remat_lane();
    unrolled<N, M>([&](int n, int m) { mask_tile(s[n][m], mask, ScoreCoord<QueriesLayout>(lane, query + 16 * m, key + 8 * n)); });
}

// S^T or dP^T (dq kernels: S or dP): adds the products of one pair of chunks, 16 columns of headdim, for all own rows and all step
// rows. a: own rows; `address`: of the step rows' matrices (by_chunks). c[n][m]: step rows 8 * n on, own rows 16 * m on.
template <class S, int M, int N>
__device__ __forceinline__ void multiply_pair(Accumulator (&c)[N][M], const OperandA (&a)[M][2], u32 address) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices(b, address + n / 2 * 16 * S::kRowBytes);
        unrolled<2, 2, M>([&](int k, int i, int m) { mma(c[n + i][m], a[m][k], b[2 * i + k]); });
    }
}

// dV or dK (dq kernels: dQ): adds to a pair of column tiles, 2 * pair and its neighbor (16 columns), from packed scores a[n][m] and
// the step rows. `address`: of the step rows' matrices (by_rows).
template <class S, int M, int N, int Tiles>
__device__ __forceinline__ void accumulate_pair(Accumulator (&c)[M][Tiles], const OperandA (&a)[N][M], u32 address, int pair) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, address + n / 2 * 16 * S::kRowBytes);
        unrolled<2, 2, M>([&](int k, int i, int m) { mma(c[m][2 * pair + i], a[n + k][m], b[2 * i + k]); });
    }
}

}  // namespace turing
