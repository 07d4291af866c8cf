// bf16 KV caches for products that take fp16 (sm_70 and sm_75 have no bf16 product). Converts the registers of a step, the tokens
// that a warp computes at once, in place. Used by mainloop.cuh and cooperative_loader.cuh.
//
// The conversion keeps bf16's range: a warp multiplies its queries, keys and values by one power of two each (Bf16Scaler). It
// divides scores by those of queries and keys, and the output by that of values at the end.
#pragma once

#include "decode/cache_registers.cuh"  // Keys, Values: a lane's registers of K and V, in kStepTiles tiles; Columns: of one row
#include "half.cuh"  // bf16x2_to_float2(): a word of two bf16 to fp32

namespace decode {

// Converts two numbers with bf16's 8 significant bits to packed fp16. Only numbers below 2^-17 lose bits, as fp16 ends at 2^-24.
// Rounds toward zero, so large ones become the largest fp16, not infinity. ptxas makes each cvt.rz an HADD2, cvt.rn a slow F2F.
__device__ __forceinline__ unsigned to_half2_saturating(float lo, float hi) {
    unsigned packed;
    asm("{.reg .f16 l, h; cvt.rz.f16.f32 l, %1; cvt.rz.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(packed) : "f"(lo), "f"(hi));
    return packed;
}
// Returns 1 / x of a power of two from 2^-126 to 2^126: subtracts its exponent from twice the bias, 0x7f000000 = 127 << 24.
__device__ __forceinline__ float inverse_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }

// What becomes of numbers far above a warp's others. kFit: the factor makes room for them. kSaturate: beyond about 2^21 times the
// median of the lanes' largest numbers they become fp16's largest number, and the others keep their digits. For keys: scores of
// saturated keys stay so large that these are all of a row's softmax or none of it.
enum class Outliers { kFit, kSaturate };

// Multiplies a warp's bf16 numbers so that they fit fp16. The factor is a power of two, from the largest number so far. It
// changes lazily: only when a number would not fit, and then the caller rescales what it has accumulated from earlier values.
class Bf16Scaler {
    float factor_ = 0x1p126f;  // only decreases

    // If a scaled number exceeds kLimit (fp16 ends at 65504), the factor becomes one that puts the largest into [2^12, 2^13). That
    // leaves room for numbers that grow, and keeps all bits of those down to 2^-29 of the largest (2^-17 / 2^12).
    static constexpr float kLimit = 32768.f;
    static constexpr int kTargetExponent = 13;

public:
    // Scales and converts a step's numbers `v` (Keys, Values or loaded words) in place. Calls rescale(x) if the accumulated output
    // has to be multiplied by x. All lanes of the warp call it together.
    template <Outliers Policy = Outliers::kFit, class Words, class Rescale>
    __device__ __forceinline__ void convert(Words& v, Rescale rescale) {
        // A word as fp32 is its upper bf16, plus less than one unit in the last place from its lower half: good enough for a bound.
        float largest = 0.f;
        each_word(v, [&](unsigned& word) {
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word))));
        });
        if (__any_sync(~0u, largest * factor_ > kLimit)) {
            // The exact maximum, without infinities and NaN, which must not change the factor of other columns.
            largest = 0.f;
            each_word(v, [&](unsigned& word) {
                const float2 x = bf16x2_to_float2(word);
                if (fabsf(x.x) <= kMaxFinite) largest = fmaxf(largest, fabsf(x.x));
                if (fabsf(x.y) <= kMaxFinite) largest = fmaxf(largest, fabsf(x.y));
            });
            const float median = Policy == Outliers::kSaturate ? median_of_lanes(largest) : 0.f;
#pragma unroll
            for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane_mask));
            // Larger numbers saturate if they are finite when scaled: at most 2^110 times this `largest`, they stay below 2^123.
            if (Policy == Outliers::kSaturate) largest = fminf(largest, fmaxf(median * kOutlier, largest * 0x1p-110f));
            if (largest * factor_ > kLimit) {
                const float updated = factor_for(largest);
                rescale(updated / factor_);
                factor_ = updated;
            }
        }
        each_word(v, [&](unsigned& word) {
            asm volatile("" : "+r"(word));  // opaque, so that no registers keep the fp32 numbers of the loops above
            word = converted(word);
        });
    }
    // Lowers the factor, if necessary, so that numbers up to `largest` fit. For queries, before their only conversion.
    __device__ __forceinline__ void fit(float largest) {
        if (largest * factor_ > kLimit) factor_ = factor_for(largest);
    }
    __device__ __forceinline__ uint4 converted(const uint4& x) const {
        return make_uint4(converted(x.x), converted(x.y), converted(x.z), converted(x.w));
    }
    __device__ __forceinline__ float factor() const { return factor_; }
    // Sets a smaller factor: that of another warp (cooperative_loader.cuh), whose numbers this warp multiplies too.
    __device__ __forceinline__ void lower(float factor) { factor_ = factor; }
    // Returns the factor from products of scaled numbers to those of the given ones.
    __device__ __forceinline__ float inverse() const { return inverse_power(factor_); }

    static constexpr float kMaxFinite = 3.4028235e38f;  // the largest finite fp32

private:
    __device__ __forceinline__ unsigned converted(unsigned word) const {
        const float2 x = bf16x2_to_float2(word);
        return to_half2_saturating(x.x * factor_, x.y * factor_);
    }
    // The median times this is scaled to at most 2^13. fp16 ends near 2^16, so saturation begins near 2^18 * 2^3 medians.
    static constexpr float kOutlier = 0x1p18f;
    // Returns the median of the lanes' positive numbers, 0 if there is none. It is at most 2^105, so that a multiple is finite.
    __device__ __forceinline__ static float median_of_lanes(float x) {
        int smaller = 0;  // lanes before this one in ascending order
#pragma unroll 1
        for (int lane = 0; lane < 32; lane++) {
            const float other = __shfl_sync(~0u, x, lane);
            smaller += other < x || (other == x && lane < static_cast<int>(threadIdx.x % 32));
        }
        const int zeros = __popc(__ballot_sync(~0u, x == 0.f));
        const unsigned is_median = __ballot_sync(~0u, smaller == zeros + (31 - zeros) / 2);
        // If all are 0, no lane is the median: __ffs() - 1 is -1, and reads a 0 of lane 31.
        return fminf(__shfl_sync(~0u, x, __ffs(is_median) - 1), 0x1p105f);
    }
    // Returns the power of two that scales `largest` to below 2^kTargetExponent.
    __device__ __forceinline__ static float factor_for(float largest) {
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);  // biased: `largest` is below 2^(exponent - 126)
        return __uint_as_float((kTargetExponent + 126 - exponent + 127) << 23);
    }
    // Calls f(word) for each register, two bf16 numbers, of Values, of Keys (Columns), and of CooperativeLoader's loads.
    template <int Chunks, class F>
    __device__ __forceinline__ static void each_word(Values<Chunks> (&v)[kStepTiles], F f) {
#pragma unroll
        for (auto& tile : v)
#pragma unroll
            for (auto& token : tile.token) each_word(token.words, f);
    }
    template <int Tiles, CacheFormat Format, int Chunks, int Spread, class F>
    __device__ __forceinline__ static void each_word(Columns<Format, Chunks, Spread> (&k)[Tiles], F f) {
#pragma unroll
        for (auto& tile : k) each_word(tile.words, f);
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
