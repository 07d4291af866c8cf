// Inline PTX of the backward kernels: values that must stay in registers (see also remat.cuh), and loads and atomics on global
// memory (see also tile.cuh).
#pragma once

#include "tile.cuh"

// Two shared addresses in one register. The volatile PTX hides their computation: otherwise the compiler would recompute each
// from threadIdx under register pressure. Addresses are even and below 2^17, so that half of each fits 16 bits.
class AddressPair {
    unsigned packed_;

public:
    __device__ __forceinline__ AddressPair(unsigned first, unsigned second) : packed_(first / 2 | second / 2 << 16) {
        asm volatile("mov.b32 %0, %0;" : "+r"(packed_));
    }
    __device__ __forceinline__ unsigned first() const { return (packed_ & 0xffff) * 2; }
    __device__ __forceinline__ unsigned second() const { return (packed_ >> 16) * 2; }
};

// Keeps a pointer in registers; see keep_in_register(int) in remat.cuh.
__device__ __forceinline__ float* keep_in_register(float* x) {
    asm volatile("mov.b64 %0, %0;" : "+l"(x));
    return x;
}

// Loads and atomics that name the global address space, which the compiler cannot infer after keep_in_register(). load_global4
// caches in L1 (PTX's default), _constant takes the read-only path (.nc), _l2 caches in L2 only (.cg). add_global is an atomic
// addition without a return value.
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
__device__ __forceinline__ float4 load_global4_l2(const float* p) {
    float4 r;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void add_global(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
