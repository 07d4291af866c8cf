// A pointwise function of scores, softcap, with its derivative, for kernels of 16-bit tensors. It is the first of the score
// modifiers, before ALiBi and bias (score_mod.cuh, which includes this file). Kernels use ScoreFunction and know no formula. It
// maps a product q.k to a state, from which scores and derivatives follow cheaply:
//
//   f(softmax_scale * product) = factor() * state(product) + constant()      in log2 units (times log2(e))
//   f'(softmax_scale * product) = derivative(state(product))
//
// f is increasing, so the largest product of a row has the largest score. (Its state is the smallest: factor() is negative.) A
// softmax may take states as scores and factor() as their scale: a constant changes the lse alone. A second function would be a
// class like Softcap, with a feature of its own.
#pragma once

#include "ptx.cuh"  // remat_parameter()
#include "softmax.cuh"  // exp2_approx(), log2_approx(), kLog2e
#include "volta_fa_params.h"  // generated from src/params: Problem (scale_log2: softmax_scale * log2(e)), ScoreOptions

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// softcap * tanh(x), with x = softmax_scale * product / softcap. The state is the logistic function 1 / (e^2x + 1), and tanh(x)
// is 1 - 2 * state, with an absolute error of about 2^-23: enough for a score. sm_70 has no tanh instruction.
class Softcap {
    float to_exponent_;  // 2 * softmax_scale / softcap, in log2 units. inverse_function_parameter is 1 / softcap
    float cap_;  // softcap, in log2 units

public:
    static constexpr unsigned kFeature = kFeatureSoftcap;  // bit in sets of features (features.cuh)

    __device__ __forceinline__ Softcap(const Problem& p, const ScoreOptions& o)
        : to_exponent_(2.f * p.scale_log2 * o.inverse_function_parameter), cap_(o.function_parameter * kLog2e) {}
    // Reads the parameters from constant memory again, so that nothing derived from them holds registers between steps.
    __device__ __forceinline__ static Softcap rematerialized(const Problem& p, ScoreOptions o) {
        o.function_parameter = remat_parameter(o.function_parameter);
        o.inverse_function_parameter = remat_parameter(o.inverse_function_parameter);
        return Softcap(p, o);
    }
    // Returns the function's parameter: 0 if the problem has no score function, else positive.
    __device__ __forceinline__ static float parameter(const ScoreOptions& o) { return o.function_parameter; }

    __device__ __forceinline__ float factor() const { return -2.f * cap_; }
    __device__ __forceinline__ float constant() const { return cap_; }
    __device__ __forceinline__ static float constant_of(float factor) { return -.5f * factor; }  // constant(), from factor()

    __device__ __forceinline__ float state(float product) const { return state(product, kPlain); }
    // Return the score minus constant(), plus `offset`: of a state, and of a product.
    __device__ __forceinline__ float score(float state, float offset) const { return fmaf(factor(), state, offset); }
    __device__ __forceinline__ float of_product(float product, float offset) const {
        return fmaf(factor(), state(product), offset);
    }
    // Returns the score of a product.
    __device__ __forceinline__ float operator()(float product) const { return of_product(product, constant()); }
    __device__ __forceinline__ static float derivative(float state) { return 4.f * fmaf(-state, state, state); }
    // Returns the product that has this state; infinity if none has.
    __device__ __forceinline__ float product(float state) const {
        if (state <= 0.f) return positive_infinity();
        return __fdividef(log2_approx(fmaxf(__fdividef(1.f, state) - 1.f, 0.f)), to_exponent_);
    }

    // How a tile's states are computed. A masked product is -inf. Its score must be -inf, so its state must be infinite, but 1 /
    // (e^2x + 1) would be 1. So a tile with masked products (kMaskable) has states 1 / e^2y, which is 1 / 0 for these. Before it
    // masks, the kernel calls maskable_product(), which turns each product, of x, into that of y with e^2y = e^2x + 1. volta's
    // forward kernels do so.
    using TileKind = float;
    static constexpr TileKind kPlain = 1.f, kMaskable = 0.f;  // addend of the denominator
    __device__ __forceinline__ float state(float product, TileKind kind) const {
        return reciprocal_approx(exp2_approx(product * to_exponent_) + kind);
    }
    // `unit`: maskable_unit(), 1 / to_exponent_, computed once for a tile.
    __device__ __forceinline__ float maskable_product(float product, float unit) const {
        return log2_approx(exp2_approx(product * to_exponent_) + 1.f) * unit;
    }
    __device__ __forceinline__ float maskable_unit() const { return __fdividef(1.f, to_exponent_); }
};

using ScoreFunction = Softcap;
