// Output dtype of dq, dk and dv: fp16, or fp32 where the caller's tensors were cast to fp16 operands (src/ops/scaled.rs), because
// sums of many rows may leave fp16's range. Used where main, dq and postprocess kernels write gradients.
#pragma once

#include "half.cuh"
#include "seqlen_info.cuh"  // kHasFp32Gradients
#include "tile.cuh"
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Returns whether gradients are fp32. A parameter says so; kernels without the feature fp32_gradients have only the fp16 code.
__device__ __forceinline__ bool gradients_are_fp32(const BwdParams& p) { return kHasFp32Gradients && p.gradients_are_fp32; }

// Stores two neighboring elements of a gradient, as fp32, or as fp16 (unsigned short).
__device__ __forceinline__ void store_gradient2(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ __forceinline__ void store_gradient2(unsigned short* to, float x, float y) {
    *reinterpret_cast<unsigned*>(to) = to_half2(x, y);
}
