// Quantizes rows (K or V of one token and head) for int8, int4 and fp8 KV caches: fp32 numbers to codes, scales and zero points.
// Used by append.cuh. Bitwise identical to python/volta_fa/kv_cache/formats.py.
//
// A code stands for scale * code (int8: codes -127 to 127; fp8) or scale * (code - zero_point) (int4: codes 0 to 15). int8 and int4
// rows get a scale from their own numbers (kTokenScales), int4 a zero point too (kZeroPoints); fp8 rows get the caller's scale.
// kMaxCode is a format's largest code, of fp8 as a number.
#pragma once

#include "quantized.cuh"  // Element, CacheFormatInfo: facts of a format

// Returns x / scale as an fp8 byte, rounded to nearest even. Saturates; NaN stays NaN.
template <CacheFormat Format>
__device__ __forceinline__ unsigned fp8_code(float x, float scale) {
    constexpr int kMantissa = Element<Format>::kMantissaBits, kLeastExponent = Element<Format>::kMinExponent,
                  kBias = Element<Format>::kExponentBias;
    float y = __fdiv_rn(x, scale);
    const unsigned sign = __float_as_uint(y) >> 24 & 0x80;
    if (y != y) return sign | 0x7f;  // NaN in e4m3 and in e5m2
    y = fminf(fabsf(y), CacheFormatInfo<Format>::kMaxCode);
    // y's exponent; that of the smallest normal number for subnormals, which have the same unit in the last place (`ulp`).
    const int exponent = max(static_cast<int>(__float_as_uint(y) >> 23) - 127, kLeastExponent);
    const float ulp = __uint_as_float((exponent - kMantissa + 127) << 23),
                inverse = __uint_as_float((kMantissa - exponent + 127) << 23);
    y = rintf(y * inverse) * ulp;
    const int rounded = static_cast<int>(__float_as_uint(y) >> 23) - 127;
    if (rounded < kLeastExponent) return sign | static_cast<unsigned>(y * inverse);  // subnormal: the mantissa is y in ulps
    return sign | (rounded + kBias) << kMantissa | (__float_as_uint(y) >> (23 - kMantissa) & ((1 << kMantissa) - 1));
}

// Scale and zero point of a row; fp8 has the scale alone. `finite`: whether all numbers are. `unit` is 1, or 1/2 in rows whose
// range exceeds fp32; code() computes (x * unit - origin) / (scale * unit). `origin`: the number that code 0 stands for, times
// unit.
struct RowScale {
    float scale, zero_point, origin, unit;
    bool finite;

    // Computes them from the row's smallest and largest number (int8 and int4).
    template <CacheFormat Format>
    __device__ __forceinline__ static RowScale of(float low, float high) {
        using Info = CacheFormatInfo<Format>;
        RowScale r;
        constexpr float kLargest = 3.402823466e38f;  // fp32's largest number
        r.finite = fabsf(low) <= kLargest && fabsf(high) <= kLargest;
        if constexpr (Info::kZeroPoints) {
            // The range may overflow. Then codes are computed from halves of the numbers, which are exact.
            const bool overflows = high - low > kLargest;
            r.unit = overflows ? 0.5f : 1.f;
            r.origin = low * r.unit;
            const float spread = __fdiv_rn(high * r.unit - r.origin, Info::kMaxCode);
            // a row of equal numbers: code 0 and the zero point 1 or -1 give exactly this number
            r.scale = spread == 0.f ? fabsf(low) : overflows ? 2.f * spread : spread;
            r.zero_point = r.scale == 0.f ? 0.f : __fdiv_rn(-low, r.scale);
        } else {
            r.scale = __fdiv_rn(fmaxf(-low, high), Info::kMaxCode);
            r.zero_point = r.origin = 0.f;
            r.unit = 1.f;
        }
        return r;
    }
    // Returns the code of a number of the row. Rows of int8 and int4 that are not finite have codes 0 and a NaN scale (append.cuh).
    template <CacheFormat Format>
    __device__ __forceinline__ int code(float x) const {
        using Info = CacheFormatInfo<Format>;
        if constexpr (!Info::kTokenScales) return fp8_code<Format>(x, scale);
        if (!finite || scale == 0.f) return 0;
        const float code = rintf(__fdiv_rn(x * unit - origin, scale * unit));
        return static_cast<int>(fminf(fmaxf(code, Info::kZeroPoints ? 0.f : -Info::kMaxCode), Info::kMaxCode));
    }
};
