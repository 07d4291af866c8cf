// How the backward kernels leave gradients: what a main kernel does with dq, and the output dtype of dq, dk and dv. Used where
// main, dq and postprocess kernels write gradients.
#pragma once

#include "half.cuh"  // to_half2(): two fp32 to packed fp16
#include "seqlen_info.cuh"  // kHasFp32Gradients
#include "tile.cuh"  // rows_of(), fp32_element(): addresses, for includers
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// What a main kernel does with dq. Its blocks own keys and compute dk and dv, but each block has only a part of every row of dq.
// Template parameter of {volta,turing}/backward/single_role.cuh and warp_specialized.cuh; Pass::dq_mode in src/kernels/passes.rs
// chooses it for each kernel.
enum class DqMode {
    kSeparate,  // leaves dq to a second kernel (dq.cuh, dq_warp_specialized.cuh): deterministic, no atomics
    kAtomicAdd,  // adds dq to an fp32 accumulator by atomics; the preprocess kernel clears it, the postprocess kernel converts it
    // Stores dq itself, because the block has all keys of its heads: the fused kernel, the whole backward pass in one launch. It
    // also computes each row's delta, rowsum(dO * O), as preprocess would, and visits all query rows: dq is 0 if one sees no key.
    kStore,
};

// Returns whether the output dtype is fp32, else fp16. It is fp32 where the caller's tensors were cast to fp16 operands
// (src/ops/scaled.rs), because sums of many rows may leave fp16's range. A parameter says so; kernels compiled without the feature
// fp32_gradients (kHasFp32Gradients) have only the fp16 code.
__device__ __forceinline__ bool gradients_are_fp32(const BwdParams& p) { return kHasFp32Gradients && p.gradients_are_fp32; }

// Stores two neighboring elements of a gradient, as fp32, or as fp16 (unsigned short).
__device__ __forceinline__ void store_gradient2(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }
__device__ __forceinline__ void store_gradient2(unsigned short* to, float x, float y) {
    *reinterpret_cast<unsigned*>(to) = to_half2(x, y);
}
