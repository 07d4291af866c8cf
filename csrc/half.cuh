// Conversions between fp32 and pairs of fp16 or bf16 in a 32-bit word.
#pragma once

// Two floats to packed fp16, rounded to nearest even. Uses the slow XU pipe: not for inner loops.
__device__ __forceinline__ unsigned to_half2(float lo, float hi) {
    unsigned packed;
    asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(packed) : "f"(lo), "f"(hi));
    return packed;
}

// Packed fp16 to two floats.
__device__ __forceinline__ float2 to_float2(unsigned packed) {
    float2 r;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(packed));
    return r;
}

// Two floats to packed bf16, rounded to nearest even by integer operations: there is no instruction before sm_80. Rounding up
// carries into the exponent, and overflows to infinity as it should. It would turn some NaN into numbers, so every NaN becomes
// the canonical one.
__device__ __forceinline__ unsigned to_bf16x2(float lo, float hi) {
    const auto rounded = [](float x) {  // returns bf16 in the upper half
        const unsigned bits = __float_as_uint(x);
        return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : 0x7fff0000u;
    };
    return __byte_perm(rounded(lo), rounded(hi), 0x7632);
}

// Packed bf16 to two floats.
__device__ __forceinline__ float2 bf16x2_to_float2(unsigned packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}
