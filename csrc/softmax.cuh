// Online softmax over tiles of keys, with a lazy row maximum (FlashAttention-2's update, but rarely taken). Used by the forward and
// decode kernels; the backward pass uses exp2_approx and pack_shifted.
//
// A score is q.k; scale_log2 is |softmax_scale| * log2(e), and q has the scale's sign. A probability is 2^(score * scale_log2 -
// row_max), not yet divided by the row's sum. Any row_max gives the same result in exact arithmetic. It only has to keep the row's
// largest probability inside the range of fp16, and the others precise. So row_max moves, and the output is rescaled, only when a
// scaled score exceeds row_max by more than kRescaleThreshold (log2 units). On most inputs these are the first tile and a few
// others.
//
// Probabilities are packed to fp16 by integer operations, because the conversion instruction runs on the quarter-rate XU pipe,
// which exp2 already fills. The fp32 bits of x * 2^-112 are those of the fp16 x, shifted left by 13, because the exponent biases
// differ by 127 - 15 = 112. So packing is a multiplication by 2^-112, a shift and a rounding addition. The factor is not -112 in
// exp2's argument: there fp32 would round the argument to a multiple of 2^-17, 8e-6, and lse with it (by 8e-6 in all, measured).
// Packing loses a NaN, but the row's sum keeps it, which makes the whole output row NaN. kPackedOne moves probabilities up to use
// the other end of fp16's range: 1 becomes 2^8, and the largest is kPackedOne * 2^kRescaleThreshold = 2^15.
//
// Range: row_max is fp32, so the scheme holds while |score * scale_log2| < 2^24, where one unit in the last place is still below 2.
// row_max begins at -2^24 and never falls. Lower scores come only from a bias that hides keys: their probability is 0 even in a row
// that sees nothing else, as with scores of -inf.
#pragma once

#include "half.cuh"  // upper_halves(): of two words, in one

// How far a scaled score may exceed row_max before row_max moves, log2 units.
constexpr float kRescaleThreshold = 7.f;
constexpr float kPackedOne = 256.f;  // what a probability of 1 is packed as
constexpr float kPackingShift = 1.92592994e-34f;  // 2^-112: factor of the numbers that pack_shifted() takes
constexpr float kLargestScore = 16777216.f;  // 2^24: bound of |score * scale_log2|
constexpr float kLowest = -3e38f;  // a row's first `limit`: below every finite score, so the first tile with one updates row_max
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2e = 1.4426950408889634f;

// 2^x and log2(x) by one instruction each (XU pipe).
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float positive_infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float quiet_nan() { return __int_as_float(0x7fffffff); }

// Returns a number from 0 to 2^15, scaled by 2^-112, as fp16 in the upper half of a word. "* 8" instead of "<< 3" lets the compiler
// fuse it with the rounding addition into one multiply-add.
__device__ __forceinline__ unsigned shifted_sum(float x) { return __float_as_uint(x) * 8u + 0x8000u; }
// Packs two such numbers to fp16.
__device__ __forceinline__ unsigned pack_shifted(float lo, float hi) { return upper_halves(shifted_sum(lo), shifted_sum(hi)); }
// Returns a probability times kPackedOne, scaled by 2^-112 for pack_shifted(). Without .rn ptxas 12.9 takes the bits for 0.
__device__ __forceinline__ float shifted(float probability) {
    float y;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(probability), "f"(kPackedOne * kPackingShift));
    return y;
}
// Packs two probabilities times kPackedOne.
__device__ __forceinline__ unsigned pack_probabilities(float lo, float hi) { return pack_shifted(shifted(lo), shifted(hi)); }

// Which rows move their row_max, that is raise it to their largest score, once any score of the warp exceeds its row's limit. kAll
// moves every row, so that the next move comes later. But where packed probabilities of the previous tile still wait for P V, a
// move rescales them, and rounds them once more. That is harmless only if they become smaller than 2^-kRescaleThreshold of the
// row's maximum, as in rows above their limit. So these kernels use kExceeding: only such rows move.
enum class RescaledRows { kAll, kExceeding };

// A lane's softmax state of one row. Other lanes have the row's other keys: row_max and limit are the row's, the sum is the lane's.
struct SoftmaxRow {
    float row_max = -kLargestScore;  // lazy row maximum: subtracted from scaled scores
    float limit = kLowest;  // an unscaled score above it moves row_max
    float sum = 0.f;  // of this lane's probabilities

    // Returns the probability of a score, and adds it to the sum.
    __device__ __forceinline__ float probability(float score, float scale_log2) {
        const float p = exp2_approx(fmaf(score, scale_log2, -row_max));
        sum += p;
        return p;
    }

    // Moves row_max to `row_maximum`, the row's largest score (unscaled), unless that is lower or, with kExceeding, not above
    // `limit`. Returns the factor for the accumulated output. A row that has seen no key has row_maximum = -inf, and stays.
    template <RescaledRows Rows>
    __device__ __forceinline__ float update_row_max(float row_maximum, float scale_log2, float inverse_scale_log2) {
        const bool stays = Rows == RescaledRows::kExceeding && !(row_maximum > limit);
        const float moved = stays ? row_max : fmaxf(row_maximum * scale_log2, row_max);
        const float factor = exp2_approx(row_max - moved);
        row_max = moved;
        limit = (moved + kRescaleThreshold) * inverse_scale_log2;
        sum *= factor;
        return factor;
    }

    // Joins the state of the same row over other keys. Returns the factor for the output accumulated here, and sets other_factor,
    // the factor for the output accumulated there.
    __device__ __forceinline__ float merge(float other_row_max, float other_sum, float& other_factor) {
        const float joint = fmaxf(row_max, other_row_max);
        const float factor = exp2_approx(row_max - joint);
        other_factor = exp2_approx(other_row_max - joint);
        sum = sum * factor + other_sum * other_factor;
        row_max = joint;
        return factor;
    }
};

// Returns a row's sum rounded to fp16's 11 significant bits, or NaN. See kInexactRowMax.
__device__ __forceinline__ float rounded_like_packed(float sum) {
    const float scaled = __fmul_rn(sum, 8193.f);  // 2^13 + 1: Dekker's splitting of fp32's 24 bits
    return __fsub_rn(scaled, __fsub_rn(scaled, sum));
}
// From this |row_max| on, row_max is rounded so coarsely that a row's only visible key has a probability visibly different from 1,
// because the score in the exponent is not rounded. Packing rounds that probability to 11 bits. So forward kernels
// (forward/output.cuh) round the sum that `out` is divided by too.
constexpr float kInexactRowMax = 8192.f;

// A finished row's results, from its row_max and its sum over all lanes.
struct SoftmaxResult {
    float lse;  // log-sum-exp (natural log); +inf for a row that sees no key
    float output_scale;  // factor for the accumulated output, which has P times kPackedOne; 0 for a row that sees no key

    __device__ __forceinline__ SoftmaxResult(float row_max, float row_sum) {
        const bool empty = row_sum == 0.f;
        lse = empty ? positive_infinity() : kLn2 * (log2_approx(row_sum) + row_max);
        output_scale = empty ? 0.f : __fdividef(1.f / kPackedOne, row_sum);
    }
};
