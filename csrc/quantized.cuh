// Quantized KV caches (int8, int4, fp8 e4m3 and e5m2): addresses of bytes and scales, and exact conversion of codes, the quantized
// numbers, to fp16. Used by the kernels that read or write such caches (decode, append, dequantize, and the indexer's fp8 keys). A
// number is (code - zero point) * scale; only int4 has zero points. python/volta_fa/kv_cache/formats.py defines the formats.
#pragma once

#include "half.cuh"  // half2_sub(), half2_mul(): on two fp16; lower_halves(), upper_halves()
#include "volta_fa_params.h"  // generated from src/params: Operand, CacheScale, CacheFormat, CacheFormatInfo

// Address of row `row` of a page of K or V, for KV head `head`. Strides count bytes.
__device__ __forceinline__ unsigned char* bytes_of_page(const Operand& x, int page, int row, int head) {
    const long long offset = page * x.batch_stride + row * x.row_stride + head * x.head_stride;
    return reinterpret_cast<unsigned char*>(const_cast<unsigned short*>(x.ptr)) + offset;
}
// Address of a token's scale or zero point. Strides count floats.
__device__ __forceinline__ float* scale_of_page(const CacheScale& x, int page, int row, int head) {
    return x.ptr + page * x.batch_stride + row * x.row_stride + head * x.head_stride;
}
// Scale of a sequence and KV head, for formats without a scale for each token (fp8); 1 if the caller gave none.
__device__ __forceinline__ float scale_of_sequence(const CacheScale& x, int batch, int head) {
    return x.ptr ? __ldg(x.ptr + batch * x.batch_stride + head * x.head_stride) : 1.f;
}

// What the codes of a format are. There is no default: a format without its Element does not compile. (CacheFormatInfo, which the
// build generates from src/kernels/formats.rs, has a format's bits, largest code, and which scales it has.) An Element has
//
//   unpack8(words)    eight columns as packed fp16, exactly, from the words that hold them. Slot p is half p of the result;
//                     slots may permute the columns
//   permute8(x)       puts eight fp16 columns into the same slots
//   column(p)         the column in slot p
//   kScale            the unpacked numbers are kScale times what the codes stand for
//   kTwoScales        slots 4 to 7 have 16 times that factor
//   kNanIsInfinity    a NaN code is unpacked as infinity: users compute x + 0 * x, which makes it NaN
//
// A quantized one also has
//
//   value(code)       what a code stands for as fp32, before zero point and scale
//   kMantissaBits, kMinExponent, kExponentBias    fp8 only: append computes codes from these
template <CacheFormat Format>
struct Element;

// 16-bit caches: nothing to do for fp16, and bf16_value.cuh converts bf16.
template <>
struct Element<CacheFormat::Unquantized> {
    static constexpr float kScale = 1.f;
    static constexpr bool kTwoScales = false, kNanIsInfinity = false;
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    __device__ __forceinline__ static uint4 permute8(const uint4& x) { return x; }
    __device__ __forceinline__ static constexpr int column(int p) { return p; }
};

// What formats of one byte have in common: columns in order.
struct ByteElement {
    static constexpr float kScale = 1.f;
    static constexpr bool kTwoScales = false, kNanIsInfinity = false;
    __device__ __forceinline__ static uint4 permute8(const uint4& x) { return x; }
    __device__ __forceinline__ static constexpr int column(int p) { return p; }
};

// The fp16 number 0x64bb is 1024 + bb (0x6480: 1152). Bytes are moved from [-128, 127] to [0, 255], so 1024 + 128 is subtracted.
// In __byte_perm's selectors digits 0 to 3 are bytes of codes, 4 is the byte 0x64.
template <>
struct Element<CacheFormat::Int8> : ByteElement {
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned k1024 = 0x64646464, k1152 = 0x64806480;
        const unsigned x = words[0] ^ 0x80808080, y = words[1] ^ 0x80808080;
        return make_uint4(half2_sub(__byte_perm(x, k1024, 0x4140), k1152), half2_sub(__byte_perm(x, k1024, 0x4342), k1152),
                          half2_sub(__byte_perm(y, k1024, 0x4140), k1152), half2_sub(__byte_perm(y, k1024, 0x4342), k1152));
    }
    __device__ __forceinline__ static float value(unsigned code) { return static_cast<float>(static_cast<signed char>(code)); }
};

// An e5m2 byte is the upper byte of an fp16 number. (In __byte_perm's selectors here, digit 4 is a byte of 0.)
template <>
struct Element<CacheFormat::E5m2> : ByteElement {
    static constexpr int kMantissaBits = 2, kMinExponent = -14, kExponentBias = 15;
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        return make_uint4(__byte_perm(words[0], 0, 0x1404), __byte_perm(words[0], 0, 0x3424), __byte_perm(words[1], 0, 0x1404),
                          __byte_perm(words[1], 0, 0x3424));
    }
    __device__ __forceinline__ static float value(unsigned code) { return to_float2(code << 8).x; }
};

// e4m3 bits, shifted to fp16's exponent and mantissa, are 2^-8 times the number: the exponent biases are 7 and 15. The NaN code
// would be 480, where the largest number is 448. The factor 2^8 * 144 makes only NaN exceed fp16 and become infinity. All other
// numbers stay exact, because they have four significant bits. Later code turns infinity into NaN.
template <>
struct Element<CacheFormat::E4m3> : ByteElement {
    static constexpr float kScale = 144.f;
    static constexpr bool kNanIsInfinity = true;
    static constexpr int kMantissaBits = 3, kMinExponent = -6, kExponentBias = 7;
    // Two codes as fp16. `high`: in the upper bytes of both halves; `magnitude`: without their signs, in the lower bytes.
    __device__ __forceinline__ static unsigned pair(unsigned high, unsigned magnitude) {
        const unsigned factor = 0x78807880;  // 36864 = 2^8 * 144
        // Sign and magnitude are in the upper byte. Subtracting half the magnitude moves it one bit lower, and the sign stays.
        return half2_mul(high - magnitude * 128u, factor);
    }
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned x = words[0], y = words[1], mx = x & 0x7f7f7f7f, my = y & 0x7f7f7f7f;
        return make_uint4(pair(__byte_perm(x, 0, 0x1404), __byte_perm(mx, 0, 0x4140)),
                          pair(__byte_perm(x, 0, 0x3424), __byte_perm(mx, 0, 0x4342)),
                          pair(__byte_perm(y, 0, 0x1404), __byte_perm(my, 0, 0x4140)),
                          pair(__byte_perm(y, 0, 0x3424), __byte_perm(my, 0, 0x4342)));
    }
    __device__ __forceinline__ static float value(unsigned code) {
        const unsigned magnitude = code & 0x7f;
        const float x = 256.f * to_float2((code & 0x80) << 8 | magnitude << 7).x;  // 2^8: the exponent biases differ by 8
        return magnitude == 0x7f ? __int_as_float(0x7fc00000) : x;
    }
};

// A 4-bit code at bit 0 of an fp16 number's bits is 2^-24 times the code, at bit 4 2^-20 times: fp16 subnormals, which products
// take exactly. So slots 0 to 3 have the codes at bits 0 to 3 of bytes, slots 4 to 7 those at bits 4 to 7. y = x >> 8 brings bytes
// 1 and 3 to the places of bytes 0 and 2. Byte i has columns 2 * i and 2 * i + 1, so the slots have columns 0, 4, 2, 6, 1, 5, 3 and
// 7.
template <>
struct Element<CacheFormat::Int4> {
    static constexpr float kScale = 5.9604644775390625e-8f;  // 2^-24
    static constexpr bool kTwoScales = true, kNanIsInfinity = false;
    __device__ __forceinline__ static uint4 unpack8(const unsigned* words) {
        const unsigned x = words[0], y = x >> 8, low = 0x000f000f, high = 0x00f000f0;
        return make_uint4(x & low, y & low, x & high, y & high);
    }
    __device__ __forceinline__ static uint4 permute8(const uint4& x) {
        return make_uint4(lower_halves(x.x, x.z), lower_halves(x.y, x.w), upper_halves(x.x, x.z), upper_halves(x.y, x.w));
    }
    __device__ __forceinline__ static constexpr int column(int p) { return p % 4 / 2 * 2 + p / 4 + p % 2 * 4; }
    __device__ __forceinline__ static float value(unsigned code) { return static_cast<float>(code); }
};
