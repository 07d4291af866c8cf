// The score function of fp32 tensors, with fp32's digits in small scores too. Used by forward/split.cuh and
// backward/store_scores.cuh. score_function.cuh has that of 16-bit tensors, whose error is about 2^-23 of the cap.
#pragma once

#include "score_function.cuh"

// softcap * tanh(x / softcap).
class PreciseSoftcap {
    float to_argument_;  // softmax_scale / softcap
    float cap_;  // softcap, in log2 units

    // Relative errors of at most 2^-23 for small x and 2^-21.9 for others. In fewer registers than tanhf().
    __device__ __forceinline__ static float tanh(float x) {
        constexpr float kSmall = 0.55f;
        if (fabsf(x) >= kSmall)
            return copysignf(fmaf(-2.f, reciprocal_approx(exp2_approx(fabsf(x) * (2.f * kLog2e)) + 1.f), 1.f), x);
        // least squares of the relative error in [0, kSmall]; the terms from x^3 on
        const float s = x * x;
        return fmaf(x * s, fmaf(fmaf(fmaf(0.0164108146f, s, -0.0526556037f), s, 0.1332042217f), s, -0.3333292902f), x);
    }

public:
    __device__ __forceinline__ PreciseSoftcap(const Problem& p, const ScoreOptions& o)
        : to_argument_(p.scale_log2 * o.inverse_function_parameter / kLog2e), cap_(o.function_parameter * kLog2e) {}

    // Returns the score of a product, in log2 units. Sets `slope` to 1 - tanh^2, the derivative by the
    // scaled score.
    __device__ __forceinline__ float operator()(float product, float& slope) const {
        const float x = tanh(product * to_argument_);
        slope = fmaf(-x, x, 1.f);
        return cap_ * x;
    }
    __device__ __forceinline__ float operator()(float product) const {
        float slope;
        return (*this)(product, slope);
    }
};

using PreciseScoreFunction = PreciseSoftcap;

// Returns the score of a product plus an exponent's addend, in log2 units, as the function of this name in backward/modifiers.cuh.
__device__ __forceinline__ float function_score(float product, float addend, const PreciseScoreFunction& function, float& slope) {
    return function(product, slope) + addend;
}
