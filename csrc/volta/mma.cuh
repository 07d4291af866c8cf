// Tensor-core products of the volta family (sm_70): mma.sync.m8n8k4, C (8x8, fp32) += A (8x4, fp16) * B (4x8, fp16), and its lane
// layouts. Included by all volta kernels with products.
//
// One m8n8k4 is four independent 8x8x4 products, one per quad-pair of a warp. Quad-pair q is lanes 4q to 4q+3 and 16+4q to
// 16+4q+3. Inside it a lane is number t = lane%4 + 4*(lane>=16), 0 to 7. v is a lane's element: 0 to 3 of an operand, 0 to 7 of the
// accumulator. m is its row of A and C, n its column of B and C, and k the index that is summed over:
//
//   A row-major   m = t                                   k = v
//   A col-major   k = t%4                                 m = 4*(t/4) + v
//   B col-major   n = t                                   k = v
//   B row-major   k = t%4                                 n = 4*(t/4) + v
//   C, fp32       m = (t&1) + (v&2) + 4*(t>>2)            n = (v&1) + (t&2) + (v&4)
//
// Most kernels arrange the four quad-pairs as 2x2: a warp's tile of C is 16x16, and quad-pair (qm, qn) has eight of its rows
// and eight of its columns. The two quad-pairs of a column then share each B fragment, and the two of a row each A fragment. So
// a 16-byte shared load feeds twice the products of a 4x1 arrangement. The kernel chooses which eight rows and columns.
#pragma once

namespace volta {

using u32 = unsigned;
using Accumulator = float[8];

// A lane's coordinates in the 2x2 arrangement.
struct Lane {
    int lane;  // 0 to 31
    int quad;  // t % 4
    int half;  // t / 4: 0 for lanes 0 to 15, 1 for lanes 16 to 31
    int t;  // 0 to 7 in the quad-pair
    int qm, qn;  // row and column of the quad-pair in the 2x2 arrangement

    __device__ __forceinline__ Lane() : Lane(threadIdx.x & 31) {}
    __device__ __forceinline__ constexpr explicit Lane(int lane_)
        : lane(lane_), quad(lane & 3), half(lane >> 4), t(quad + 4 * half), qm((lane >> 2) & 1), qn((lane >> 3) & 1) {}
};

// mma_row_col: c += a * b, with A row-major and B col-major. The others' names say their layouts too. A register pair of an operand
// is elements v = 0 to 3 of the layouts above. Not volatile: the compiler may reorder a warp's products.
#define VOLTA_MMA(NAME, A_LAYOUT, B_LAYOUT)                                                                  \
    __device__ __forceinline__ void NAME(Accumulator& c, u32 a0, u32 a1, u32 b0, u32 b1) {                   \
        asm("mma.sync.aligned.m8n8k4." #A_LAYOUT "." #B_LAYOUT                                               \
            ".f32.f16.f16.f32 "                                                                              \
            "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"                      \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) \
            : "r"(a0), "r"(a1), "r"(b0), "r"(b1));                                                           \
    }
VOLTA_MMA(mma_row_col, row, col)
VOLTA_MMA(mma_row_row, row, row)
VOLTA_MMA(mma_col_row, col, row)
#undef VOLTA_MMA

}  // namespace volta
