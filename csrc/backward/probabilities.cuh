// From scores to probabilities: in which units, whoever holds them.
#pragma once

#include "softmax.cuh"

// P is kept in fp16 as P * 2^12: the integer packing flushes what is below 2^-14, so that probabilities
// count down to 2^-26, and the other end leaves room for P up to 15, where rounding in S and lse makes it
// larger than 1 (at |S| of about 2^24 / scale).
constexpr float kProbabilityBits = 12.f;
constexpr float kProbabilityUnit = 4096.f;                  // 2^kProbabilityBits
constexpr float kExponentShift = kProbabilityBits - 112.f;  // 112: see pack_probabilities
constexpr float kExponentUnit = 1.2676506e30f;              // 2^-kExponentShift

// P * 2^shift in place, of M x N tiles of which a lane holds E elements each: with kExponentShift, packed by pack_probabilities, it
// is P * 2^12.
template <int M, int N, int E>
__device__ __forceinline__ void exponentials(float (&s)[M][N][E], float scale_log2, float shift) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < E; v++) s[m][n][v] = exp2_approx(fmaf(s[m][n][v], scale_log2, shift));
}
