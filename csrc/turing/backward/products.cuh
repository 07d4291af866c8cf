// Products and element-wise operations in each step of the turing backward kernels: scores (S^T, dP^T), gradients of own rows (dK,
// dV, or dQ in the dq kernels), packed P, dS, and the mask on the dq kernels' scores. Called by main kernels, whose blocks own keys
// (single_role.cuh, single_role_halves.cuh, warp_specialized.cuh), and dq kernels (dq.cuh, dq_warp_specialized.cuh).
//
//   own rows, step rows  rows of the thread block: keys, in dq kernels queries; rows that it visits, S::kStep at a time
//   S (Shape)         sizes (shape.cuh); kRowBytes: bytes of a row of Q, K, V or dO
//   M, N, Tiles       a warp's tiles of 16 own rows (m); of 8 step rows (n); of 8 columns of a gradient
//   Accumulator, OperandA  a lane's part of C, 16 own rows by 8 step rows or columns; and of A, 16 own rows by 8 (turing/mma.cuh)
//   by_chunks, by_rows  a lane's address for ldmatrix of four 8x8 matrices, 16 rows by two chunks (8 columns each): the first two
//                     matrices are eight rows, or one chunk (fragments.cuh)
//   unrolled<I, J>(f) calls f(i, j) for each i < I and j < J
#pragma once

#include "backward/probabilities.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Packs two P by conversions, in single_role*.cuh and dq_warp_specialized.cuh. x, y: P * kProbabilityUnit (2^12, with which small P
// fit fp16), from which single_role*.cuh also compute dS. pack_shifted (softmax.cuh), by integers, takes numbers times 2^-112, so
// it would need P * 2^-100 beside these. Here the tensor cores' work hides the time of conversions.
__device__ __forceinline__ u32 pack_units(float x, float y) { return to_half2(x, y); }
// Returns dS = P * (dP - delta), delta = rowsum(dO * O). p: P * kProbabilityUnit. neg_delta: -delta / kProbabilityUnit. fp32 until
// callers pack dS: dP - delta may be far beyond fp16 where P is small. From 65520 on dS packs as infinity: GradScaler detects it.
__device__ __forceinline__ float score_gradient(float p, float dp, float neg_delta) {
    return p * fmaf(dp, 1.f / kProbabilityUnit, neg_delta);
}

// Sets masked scores of the dq kernels to -inf. s[n][m]: 16 queries from query + 16 * m on by 8 keys from key + 8 * n on.
template <int M, int N>
__device__ __forceinline__ void mask_scores(Accumulator (&s)[N][M], const BwdParams& p, int query, int key) {
    const Mask mask = mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z));
    const Lane lane = remat_lane();
    unrolled<N, M>([&](int n, int m) { mask_tile(s[n][m], mask, ScoreCoord<QueriesLayout>(lane, query + 16 * m, key + 8 * n)); });
}

// S^T or dP^T (dq kernels: S or dP): adds to tiles c[n][m] the products over one pair of chunks k (0 and 1), 16 columns of headdim.
// a[m][k]: own rows. `address`: the lane's, of the step rows' matrices (by_chunks): b[2 * i + k] is chunk k of tile n + i, of the
// two that an ldmatrix loads.
template <class S, int M, int N>
__device__ __forceinline__ void multiply_pair(Accumulator (&c)[N][M], const OperandA (&a)[M][2], u32 address) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices(b, address + n / 2 * 16 * S::kRowBytes);
        unrolled<2, 2, M>([&](int k, int i, int m) { mma(c[n + i][m], a[m][k], b[2 * i + k]); });
    }
}

// dV or dK (dq kernels: dQ): adds to column tiles 2 * pair + i (i: 0 and 1; 16 columns) the products of packed P or dS, a[n][m],
// and step rows of dO, Q or K. `address`: the lane's, of the step rows' matrices (by_rows), which the load transposes: b[2 * i + k]
// is column tile i of tile n + k, of the two that an ldmatrix loads.
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
