// Between fp16 and fp32, in pairs.
#pragma once

// Two floats to packed fp16, rounded to nearest (the XU pipe: not for inner loops).
__device__ __forceinline__ unsigned to_half2(float lo, float hi) {
    unsigned packed;
    asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(packed)
        : "f"(lo), "f"(hi));
    return packed;
}

// Packed fp16 to two floats.
__device__ __forceinline__ float2 to_float2(unsigned packed) {
    float2 r;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(packed));
    return r;
}
