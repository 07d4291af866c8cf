// The softmax of the forward pass, online over tiles of keys, with a lazy row maximum.
//
// A probability is computed as 2^(score * scale_log2 - reference). In exact arithmetic any reference
// gives the same result; it only has to keep the largest probability of a row inside the range of fp16
// and the others precise. So the reference follows the row maximum lazily: it moves, and the output
// accumulators are rescaled, only once a score exceeds the maximum it was set at by 2^kRescaleThreshold. On most
// inputs that is the first tile and a few others, and the test for it is one compare a score.
//
// Probabilities are packed to fp16 with integer operations: the conversion instruction runs on the
// quarter-rate XU pipe, which exp2 already fills. The fp32 bits of x * 2^-112 are those of the fp16 x,
// shifted left by 13, because the two exponent biases differ by 127 - 15 = 112. So exp2 gets its
// argument reduced by 112, and packing is a shift and a rounding addition. (A NaN does not survive the
// packing, but it does survive in the row's sum, which makes the whole row of the output NaN.) This flushes fp16 subnormals
// (below 2^-14) to zero; kPackedOne moves the probabilities up to use the other end of fp16's range:
// 1 becomes 2^8, and 2^(kPackedOne + kRescaleThreshold) = 2^15 is the largest that can occur.
//
// Range: references are fp32, so the scheme holds while |score * scale_log2| < 2^24, where one unit in
// the last place of a reference is still below 2. fp16 attention that keeps its scores in fp16
// overflows at 2^16. No reference is lower than the one of a score of -2^24: scores below that, which only a
// bias gives that hides keys, have probability 0 even where a row sees nothing else, as scores of -inf do.
#pragma once

constexpr float kRescaleThreshold = 7.f;
constexpr float kPackedOne = 8.f;                      // log2 of what a probability of 1 is packed as
constexpr float kMaxOffset = 112.f - kPackedOne;  // reference = scaled row maximum + kMaxOffset
constexpr float kLargestScore = 16777216.f;            // 2^24, of |score * scale_log2|
constexpr float kLowest = -3e38f;                      // below every finite score; -inf would make NaN of inf - inf
constexpr float kLn2 = 0.69314718055994531f;

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

// Two values scaled by 2^-112 to packed fp16. "* 8" instead of "<< 3" lets it fuse with the rounding
// addition into one multiply-add; the fp16 is then the upper half of each word.
__device__ __forceinline__ unsigned pack_probabilities(float lo, float hi) {
    const unsigned a = __float_as_uint(lo) * 8u + 0x8000u;
    const unsigned b = __float_as_uint(hi) * 8u + 0x8000u;
    return __byte_perm(a, b, 0x7632);
}

// Which references move, once a score of any of a warp's rows is above its limit. The more do, the later is the next time. But
// where probabilities lie packed that wait for the second product, they are rounded once more: that is harmless below
// 2^-kRescaleThreshold of the row's maximum, and so in rows that had to move.
enum class RescaledRows { kAll, kExceeding };

// What a lane keeps of one row of scores.
struct SoftmaxRow {
    float row_max = kMaxOffset - kLargestScore;  // subtracted from scaled scores
    float limit = kLowest;                              // a score (not scaled) above it moves the reference
    float sum = 0.f;            // of this lane's probabilities, times 2^-kMaxOffset

    __device__ __forceinline__ float probability(float score, float scale_log2) {
        const float p = exp2_approx(fmaf(score, scale_log2, -row_max));
        sum += p;
        return p;
    }

    // Moves the reference to row_maximum (not scaled) unless that is lower; returns the factor for what
    // has been accumulated. A row without visible keys so far has row_maximum = -inf and stays as it is.
    template <RescaledRows Rows>
    __device__ __forceinline__ float update_row_max(float row_maximum, float scale_log2, float inverse_scale_log2) {
        const bool stays = Rows == RescaledRows::kExceeding && !(row_maximum > limit);
        const float moved = stays ? row_max : fmaxf(fmaf(row_maximum, scale_log2, kMaxOffset), row_max);
        const float factor = exp2_approx(row_max - moved);
        row_max = moved;
        limit = (moved - kMaxOffset + kRescaleThreshold) * inverse_scale_log2;
        sum *= factor;
        return factor;
    }

    // Joins the same row over other keys. Returns the factor for what has been accumulated here, and in other_factor
    // that for what was accumulated there.
    __device__ __forceinline__ float merge(float other_row_max, float other_sum, float& other_factor) {
        const float joint = fmaxf(row_max, other_row_max);
        const float factor = exp2_approx(row_max - joint);
        other_factor = exp2_approx(other_row_max - joint);
        sum = sum * factor + other_sum * other_factor;
        row_max = joint;
        return factor;
    }
};

// Of a finished row, from the sum over all its lanes.
struct SoftmaxResult {
    float lse;           // natural logarithm; +inf for a row that sees no key
    float output_scale;  // for the accumulated output; 0 for a row that sees no key

    __device__ __forceinline__ SoftmaxResult(float row_max, float row_sum) {
        const bool empty = row_sum == 0.f;
        lse = empty ? positive_infinity() : kLn2 * (log2_approx(row_sum) + row_max);
        // Output and sum are in units of 2^(112 - reference) and 2^-reference.
        output_scale = empty ? 0.f : __fdividef(1.92592994e-34f /* 2^-112 */, row_sum);
    }
};
