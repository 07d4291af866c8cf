// Quantized KV caches, for the kernels that read or write them: where bytes and scales lie, and what the bytes are in fp16.
// python/volta_fa/kv_cache/formats.py defines the formats.
#pragma once

#include "volta_fa_params.h"

// The first byte of a row of K or V, of KV head `head`, that is row `row` of a page.
__device__ __forceinline__ unsigned char* bytes_of_page(const Operand& x, int page, int row, int head) {
    const long long offset = page * x.batch_stride + row * x.row_stride + head * x.head_stride;
    return reinterpret_cast<unsigned char*>(const_cast<unsigned short*>(x.ptr)) + offset;
}
// A scale or zero point of int8 or int4.
__device__ __forceinline__ float* scale_of_page(const CacheScale& x, int page, int row, int head) {
    return x.ptr + page * x.batch_stride + row * x.row_stride + head * x.head_stride;
}
// fp8's.
__device__ __forceinline__ float scale_of_sequence(const CacheScale& x, int batch, int head) {
    return x.ptr ? __ldg(x.ptr + batch * x.batch_stride + head * x.head_stride) : 1.f;
}

// How eight columns of a row become fp16, exactly. A format has
//   kBits         of an element
//   eight(words)  the columns, in pairs: from as many words as they take
//   arrange(x)    eight columns of fp16 in that order
//   column(p)     which column is at place p of the order
//   kScale        what is in registers is so many times what the bytes stand for,
//   kSplit        and 16 times that at places 4 to 7
template <CacheFormat Format>
struct Element {
    static constexpr int kBits = 16;
    static constexpr float kScale = 1.f;
    static constexpr bool kTwoScales = false;
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ static uint4 permute8(const uint4& x) { return x; }
    __device__ __forceinline__ static constexpr int column(int p) { return p; }
};

struct ByteElement {
    static constexpr int kBits = 8;
    static constexpr float kScale = 1.f;
    static constexpr bool kTwoScales = false;
    __device__ __forceinline__ static uint4 permute8(const uint4& x) { return x; }
    __device__ __forceinline__ static constexpr int column(int p) { return p; }
};

__device__ __forceinline__ unsigned half2_sub(unsigned a, unsigned b) {
    unsigned r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ unsigned half2_mul(unsigned a, unsigned b) {
    unsigned r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A byte below 0x64 is, in fp16, 1024 + the byte. So signed ones are moved up by 128, and what they are then is taken away.
template <>
struct Element<CacheFormat::Int8> : ByteElement {
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned k1024 = 0x64646464, k1152 = 0x64806480;
        const unsigned x = words[0] ^ 0x80808080, y = words[1] ^ 0x80808080;
        return make_uint4(half2_sub(__byte_perm(x, k1024, 0x4140), k1152), half2_sub(__byte_perm(x, k1024, 0x4342), k1152),
                          half2_sub(__byte_perm(y, k1024, 0x4140), k1152), half2_sub(__byte_perm(y, k1024, 0x4342), k1152));
    }
};

// The upper half of fp16.
template <>
struct Element<CacheFormat::E5m2> : ByteElement {
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        return make_uint4(__byte_perm(words[0], 0, 0x1404), __byte_perm(words[0], 0, 0x3424), __byte_perm(words[1], 0, 0x1404),
                          __byte_perm(words[1], 0, 0x3424));
    }
};

// Shifted to where fp16 has exponent and mantissa, the bits are 2^-8 times the number: exponents are biased by 7 and by 15. NaN
// would be 480 of them, and the largest number is 448: by a factor of 2^8 * 144 only that exceeds fp16 and becomes infinite, while
// all others stay exact, of four bits each. Infinities become NaN where they have been multiplied.
template <>
struct Element<CacheFormat::E4m3> : ByteElement {
    static constexpr float kScale = 144.f;
    __device__ __forceinline__ static unsigned pair(unsigned high, unsigned magnitude) {
        const unsigned factor = 0x78807880;  // 36864
        // sign and magnitude in the upper byte, less half the magnitude
        return half2_mul(high - magnitude * 128u, factor);
    }
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned x = words[0], y = words[1], mx = x & 0x7f7f7f7f, my = y & 0x7f7f7f7f;
        return make_uint4(pair(__byte_perm(x, 0, 0x1404), __byte_perm(mx, 0, 0x4140)),
                          pair(__byte_perm(x, 0, 0x3424), __byte_perm(mx, 0, 0x4342)),
                          pair(__byte_perm(y, 0, 0x1404), __byte_perm(my, 0, 0x4140)),
                          pair(__byte_perm(y, 0, 0x3424), __byte_perm(my, 0, 0x4342)));
    }
};

// A nibble at bit 0 of a half is, in fp16, 2^-24 times the code, one at bit 4 2^-20 times: subnormal numbers, which products take
// exactly. So places 0 to 3 are what bits 0 have, and the others bits 4.
template <>
struct Element<CacheFormat::Int4> {
    static constexpr int kBits = 4;
    static constexpr float kScale = 5.9604644775390625e-8f;  // 2^-24
    static constexpr bool kTwoScales = true;
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned x = words[0], y = x >> 8, low = 0x000f000f, high = 0x00f000f0;
        return make_uint4(x & low, y & low, x & high, y & high);
    }
    __device__ __forceinline__ static uint4 permute8(const uint4& x) {
        return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                          __byte_perm(x.y, x.w, 0x7632));
    }
    __device__ __forceinline__ static constexpr int column(int p) { return p % 4 / 2 * 2 + p / 4 + p % 2 * 4; }
};
