// Scales.
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

// The scales of a step's tokens, each in a lane: a register has those of kTensors tensors, one after the other.
struct StepScales {
    // in the order of lanes, and then of registers
    static constexpr int kKeyScale = 0, kValueScale = 1, kKeyZeroPoint = 2, kValueZeroPoint = 3;
    static constexpr int kCount = kZeroPoints ? 4 : 2;
    static constexpr int kTensorsPerRegister = kCount * kStepTokens < 32 ? kCount : 32 / kStepTokens,
                         kLanes = kTensorsPerRegister * kStepTokens, kRegisters = kCount / kTensorsPerRegister;
    float own[kRegisters];

    // What a lane has in register i.
    __device__ __forceinline__ static const CacheScale& lane_scale(const CacheScales& s, int i) {
        const int tensor = (threadIdx.x & 31) / kStepTokens % kTensorsPerRegister;
        if (kTensorsPerRegister == 4) return tensor < 2 ? tensor == 0 ? s.k : s.v : tensor == 2 ? s.k_zero_point : s.v_zero_point;
        if (i == 0) return tensor == 0 ? s.k : s.v;
        return tensor == 0 ? s.k_zero_point : s.v_zero_point;
    }
    // Of two neighbouring tokens.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        const int first = tensor % kTensorsPerRegister * kStepTokens + token;
        const float x = own[tensor / kTensorsPerRegister];
        return make_float2(__shfl_sync(~0u, x, first), __shfl_sync(~0u, x, first + 1));
    }
};

constexpr float kTwo112 = 5.1922969e33f;  // 2^112: probabilities are 2^-112 of what is packed (softmax.cuh)

// The scales of values, on their way into probabilities.
//
// Packed probabilities, which softmax.cuh keeps between 2^-14 and 2^15, have little room for a factor. So a row has a unit, a power
// of two: what is packed is probability * scale / unit, and accumulated output counts units. Like the softmax's reference it moves
// lazily: where a product does not fit, and, so that small scales lose no bits, wherever the reference moved. Scales that are
// negative or not finite make a row's sum NaN.
struct ProbabilityScale {
    float inverse = 1.f;  // 1 / unit
    float offset = 0.f;  // int4: what zero points add to all columns, in units, times 2^-112 as the probabilities

    // The largest that may be packed, in probabilities' own scale: bits of 2^(15 - 112). Compared as an integer, so that NaN and
    // what is negative exceed it.
    static constexpr unsigned kLargest = (127u - 97u) << 23;
    __device__ __forceinline__ static bool exceeds(float2 p) {
        return __float_as_uint(p.x) > kLargest || __float_as_uint(p.y) > kLargest;
    }
    // (adding 0 makes 0 of -0)
    __device__ __forceinline__ float2 scaled(float2 p, float2 scale) const {
        return make_float2(fmaf(p.x, scale.x * inverse, 0.f), fmaf(p.y, scale.y * inverse, 0.f));
    }
    // Of probabilities as they are packed: their rounding is the output's too, and most of both cancels out.
    __device__ __forceinline__ void add_zero_points(unsigned packed, float2 zero) {
        offset = fmaf(-__uint_as_float((packed & 0x7fff) << 13), zero.x, offset);
        offset = fmaf(-__uint_as_float(packed >> 16 << 13), zero.y, offset);
    }
    // Where `largest` is the row's largest product of a probability (1 is 1) and a scale. Returns the factor for what is
    // accumulated.
    __device__ __forceinline__ float update(float largest) {
        // between 2^-40 and 2^40: outputs are fp16, whatever is beyond
        const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -40), 40);
        const float updated = largest > 0.f ? __uint_as_float((127 - exponent) << 23) : inverse;
        const float factor = updated / inverse;
        inverse = updated;
        offset *= factor;
        return factor;
    }
};

}  // namespace decode
