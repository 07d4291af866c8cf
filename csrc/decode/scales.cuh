// Scales and zero points of int8 and int4 caches in the decode kernels (mainloop.cuh, volta/decode/mla.cuh). A cached number is
// (code - zero point) * scale, where each token and head has its own; int8 has no zero points.
//
// StepScales holds those of a step's tokens in a warp's registers. ProbabilityScale applies the scales of values: they multiply
// the probabilities, because the product P V mixes tokens whose scales differ. Scales of keys multiply the scores directly.
#pragma once

#include "decode/tile_scheduler.cuh"  // kTokenScales, kKeyZeroPoints, kValueZeroPoints: what the cache's formats have

namespace decode {

// Scales and zero points of a step's kStepTokens tokens (8 or 16). They come from kCount tensors: scales of keys and values, zero
// points of keys and values. A register holds the numbers of kTensorsPerRegister tensors, kStepTokens lanes each: lane l has that
// of token l % kStepTokens.
struct StepScales {
    // Number of each tensor, for pair(). Registers take them in this order.
    static constexpr int kKeyScale = 0, kValueScale = 1, kKeyZeroPoint = 2, kValueZeroPoint = kKeyZeroPoints ? 3 : 2;
    // 2 for int8, 4 for int4, 3 for keys in int8 with values in int4.
    static constexpr int kCount = 2 + kKeyZeroPoints + kValueZeroPoints;
    static constexpr int kTensorsPerRegister = kCount * kStepTokens < 32 ? kCount : 32 / kStepTokens,
                         kLanes = kTensorsPerRegister * kStepTokens,
                         kRegisters = (kCount + kTensorsPerRegister - 1) / kTensorsPerRegister;
    float own[kRegisters];

    // Returns the tensor (address and strides) whose values this lane has in register i. Register 1 exists only where a register
    // holds two tensors.
    __device__ __forceinline__ static const CacheScale& lane_scale(const CacheScales& s, int i) {
        const int tensor = (threadIdx.x & 31) / kStepTokens % kTensorsPerRegister;  // number in the register
        if (kTensorsPerRegister == 4) return tensor < 2 ? tensor == 0 ? s.k : s.v : tensor == 2 ? s.k_zero_point : s.v_zero_point;
        if (kTensorsPerRegister == 3 && tensor == 2) return s.v_zero_point;
        if (i == 0) return tensor == 0 ? s.k : s.v;
        // without zero points of keys, all lanes of the second register have those of values
        return kKeyZeroPoints && tensor == 0 ? s.k_zero_point : s.v_zero_point;
    }
    // Returns a tensor's values of two neighboring tokens, by shuffles: all lanes call it together.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        const int first = tensor % kTensorsPerRegister * kStepTokens + token;
        const float x = own[tensor / kTensorsPerRegister];
        return make_float2(__shfl_sync(~0u, x, first), __shfl_sync(~0u, x, first + 1));
    }
};

// One row's unit for probabilities times scales of values.
//
// Let p be a probability: 1 for a score of row_max, and at most 2^7, because row_max moves lazily (softmax.cuh). Packed as fp16 p *
// kPackedOne (2^8) it reaches 2^15, which leaves no room for a scale. So a row has a unit, a power of two: packed is p * kPackedOne
// * scale / unit, and the output accumulates in units. A move of the unit brings the step's largest one to [1, 2). The unit moves
// lazily, like row_max: where a packed number would exceed 2^15, and with row_max, so that small scales lose no bits. For a
// negative or non-finite scale callers make the row's sum NaN.
struct ProbabilityScale {
    float inverse = 1.f;  // 1 / unit
    float offset = 0.f;  // int4: what zero points add to every column, in units, times kPackingShift (2^-112, softmax.cuh)

    // Bits of 2^15 * 2^-112 (pack_shifted, softmax.cuh), the largest to be packed. As integers, NaN and negative numbers exceed it.
    static constexpr unsigned kLargest = (127u - 97u) << 23;
    __device__ __forceinline__ static bool exceeds(float2 p) {
        return __float_as_uint(p.x) > kLargest || __float_as_uint(p.y) > kLargest;
    }
    // Returns p * scale / unit * kPackedOne * 2^-112: the exponent field is fp16's, as pack_shifted wants. Adding 0 makes -0, above
    // kLargest, 0.
    __device__ __forceinline__ float2 scaled(float2 p, float2 scale) const {
        const float packing = inverse * (kPackedOne * kPackingShift);
        return make_float2(fmaf(p.x, scale.x * packing, 0.f), fmaf(p.y, scale.y * packing, 0.f));
    }
    // Adds two tokens' packed probabilities times -zero point to the offset. From packed ones, because the output has the same
    // rounding, and most of it cancels. << 13 turns a half's bits into an fp32 number times 2^-112.
    __device__ __forceinline__ void add_zero_points(unsigned packed, float2 zero) {
        offset = fmaf(-__uint_as_float((packed & 0x7fff) << 13), zero.x, offset);
        offset = fmaf(-__uint_as_float(packed >> 16 << 13), zero.y, offset);
    }
    // Sets the unit to the power of two at or below `largest`: the row's largest probability * scale * kPackedOne. Returns the
    // factor for the accumulated output, old unit / new unit.
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

// Packs two probabilities to fp16 times kPackedOne. If tokens have scales, ProbabilityScale::scaled has applied that factor.
__device__ __forceinline__ unsigned pack(float lo, float hi) {
    return kTokenScales ? pack_shifted(lo, hi) : pack_probabilities(lo, hi);
}

}  // namespace decode
