// A cache of bf16, for products that take fp16: of the same size, so what a step has in registers becomes fp16 where it is.
#pragma once

#include "decode/cache_registers.cuh"
#include "half.cuh"

namespace decode {

// Two numbers of bf16's eight bits to packed fp16, which loses bits of those below 2^-17 alone. Towards zero: that ends at the
// largest number, where rounding to nearest would end at infinity; and it is an HADD2 each, not an F2F of the XU pipe.
__device__ __forceinline__ unsigned to_half2_saturating(float lo, float hi) {
    unsigned packed;
    asm("{.reg .f16 l, h; cvt.rz.f16.f32 l, %1; cvt.rz.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(packed) : "f"(lo), "f"(hi));
    return packed;
}
// Packed bf16 to packed fp16, as volta_fa::fwd has q and k: saturated. Infinities stay.
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
        // or ptxas has all of many at once in registers that there are not
        if (Chunks > 4 && i % 8 == 7) __syncwarp();
    }
}

// Values, which results are linear in, have bf16's whole range: a warp's are multiplied by a power of two that its largest so far
// says. It moves lazily, where a larger one would not fit, and what has been accumulated with it.
class Bf16ValueScaler {
    float factor_ = 0x1p126f;  // of values; only smaller ones follow

    // What is multiplied may be so large; where it is larger, it is to be less than 2^kPlace: with room for some that grow, and so
    // much above fp16's least numbers that a value has all its bits up to 2^-27 of the largest.
    static constexpr float kLimit = 32768.f;
    static constexpr int kTargetExponent = 13;

public:
    // Of a step: in place. rescale(x): what is accumulated is to be x times as large. All lanes of the warp together.
    template <class Words, class Rescale>
    __device__ __forceinline__ void convert(Words& v, Rescale rescale) {
        // the lower half of a word is not worth removing here: it can make a number larger by less than its last bit
        float largest = 0.f;
        each_word(v, [&](unsigned& word) {
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word))));
        });
        if (__any_sync(~0u, largest * factor_ > kLimit)) {
            // infinities stay, in their column; they must not change the others
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
                // largest is below 2^(exponent - 126)
                const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
                const float updated = __uint_as_float((kTargetExponent + 126 - exponent + 127) << 23);
                rescale(updated / factor_);
                factor_ = updated;
            }
        }
        each_word(v, [&](unsigned& word) {
            asm volatile("" : "+r"(word));  // no register for what was made of it above
            const float2 x = bf16x2_to_float2(word);
            word = to_half2_saturating(x.x * factor_, x.y * factor_);
        });
    }
    __device__ __forceinline__ float factor() const { return factor_; }
    // A smaller factor.
    __device__ __forceinline__ void lower(float factor) { factor_ = factor; }
    // What makes outputs of what is accumulated.
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
