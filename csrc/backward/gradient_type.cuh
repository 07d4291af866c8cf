// In which type dq, dk and dv leave the kernels: fp16, or bf16 where the problem's tensors are bf16 (src/ops/bf16.rs).
#pragma once

#include "half.cuh"
#include "seqlen_info.cuh"
#include "volta_fa_params.h"

// Whether it is bf16; plain kernels know fp16 only.
__device__ __forceinline__ bool gradients_are_bf16(const BwdParams& p) { return kHasBf16Gradients && p.gradients_are_bf16; }

template <bool BF16>
__device__ __forceinline__ unsigned to_gradient2(float lo, float hi) {
    return BF16 ? to_bf16x2(lo, hi) : to_half2(lo, hi);
}
