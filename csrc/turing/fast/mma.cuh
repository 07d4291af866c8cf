// Tensor-core products of the fast forward kernel (forward.cuh): m8n8k16 of int8 for Q K^T, and m16n8k8 with fp16 sums for P V. In
// m8n8k16, lane 4g + t has bytes 4t to 4t + 3 (of 16 int8) of row g of operand A, the same bytes of column g of B, and columns 2t
// and 2t + 1 of row g of C: 8 queries by 8 keys. So two tiles of C, of rows 0 to 7 and 8 to 15, packed to fp16, are operand A of
// m16n8k8.
#pragma once

#include "turing/mma.cuh"

namespace turing {

// Sums begin at these bits, which are the float 1.5 * 2^23. As a float, a sum S of less than 2^22 is then kSumZero + S: no
// conversion instruction, which would run on the slow XU pipe. Headdims up to 256 give at most 127^2 * 256, which is below 2^22.
constexpr u32 kSumZeroBits = 0x4b400000u;
constexpr float kSumZero = 12582912.f;

// c = a * b + zero, where a sum begins (`zero`: a register with kSumZeroBits), and c += a * b: integer sums.
__device__ __forceinline__ void multiply_int8(u32 (&c)[2], u32 a, u32 b, u32 zero) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%4,%4};"
        : "=r"(c[0]), "=r"(c[1])
        : "r"(a), "r"(b), "r"(zero));
}
__device__ __forceinline__ void multiply_add_int8(u32 (&c)[2], u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};" : "+r"(c[0]), "+r"(c[1]) : "r"(a), "r"(b));
}

// c += a * b, fp16 sums: a[0] and c[0] have columns 2t and 2t + 1 of row g, a[1] and c[1] of g + 8; b has rows 2t, 2t + 1 of column
// g.
__device__ __forceinline__ void multiply_add_fp16(u32 (&c)[2], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

}  // namespace turing
