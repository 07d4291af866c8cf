// Recomputes probabilities in the backward pass: P = 2^(score - lse), both in log2 units, and the power of two by which P is scaled
// as fp16. Used by the main and dq kernels, and by those that store P (store_scores.cuh).
//
// Do not put -lse / scale into the initial accumulators of S = Q K^T. Each score would then round at the size of lse, unlike the
// same score in the forward pass, and dq of rows with large scores would lose digits (docs/design/numerics.md).
//
// A Layout (score_layout.cuh) says which scores a lane has: kRows queries of a tile, row_of(v) that of element v. kKeyRows: a
// tile's rows are keys.
#pragma once

#include "softmax.cuh"  // exp2_approx(): 2^x by one instruction
#include "unrolled.cuh"  // unrolled(): nested unrolled loops

// P is kept in fp16 as P * 2^12, so that small P are normal numbers. It overflows fp16 (65504) only above P = 15.99: rounding of S
// and lse can make P larger than 1, where |S * scale_log2| is about 2^24.
//
// Some kernels pack by integers: pack_shifted, which flushes P * 2^12 below 2^-14, so P below 2^-26, to 0. These are volta's main
// kernels, turing's main kernel with two roles (warp_specialized.cuh: warps that compute P, warps that compute dP), and
// store_scores.cuh where P is one fp16 number. The others pack by conversions, which keep subnormals. (dq.cuh packs dS alone.)
constexpr float kProbabilityBits = 12.f;
constexpr float kProbabilityUnit = 4096.f;  // 2^kProbabilityBits
// pack_shifted takes numbers times 2^-112: then fp32 bits are those of fp16, shifted, as exponent biases differ by 127 - 15 = 112.
constexpr float kExponentShift = kProbabilityBits - 112.f;
constexpr float kExponentUnit = 1.2676506e30f;  // 2^-kExponentShift: restores P from 2^(score - lse + kExponentShift)

// What is added to scores in the exponent: -lse in log2 units plus a shift, of a lane's queries in T tiles of queries. The shift is
// kExponentShift for pack_shifted, which then packs P * 2^12, or 0: store_scores.cuh multiplies P later where it is two fp16
// numbers, and dq.cuh packs dS alone. of_row is loaded as the row statistic -lse / scale (row_statistics.cuh), with lse natural.
template <class Layout, int T>
struct ExponentAddends {
    float of_row[T][Layout::kRows];

    // Turns statistics -lse / scale into addends: scale_log2 is scale * log2(e), by which lse gets log2 units.
    __device__ __forceinline__ void scale(float scale_log2, float shift) {
        unrolled<T, Layout::kRows>([&](int t, int r) { of_row[t][r] = fmaf(of_row[t][r], scale_log2, shift); });
    }
    __device__ __forceinline__ float of(int t, int v) const { return of_row[t][Layout::row_of(v)]; }
};

// Computes P times 2^shift from S = Q K^T in place, for M x N tiles of E elements a lane, in a kernel without score modifiers.
template <class Layout, int M, int N, int E, int T>
__device__ __forceinline__ void exponentials(float (&s)[M][N][E], float scale_log2, const ExponentAddends<Layout, T>& addends) {
    static_assert(T == (Layout::kKeyRows ? N : M), "the tiles of queries");
    unrolled<M, N, E>([&](int m, int n, int v) {
        s[m][n][v] = exp2_approx(fmaf(s[m][n][v], scale_log2, addends.of(Layout::kKeyRows ? n : m, v)));
    });
}
