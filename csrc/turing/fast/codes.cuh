// int8 codes of the fast forward (src/ops/fast.rs, `volta_fa::fwd_fast`): where those of K lie with their scales, and how a row
// becomes codes. A number is code * scale. Included by prepare.cuh, which makes the codes of K, and by queries.cuh. Keys are in
// blocks of 64. Keys 8i + 2t and 8i + 2t + 1 of a block share scale t of its four: the keys that the lanes with lane % 4 = t have
// in every tile of 8 (turing/fast/mma.cuh). So a lane needs one scale for a block. A sequence's codes begin on a block. V has no
// codes: products take fp16 V * 2^-e, finite values below 1, where v_exponent() computes e from v_max, the largest |V|.
#pragma once

#include "half.cuh"
#include "ptx.cuh"
#include "seqlen_info.cuh"
#include "turing/fast/mma.cuh"

namespace turing {

constexpr int kScaleKeys = 64, kScales = 4;  // keys of a block, and scales of it
// Maximum number of keys, evenly spaced, in KeyCodes::mean. With smooth_k, K less this mean is quantized. It need not be exact: the
// softmax is the same for any vector that all keys lose.
constexpr int kMeanKeys = 128;
// Smallest scale: the product of two is a normal number, so that a score of -inf stays -inf.
constexpr float kSmallestScale = 1e-18f;

// The codes of one sequence and KV head, made by the prepare kernel. In a packed tensor sequence b begins with block k_offset / 64
// + b: the sequences before it have at most that many blocks, because each has at most one that is not full. p.batch counts the
// entries of the whole call; a launch takes those from first_batch on. p.k_rows: rows of codes of one KV head, a multiple
// of 64. p.v_max_stride: maxima of one KV head and entry, one for each thread block of the longest sequence.
template <int Headdim>
struct KeyCodes {
    signed char* codes;  // of key 0; Headdim bytes a key
    float* scales;  // of block 0; kScales a block
    float* mean;  // Headdim columns, 0 without smooth_k
    float* v_max;  // largest finite |V| of each thread block of the prepare kernel

    __device__ __forceinline__ KeyCodes(const FastParams& p, const BlockSeqlenInfo& sequence, int head_k) {
        const int batch = p.lengths.first_batch + blockIdx.z;
        const long long blocks = (static_cast<long long>(p.problem.seqlen_k) + kScaleKeys - 1) / kScaleKeys;
        const long long first = p.lengths.cu_seqlens_k ? sequence.k_offset() / kScaleKeys + batch : batch * blocks;
        const long long block = head_k * (p.k_rows / kScaleKeys) + first;
        const long long entry = static_cast<long long>(head_k) * p.batch + batch;
        codes = reinterpret_cast<signed char*>(p.k_codes) + block * kScaleKeys * Headdim;
        scales = p.k_scales + block * kScales;
        mean = p.k_mean + entry * Headdim;
        v_max = p.v_max + entry * p.v_max_stride;
    }
};

// Four codes in a word: x * factor, at most 127 in magnitude, rounded to nearest even. Added to kSumZero (1.5 * 2^23, mma.cuh), the
// integer is in the lowest bits of the float.
__device__ __forceinline__ u32 to_codes(const float (&x)[4], float factor) {
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(fmaf(x[i], factor, kSumZero));
    // the lowest bytes of all four
    return lower_halves(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040));
}
// The factor that makes codes of numbers up to `largest` in magnitude, and the codes' scale, its inverse. If `largest` is below
// 1.27e-16 (127 kSmallestScale), the scale is larger: codes then stand for larger numbers, at most 1.27e-16. 1e-30 keeps
// the factor finite if all numbers are 0.
__device__ __forceinline__ float code_factor(float largest) { return 127.f / fmaxf(largest, 1e-30f); }
__device__ __forceinline__ float code_scale(float largest) { return fmaxf(largest * (1.f / 127.f), kSmallestScale); }

// One stage of a Hadamard transform (option `rotate`), which spreads outliers over all columns of Q and of K: sum and difference.
__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}
// Returns the lane's result of a stage with the lane whose number differs in `lane_bit`.
__device__ __forceinline__ float butterfly_lanes(float x, int lane_bit) {
    const float other = __shfl_xor_sync(~0u, x, lane_bit);
    return threadIdx.x & lane_bit ? other - x : x + other;
}

// Returns the smallest exponent e with |v| < 2^e for a sequence's finite elements, but at least -14 for fp16 and -126 for bf16; 0
// if all are 0. v_max: the maxima of blocks of block_keys keys. All lanes of the warp call it together.
__device__ __forceinline__ int v_exponent(const float* v_max, int keys, int block_keys, ElementType element) {
    float largest = 0.f;
    for (int i = threadIdx.x & 31; i * block_keys < keys; i += 32) largest = fmaxf(largest, v_max[i]);
    largest = warp_max(largest);
    // Factors 2^-e are at most 2^14 or 2^126: their inverses are normal numbers.
    const int least = element == ElementType::Bf16 ? -126 : -14;
    return largest == 0.f ? 0 : max(static_cast<int>(__float_as_uint(largest) >> 23) - 126, least);
}
// x * 2^exponent, in two steps because 2^128 is no float.
__device__ __forceinline__ float times_power(float x, int exponent) {
    const int half = exponent / 2;
    return x * __int_as_float(half + 127 << 23) * __int_as_float(exponent - half + 127 << 23);
}

}  // namespace turing
