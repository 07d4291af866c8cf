// Output dtype of dq, dk and dv: fp16, or bf16 if the problem's tensors are bf16 (src/ops/bf16.rs). Used where kernels
// write dk and dv (volta/backward/products.cuh, turing/backward/fragments.cuh), and by postprocess.cuh.
#pragma once

#include "half.cuh"
#include "seqlen_info.cuh"
#include "volta_fa_params.h"

// Returns whether gradients are bf16. Kernels without the feature bf16_gradients have only the fp16 code.
__device__ __forceinline__ bool gradients_are_bf16(const BwdParams& p) { return kHasBf16Gradients && p.gradients_are_bf16; }

// Packs two fp32 gradients in the output dtype.
template <bool BF16>
__device__ __forceinline__ unsigned to_gradient2(float lo, float hi) {
    return BF16 ? to_bf16x2(lo, hi) : to_half2(lo, hi);
}
