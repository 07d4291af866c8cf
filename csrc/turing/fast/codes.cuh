// int8 codes of the fast forward (`volta_fa::fwd_fast`, src/ops/fast.rs): integers of -127 to 127, which Q K^T multiplies. A number
// is code * scale. Here is where K's codes and scales lie, and how numbers become codes. The prepare kernel (prepare.cuh) makes the
// codes of K; the forward kernel (forward.cuh) reads them, and makes those of its queries (queries.cuh).
//
// A scale block is 64 keys with four scales. Its keys 8i + 2t and 8i + 2t + 1 share scale t: those that the lanes with lane % 4 = t
// have in each tile of 8 keys (turing/fast/mma.cuh). So a lane needs one scale for a scale block. A sequence begins with a new one.
// V has no codes: products take fp16 V * 2^-e, finite values below 1. v_exponent() computes e from v_max, the largest |V|.
#pragma once

#include "half.cuh"
#include "ptx.cuh"
#include "seqlen_info.cuh"
#include "turing/fast/mma.cuh"

namespace turing {

constexpr int kScaleKeys = 64, kScales = 4;  // keys of a scale block, and its scales
// Maximum number of keys, evenly spaced, in KeyCodes::mean. With smooth_k, K less this mean is quantized. It need not be exact: the
// softmax is the same for any vector that all keys lose.
constexpr int kMeanKeys = 128;
// Smallest scale: the product of two is a normal number, so that a hidden key's score of -inf times it stays -inf, not NaN.
constexpr float kSmallestScale = 1e-18f;

// Where the codes of one sequence and KV head lie in global memory. In a packed tensor sequence b begins with scale block
// k_offset / 64 + b: the sequences before it have at most that many, because each has at most one that is not full. p.batch counts
// the entries of the whole call; a launch takes those from first_batch on. p.k_rows: rows of codes of one KV head, a multiple
// of 64. p.v_max_stride: maxima of one KV head and entry, one for each thread block of the longest sequence.
template <int Headdim>
struct KeyCodes {
    signed char* codes;  // of key 0; Headdim bytes a key
    float* scales;  // of scale block 0; kScales each
    float* mean;  // of K over keys: Headdim columns, 0 without smooth_k
    float* v_max;  // largest finite |V| of the keys of each thread block of the prepare kernel

    __device__ __forceinline__ KeyCodes(const FastParams& p, const BlockSeqlenInfo& sequence, int head_k) {
        const int batch = p.lengths.first_batch + blockIdx.z;
        const long long entry_blocks = (static_cast<long long>(p.problem.seqlen_k) + kScaleKeys - 1) / kScaleKeys;
        // the sequence's first scale block: its number in the KV head, and in the tensor
        const long long in_head = p.lengths.cu_seqlens_k ? sequence.k_offset() / kScaleKeys + batch : batch * entry_blocks;
        const long long scale_block = head_k * (p.k_rows / kScaleKeys) + in_head;
        const long long entry = static_cast<long long>(head_k) * p.batch + batch;
        codes = reinterpret_cast<signed char*>(p.k_codes) + scale_block * kScaleKeys * Headdim;
        scales = p.k_scales + scale_block * kScales;
        mean = p.k_mean + entry * Headdim;
        v_max = p.v_max + entry * p.v_max_stride;
    }
};

// Returns four codes in a word, x[0] in its lowest byte: x * factor, at most 127 in magnitude, rounded to nearest even. Added to
// kSumZero (1.5 * 2^23, mma.cuh), the integer is in the lowest bits of the float.
__device__ __forceinline__ u32 to_codes(const float (&x)[4], float factor) {
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(fmaf(x[i], factor, kSumZero));
    // the lowest bytes of all four words
    return lower_halves(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040));
}
// Factor that makes codes of numbers up to `largest` in magnitude, and the codes' scale, its inverse. If `largest` is below 127
// kSmallestScale, 1.27e-16, the scale is not the inverse but kSmallestScale: numbers seem larger than they are, up to 1.27e-16.
// 1e-30 keeps the factor finite if all numbers are 0.
__device__ __forceinline__ float code_factor(float largest) { return 127.f / fmaxf(largest, 1e-30f); }
__device__ __forceinline__ float code_scale(float largest) { return fmaxf(largest * (1.f / 127.f), kSmallestScale); }

// One stage of a Hadamard transform (option `rotate`), which spreads outliers over all columns: a and b become a + b and a - b.
__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
}
// Returns the lane's result of a stage with the lane whose number differs in `lane_bit` (the difference, if this lane has the bit).
__device__ __forceinline__ float butterfly_lanes(float x, int lane_bit) {
    const float other = __shfl_xor_sync(~0u, x, lane_bit);
    return threadIdx.x & lane_bit ? other - x : x + other;
}

// Returns the smallest exponent e with |v| < 2^e for the finite elements of a sequence of `keys` keys, but at least -14 for fp16
// and -126 for bf16; 0 if all are 0. v_max: a maximum for each block_keys keys. All lanes of the warp call it together.
__device__ __forceinline__ int v_exponent(const float* v_max, int keys, int block_keys, ElementType element) {
    float largest = 0.f;
    for (int i = threadIdx.x & 31; i * block_keys < keys; i += 32) largest = fmaxf(largest, v_max[i]);
    largest = warp_max(largest);
    // V is multiplied by 2^-e: fp16 V in fp16 (forward.cuh), where that is at most 2^14; bf16 V in fp32 (prepare.cuh), at most
    // 2^126. Forward's write_output() multiplies by 2^e.
    const int least = element == ElementType::Bf16 ? -126 : -14;
    return largest == 0.f ? 0 : max(static_cast<int>(__float_as_uint(largest) >> 23) - 126, least);
}
// x * 2^exponent, in two steps because 2^128 is no float.
__device__ __forceinline__ float times_power(float x, int exponent) {
    const int half = exponent / 2;
    return x * __int_as_float(half + 127 << 23) * __int_as_float(exponent - half + 127 << 23);
}

}  // namespace turing
