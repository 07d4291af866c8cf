// Scales and zero points of int8 and int4 caches in the decode kernels (mainloop.cuh, volta/decode/mla.cuh).
//
// StepScales holds those of a step's tokens in a warp's registers. ProbabilityScale applies the scales of values: they multiply
// the probabilities, because the product P V mixes tokens whose scales differ. Scales of keys multiply the scores directly.
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

// Scales and zero points of a step's tokens, one token and tensor per lane. A register holds kTensorsPerRegister tensors.
struct StepScales {
    // Number of each tensor: lanes first, then registers.
    static constexpr int kKeyScale = 0, kValueScale = 1, kKeyZeroPoint = 2, kValueZeroPoint = 3;
    static constexpr int kCount = kZeroPoints ? 4 : 2;
    static constexpr int kTensorsPerRegister = kCount * kStepTokens < 32 ? kCount : 32 / kStepTokens,
                         kLanes = kTensorsPerRegister * kStepTokens, kRegisters = kCount / kTensorsPerRegister;
    float own[kRegisters];

    // The tensor whose value this lane has in register i.
    __device__ __forceinline__ static const CacheScale& lane_scale(const CacheScales& s, int i) {
        const int tensor = (threadIdx.x & 31) / kStepTokens % kTensorsPerRegister;
        if (kTensorsPerRegister == 4) return tensor < 2 ? tensor == 0 ? s.k : s.v : tensor == 2 ? s.k_zero_point : s.v_zero_point;
        if (i == 0) return tensor == 0 ? s.k : s.v;
        return tensor == 0 ? s.k_zero_point : s.v_zero_point;
    }
    // The values of two neighboring tokens.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        const int first = tensor % kTensorsPerRegister * kStepTokens + token;
        const float x = own[tensor / kTensorsPerRegister];
        return make_float2(__shfl_sync(~0u, x, first), __shfl_sync(~0u, x, first + 1));
    }
};

// One row's unit for scaled probabilities.
//
// Packed probabilities reach 2^15 (softmax.cuh), which leaves no room for a scale. So a row has a unit, a power
// of two: packed is probability * scale / unit, and the output accumulates in units. The unit moves lazily, like row_max: where
// a product does not fit, and with row_max, so that small scales lose no bits. For a negative or non-finite scale
// callers make the row's sum NaN.
struct ProbabilityScale {
    float inverse = 1.f;  // 1 / unit
    float offset = 0.f;  // int4: what zero points add to every column, in units, times kPackingShift (2^-112, softmax.cuh)

    // Largest value that may be packed: the bits of 2^(15 - 112). Compared as integers, so that NaN and negative values exceed
    // it.
    static constexpr unsigned kLargest = (127u - 97u) << 23;
    __device__ __forceinline__ static bool exceeds(float2 p) {
        return __float_as_uint(p.x) > kLargest || __float_as_uint(p.y) > kLargest;
    }
    // Returns what pack_shifted packs. Adding 0 turns -0 into 0, whose bits would exceed kLargest.
    __device__ __forceinline__ float2 scaled(float2 p, float2 scale) const {
        const float packing = inverse * (kPackedOne * kPackingShift);
        return make_float2(fmaf(p.x, scale.x * packing, 0.f), fmaf(p.y, scale.y * packing, 0.f));
    }
    // Adds the zero points' part, from packed probabilities: the output has the same rounding, and most of it cancels.
    __device__ __forceinline__ void add_zero_points(unsigned packed, float2 zero) {
        offset = fmaf(-__uint_as_float((packed & 0x7fff) << 13), zero.x, offset);
        offset = fmaf(-__uint_as_float(packed >> 16 << 13), zero.y, offset);
    }
    // Sets the unit to the power of two at or below `largest`, the row's largest probability * scale, times kPackedOne.
    // Returns the factor for the accumulated output.
    __device__ __forceinline__ float update(float largest) {
        // Between 2^-40 and 2^40: outputs are fp16, so units beyond gain nothing.
        const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -40), 40);
        const float updated = largest > 0.f ? __uint_as_float((127 - exponent) << 23) : inverse;
        const float factor = updated / inverse;
        inverse = updated;
        offset *= factor;
        return factor;
    }
};

// Packs two probabilities, which ProbabilityScale::scaled has shifted if each token has scales.
__device__ __forceinline__ unsigned pack(float lo, float hi) {
    return kTokenScales ? pack_shifted(lo, hi) : pack_probabilities(lo, hi);
}

}  // namespace decode
