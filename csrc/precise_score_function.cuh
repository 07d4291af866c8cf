// The score function of fp32 tensors: softcap with a small relative error in small scores too. Used by forward/split.cuh and
// backward/store_scores.cuh. For 16-bit tensors score_function.cuh has a cheaper one, with an error of about 2^-23 of the cap.
#pragma once

#include "score_function.cuh"  // reciprocal_approx(), exp2_approx(); Problem, ScoreOptions (src/params)

// softcap * tanh(x / softcap). function_parameter is softcap, inverse_function_parameter 1 / softcap.
class PreciseSoftcap {
    float to_argument_;  // |softmax_scale| / softcap. scale_log2 is |softmax_scale| * log2(e); q has the scale's sign
    float cap_;  // softcap, in log2 units

    // Relative errors of at most 2^-23 below kSmall and 2^-21.9 above, in fewer registers than tanhf(). Above, it is
    // 1 - 2 / (e^2x + 1), which would lose digits of small x by cancellation.
    __device__ __forceinline__ static float tanh(float x) {
        constexpr float kSmall = 0.55f;
        if (fabsf(x) >= kSmall)
            return copysignf(fmaf(-2.f, reciprocal_approx(exp2_approx(fabsf(x) * (2.f * kLog2e)) + 1.f), 1.f), x);
        // an odd polynomial up to x^9, fitted to the relative error in [0, kSmall] by least squares
        const float s = x * x;
        return fmaf(x * s, fmaf(fmaf(fmaf(0.0164108146f, s, -0.0526556037f), s, 0.1332042217f), s, -0.3333292902f), x);
    }

public:
    __device__ __forceinline__ PreciseSoftcap(const Problem& p, const ScoreOptions& o)
        : to_argument_(p.scale_log2 * o.inverse_function_parameter / kLog2e), cap_(o.function_parameter * kLog2e) {}

    // Returns the score of a product q.k, times log2(e). Sets `slope` to the derivative by |softmax_scale| * product, 1 - tanh^2.
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

using PreciseScoreFunction = PreciseSoftcap;  // the name that kernels use, as ScoreFunction for 16-bit tensors

// Returns the score of a product plus `addend`, the other terms of exp2's argument, in log2 units. An overload of the function for
// 16-bit tensors in backward/modifiers.cuh.
__device__ __forceinline__ float function_score(float product, float addend, const PreciseScoreFunction& function, float& slope) {
    return function(product, slope) + addend;
}
