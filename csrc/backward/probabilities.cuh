// Recomputes probabilities in the backward pass: P = 2^(score - lse) in log2 units, and the power of two by which P is scaled
// as fp16. Used by the main and dq kernels.
//
// volta's products S begin with -lse / scale (row_statistics.cuh), so S includes it. Main kernels with a score function cannot,
// because it takes the product alone: they add -lse to its value. turing's kernels add -lse in the exponent's multiply-add.
#pragma once

#include "softmax.cuh"

// P is kept in fp16 as P * 2^12. volta and turing's main kernels with two roles pack by integers (pack_shifted), which flushes
// values below 2^-14, so P below 2^-26 becomes 0. turing's other kernels pack by conversions, which keep subnormals. P * 2^12
// overflows fp16 only above P = 15.99: rounding of S and lse can make P larger than 1, where |S * scale_log2| is about 2^24.
constexpr float kProbabilityBits = 12.f;
constexpr float kProbabilityUnit = 4096.f;  // 2^kProbabilityBits
constexpr float kExponentShift = kProbabilityBits - 112.f;  // 112: see pack_shifted (softmax.cuh)
constexpr float kExponentUnit = 1.2676506e30f;  // 2^-kExponentShift: restores P from 2^(score - lse + kExponentShift)

// Computes 2^(s * scale_log2 + shift) in place, for M x N tiles of which a lane has E elements each. With shift =
// kExponentShift, pack_shifted then packs P * 2^12. Used by volta's kernels without score modifiers.
template <int M, int N, int E>
__device__ __forceinline__ void exponentials(float (&s)[M][N][E], float scale_log2, float shift) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < E; v++) s[m][n][v] = exp2_approx(fmaf(s[m][n][v], scale_log2, shift));
}
