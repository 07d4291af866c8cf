// Single instructions on memory, and values that stay in registers, beyond those of tile.cuh.
#pragma once

#include "tile.cuh"

// Two shared addresses in one register, opaque to the compiler: it would otherwise recompute each from
// threadIdx wherever it runs short of registers. Addresses are even and below 2^17.
class AddressPair {
    unsigned packed_;

public:
    __device__ __forceinline__ AddressPair(unsigned first, unsigned second) : packed_(first / 2 | second / 2 << 16) {
        asm volatile("mov.b32 %0, %0;" : "+r"(packed_));
    }
    __device__ __forceinline__ unsigned first() const { return (packed_ & 0xffff) * 2; }
    __device__ __forceinline__ unsigned second() const { return (packed_ >> 16) * 2; }
};

// Keeps a pointer that the compiler would otherwise compute again and again. (See pinned() of an int.)
__device__ __forceinline__ float* keep_in_register(float* x) {
    asm volatile("mov.b64 %0, %0;" : "+l"(x));
    return x;
}

// These say that the address is global, which the compiler cannot see behind pinned().
__device__ __forceinline__ float4 load_global4(const float* p) {
    float4 r;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ float4 load_global4_constant(const float* p) {
    float4 r;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
// From L2.
__device__ __forceinline__ float4 load_global4_l2(const float* p) {
    float4 r;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void add_global(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
