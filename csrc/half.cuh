// Pairs of fp16 or bf16 in a 32-bit word: conversions from and to fp32, arithmetic on fp16, byte permutations. For all kernels.
#pragma once

// Returns a word of two 16-bit halves: with `upper` the upper ones of a and b, else their lower ones, a's in the result's lower
// half. Each hexadecimal digit of __byte_perm's selector chooses a byte of the result, the last digit the lowest one: 0 to 3 are
// bytes of a, 4 to 7 of b.
__device__ __forceinline__ unsigned halves(unsigned a, unsigned b, bool upper) {
    return __byte_perm(a, b, upper ? 0x7632 : 0x5410);
}
__device__ __forceinline__ unsigned lower_halves(unsigned a, unsigned b) { return halves(a, b, false); }
__device__ __forceinline__ unsigned upper_halves(unsigned a, unsigned b) { return halves(a, b, true); }

// Two floats to packed fp16, rounded to nearest even. The conversions take the XU pipe, which also computes exp2, at a quarter of
// the FMA pipe's rate. So inner loops of the softmax pack by integers instead (pack_shifted, softmax.cuh).
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
// carries into the exponent, and overflows to infinity as it should. Some NaN would become numbers, so all become one NaN.
__device__ __forceinline__ unsigned to_bf16x2(float lo, float hi) {
    const auto rounded = [](float x) {  // returns bf16 in the upper half
        const unsigned bits = __float_as_uint(x);
        return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : 0x7fff0000u;
    };
    return upper_halves(rounded(lo), rounded(hi));
}

// Packed bf16 to two floats.
__device__ __forceinline__ float2 bf16x2_to_float2(unsigned packed) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

// Pack and unpack a pair of bf16 or fp16, for code whose type is a parameter or a constant of the kernel.
__device__ __forceinline__ unsigned pack2(float lo, float hi, bool is_bf16) {
    return is_bf16 ? to_bf16x2(lo, hi) : to_half2(lo, hi);
}
__device__ __forceinline__ float2 unpack2(unsigned packed, bool is_bf16) {
    return is_bf16 ? bf16x2_to_float2(packed) : to_float2(packed);
}
// Unpack four, and eight elements in their order. Written out, because with calls of unpack2() ptxas schedules the conversions in
// another order, and kernels' machine code changes.
__device__ __forceinline__ void unpack4(float (&x)[4], const uint2& packed, bool is_bf16) {
    const float2 a = is_bf16 ? bf16x2_to_float2(packed.x) : to_float2(packed.x);
    const float2 b = is_bf16 ? bf16x2_to_float2(packed.y) : to_float2(packed.y);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
}
__device__ __forceinline__ void unpack8(float (&x)[8], const uint4& packed, bool is_bf16) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = is_bf16 ? bf16x2_to_float2(words[i]) : to_float2(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

// Arithmetic on packed fp16.
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
