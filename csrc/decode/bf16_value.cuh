// bf16 KV caches for products that take fp16 (sm_70 and sm_75 have no bf16 product). Converts a step's registers in place.
//
// Keys and queries saturate, as volta_fa::fwd converts q and k. Values keep bf16's range: a warp multiplies them by a power of
// two (Bf16ValueScaler), and divides the output by it at the end.
#pragma once

#include "decode/cache_registers.cuh"
#include "half.cuh"

namespace decode {

// Two numbers with bf16's 8 significant bits to packed fp16. Only numbers below 2^-17 lose bits. Rounds toward zero, which ends
// at the largest fp16, not at infinity. This takes an HADD2 each, where the conversion instruction uses the slow XU pipe.
__device__ __forceinline__ unsigned to_half2_saturating(float lo, float hi) {
    unsigned packed;
    asm("{.reg .f16 l, h; cvt.rz.f16.f32 l, %1; cvt.rz.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(packed) : "f"(lo), "f"(hi));
    return packed;
}
// Packed bf16 to packed fp16, saturating. Infinities stay.
__device__ __forceinline__ unsigned bf16x2_to_half2(unsigned packed) {
    const float2 x = bf16x2_to_float2(packed);
    return to_half2_saturating(x.x, x.y);
}
__device__ __forceinline__ uint4 bf16_chunk_to_half(const uint4& x) {
    return make_uint4(bf16x2_to_half2(x.x), bf16x2_to_half2(x.y), bf16x2_to_half2(x.z), bf16x2_to_half2(x.w));
}
template <int Chunks, int Spread>
__device__ __forceinline__ void convert_keys(Columns<Chunks, Spread>& k) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(k.words) / sizeof(unsigned)); i++) {
        k.words[i] = bf16x2_to_half2(k.words[i]);
        // Limits how many conversions ptxas interleaves: it would run out of registers.
        if (Chunks > 4 && i % 8 == 7) __syncwarp();
    }
}

// Multiplies a warp's bf16 values so that they fit fp16. The factor is a power of two, from the largest value so far. It
// changes lazily: only when a value would not fit, and then the accumulated output changes with it.
class Bf16ValueScaler {
    float factor_ = 0x1p126f;  // of the values; it only decreases

    // If a scaled value exceeds kLimit, the factor becomes one that puts the largest value below 2^kTargetExponent. That leaves
    // room for values that grow, and keeps all bits of values down to 2^-27 of the largest.
    static constexpr float kLimit = 32768.f;
    static constexpr int kTargetExponent = 13;

public:
    // Scales and converts a step's values in place. Calls rescale(x) if the accumulated output has to be multiplied by x. All
    // lanes of the warp call it together.
    template <class Words, class Rescale>
    __device__ __forceinline__ void convert(Words& v, Rescale rescale) {
        // The lower half of each word stays: it adds less than one bit in the last place to the upper number.
        float largest = 0.f;
        each_word(v, [&](unsigned& word) {
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word))));
        });
        if (__any_sync(~0u, largest * factor_ > kLimit)) {
            // Infinities must not change the scale of other columns.
            largest = 0.f;
            each_word(v, [&](unsigned& word) {
                const float2 x = bf16x2_to_float2(word);
                if (fabsf(x.x) <= kMaxFinite) largest = fmaxf(largest, fabsf(x.x));
                if (fabsf(x.y) <= kMaxFinite) largest = fmaxf(largest, fabsf(x.y));
            });
#pragma unroll
            for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane_mask));
            if (largest * factor_ > kLimit) {
                // `largest` is below 2^(exponent - 126).
                const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
                const float updated = __uint_as_float((kTargetExponent + 126 - exponent + 127) << 23);
                rescale(updated / factor_);
                factor_ = updated;
            }
        }
        each_word(v, [&](unsigned& word) {
            asm volatile("" : "+r"(word));  // no register for the conversions of the loops above
            const float2 x = bf16x2_to_float2(word);
            word = to_half2_saturating(x.x * factor_, x.y * factor_);
        });
    }
    __device__ __forceinline__ float factor() const { return factor_; }
    // Sets a smaller factor.
    __device__ __forceinline__ void lower(float factor) { factor_ = factor; }
    // Factor from the accumulated output to the output.
    __device__ __forceinline__ float inverse() const { return 1.f / factor_; }

private:
    static constexpr float kMaxFinite = 3.4028235e38f;
    template <int Chunks, class F>
    __device__ __forceinline__ static void each_word(Values<Chunks> (&v)[kStepTiles], F f) {
#pragma unroll
        for (auto& tile : v)
#pragma unroll
            for (auto& token : tile.token) each_word(token.words, f);
    }
    template <int Loads, class F>
    __device__ __forceinline__ static void each_word(unsigned (&v)[Loads][4], F f) {
#pragma unroll
        for (auto& load : v) each_word(load, f);
    }
    template <int Words, class F>
    __device__ __forceinline__ static void each_word(unsigned (&words)[Words], F f) {
#pragma unroll
        for (unsigned& word : words) f(word);
    }
};

}  // namespace decode
