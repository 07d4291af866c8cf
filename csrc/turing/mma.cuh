// Tensor-core products of the turing family: mma.sync.m16n8k8, ldmatrix, lane layouts. For all turing kernels with products.
//
// C (16 x 8, fp32) += A (16 x 8, fp16) B (8 x 8, fp16). m, k and n are the row of A and C, the column of A, and the column of B and
// C. Let g = lane / 4 and t = lane % 4. h is a lane's register of A (0 or 1), v its element (in A and B: 0 or 1, of the register's
// pair of fp16; in C 0 to 3, a float each):
//
//   A row-major   m = g + 8*h                             k = 2*t + v
//   B             k = 2*t + v                             n = g
//   C, fp32       m = g + 8*(v>>1)                        n = 2*t + (v&1)
//
// So a tile of C, packed to fp16, is operand A of a product over its columns, without any exchange between lanes: P of P V, from
// the accumulators of S.
#pragma once

namespace turing {

using u32 = unsigned;
using Accumulator = float[4];

// A lane's indices in the layouts above.
struct Lane {
    int lane;  // 0 to 31
    int group;  // g
    int quad;  // t

    __device__ __forceinline__ constexpr explicit Lane(int lane_) : lane(lane_), group(lane >> 2), quad(lane & 3) {}
};

// c += a * b. Not volatile: a warp's products may be reordered freely.
__device__ __forceinline__ void mma(Accumulator& c, const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Loads four 8x8 matrices from shared memory (ldmatrix). Lane i has the address of row i % 8 of matrix i / 8. It gets, in r[m], two
// elements of row g of matrix m; transposed, of column g.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

}  // namespace turing
