// In which type dq, dk and dv leave the kernels: fp16, or bf16 where the problem's tensors are bf16 (src/ops/bf16.rs).
#pragma once

#include "half.cuh"
#include "sequence.cuh"
#include "volta_fa_params.h"

// Two floats to packed bf16, rounded to nearest even by integers: sm_70 has no instruction for it. Rounding upwards carries into
// the exponent, and from the largest number to infinity. Of some NaN it would make a number, so each becomes the canonical one.
__device__ __forceinline__ unsigned to_bfloat2(float lo, float hi) {
    const auto rounded = [](float x) {  // its upper half
        const unsigned bits = __float_as_uint(x);
        return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : 0x7fff0000u;
    };
    return __byte_perm(rounded(lo), rounded(hi), 0x7632);
}

// Whether it is bf16; plain kernels know fp16 only.
__device__ __forceinline__ bool gradients_are_bf16(const BwdParams& p) { return kRagged && p.gradients_are_bf16; }

template <bool BF16>
__device__ __forceinline__ unsigned to_gradient2(float lo, float hi) {
    return BF16 ? to_bfloat2(lo, hi) : to_half2(lo, hi);
}
