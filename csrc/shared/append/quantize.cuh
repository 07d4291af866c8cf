// Quantizes rows for int8, int4 and fp8 KV caches: fp32 numbers to codes, scales and zero points. Used by append.cuh. Bitwise
// identical to python/volta_fa/kv_cache/formats.py.
#pragma once

#include "quantized.cuh"

// Returns x / scale as an fp8 byte, rounded to nearest even. Saturates; NaN stays NaN.
template <CacheFormat Format>
__device__ __forceinline__ unsigned fp8_code(float x, float scale) {
    constexpr int kMantissa = Element<Format>::kMantissaBits, kLeastExponent = Element<Format>::kMinExponent,
                  kBias = Element<Format>::kExponentBias;
    float y = __fdiv_rn(x, scale);
    const unsigned sign = __float_as_uint(y) >> 24 & 0x80;
    if (y != y) return sign | 0x7f;  // NaN in e4m3 and in e5m2
    y = fminf(fabsf(y), CacheFormatInfo<Format>::kMaxCode);
    // Exponent of the last place; below the smallest exponent (subnormals), that of the smallest.
    const int exponent = max(static_cast<int>(__float_as_uint(y) >> 23) - 127, kLeastExponent);
    const float unit = __uint_as_float((exponent - kMantissa + 127) << 23),
                inverse = __uint_as_float((kMantissa - exponent + 127) << 23);
    y = rintf(y * inverse) * unit;
    const int rounded = static_cast<int>(__float_as_uint(y) >> 23) - 127;
    if (rounded < kLeastExponent) return sign | static_cast<unsigned>(y * inverse);
    return sign | (rounded + kBias) << kMantissa | (__float_as_uint(y) >> (23 - kMantissa) & ((1 << kMantissa) - 1));
}

// Scale and zero point of a row, from its smallest and largest number, or given. `origin`: the number of code 0. `finite`: whether
// all numbers are finite.
struct RowScale {
    float scale, zero_point, origin;
    bool finite;

    template <CacheFormat Format>
    __device__ __forceinline__ static RowScale of(float low, float high) {
        using Info = CacheFormatInfo<Format>;
        RowScale r;
        r.finite = fabsf(low) <= 3.402823466e38f && fabsf(high) <= 3.402823466e38f;  // fp32's largest
        if constexpr (Info::kZeroPoints) {
            const float spread = __fdiv_rn(high - low, Info::kMaxCode);
            r.scale = spread == 0.f ? fabsf(low) : spread;
            r.zero_point = r.scale == 0.f ? 0.f : __fdiv_rn(-low, r.scale);
            r.origin = low;
        } else {
            r.scale = __fdiv_rn(fmaxf(-low, high), Info::kMaxCode);
            r.zero_point = r.origin = 0.f;
        }
        return r;
    }
    // Returns the code of a number of the row; with a scale of the row 0 if the row is not finite.
    template <CacheFormat Format>
    __device__ __forceinline__ int code(float x) const {
        using Info = CacheFormatInfo<Format>;
        if constexpr (!Info::kTokenScales) return fp8_code<Format>(x, scale);
        if (!finite || scale == 0.f) return 0;
        const float code = rintf(__fdiv_rn(x - origin, scale));
        return static_cast<int>(fminf(fmaxf(code, Info::kZeroPoints ? 0.f : -Info::kMaxCode), Info::kMaxCode));
    }
};
