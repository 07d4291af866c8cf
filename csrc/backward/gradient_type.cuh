// Output dtype of dq, dk and dv: fp16, or fp32 if the problem's tensors were cast to fp16 (src/ops/scaled.rs): sums of many rows
// may leave fp16's range. Used where kernels write dq, dk and dv, and by postprocess.cuh.
#pragma once

#include "half.cuh"
#include "seqlen_info.cuh"
#include "volta_fa_params.h"

// Returns whether gradients are fp32. Kernels without the feature fp32_gradients have only the fp16 code.
__device__ __forceinline__ bool gradients_are_fp32(const BwdParams& p) { return kHasFp32Gradients && p.gradients_are_fp32; }

// Address of an element of an fp32 output. `element`: its address if elements were fp16.
__device__ __forceinline__ float* fp32_element(const Output& out, const unsigned short* element) {
    return reinterpret_cast<float*>(out.ptr) + (element - out.ptr);
}
// Stores two neighboring elements of a gradient.
__device__ __forceinline__ void store_gradient2(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ __forceinline__ void store_gradient2(unsigned short* to, float x, float y) {
    *reinterpret_cast<unsigned*>(to) = to_half2(x, y);
}
