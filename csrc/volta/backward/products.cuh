// Products of the volta backward kernels whose results stay in registers: scores (S^T, dP^T), and gradients of the thread block's
// own rows (dK and dV in main kernels, dQ in dq.cuh), with their store at the end. Called by a warp in single_role.cuh,
// warp_specialized.cuh, dq.cuh and stored.cuh, between barriers of these files; operands lie in shared memory. Own rows are those
// that a thread block owns (keys, in dq.cuh queries), step rows those that it visits, S::kStep at a time.
//
//   S                 Shape (shape.cuh): kChunks chunks (16 bytes, eight columns) and kRowBytes bytes of a row of Q, K, V or dO
//   m, n, j           a tile of 16 own rows of the warp, below M; a tile of 16 step rows, below N; a panel of the warp, below J
//   panel             32 columns of a gradient; the warp has every PanelStep-th one
//   kScoreChunks, kScoreRowBytes  a row of a tile of P^T or dS^T: 4 chunks of eight step rows, and its bytes
//   swizzled(r, c)    byte offset of chunk c of row r in a tile with permuted chunks
//   chunk_after(x, n) the address n chunks after x in a row of a swizzled tile (tile.cuh), whose chunks are permuted by XOR
//   row_swizzle(n)    by how many chunks the swizzle moves a chunk from a row to the row n further
//   kHasScoreFeatures the kernel has code for softcap, ALiBi, bias or dropout (features.cuh)
//   remat_*()         reads special registers again (ptx.cuh)
#pragma once

#include "backward/gradient_output.cuh"  // store_gradient2(): two neighbors of a gradient
#include "backward/tiles.cuh"
#include "volta/backward/fragments.cuh"

namespace volta {

// ---- S^T = K Q^T and dP^T = V dO^T ----------------------------------------------------------------

// A lane's operands of S^T or dP^T for one chunk of headdim: M tiles of own rows (a), N tiles of step rows (b). Addresses:
// own_operand(), step_operand() (fragments.cuh) at that chunk. multiply_low() adds products of the chunk's columns 0 to 3 to c,
// multiply_high() those of 4 to 7.
template <class S, int M, int N>
struct Fragments {
    uint4 a[M], b[N];
    __device__ __forceinline__ Fragments(u32 a_address, u32 b_address) {
        a[0] = load_shared(a_address);
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = load_shared(b_address + n * 16 * S::kRowBytes);
#pragma unroll
        for (int m = 1; m < M; m++) a[m] = load_shared(a_address + m * 16 * S::kRowBytes);
    }
    __device__ __forceinline__ void multiply_low(Accumulator (&c)[M][N]) const {
        unrolled<M, N>([&](int m, int n) { mma_row_col(c[m][n], a[m].x, a[m].y, b[n].x, b[n].y); });
    }
    __device__ __forceinline__ void multiply_high(Accumulator (&c)[M][N]) const {
        unrolled<M, N>([&](int m, int n) { mma_row_col(c[m][n], a[m].z, a[m].w, b[n].z, b[n].w); });
    }
};

// ---- dV += P^T dO, dK += dS^T Q, or dQ += dS K --------------------------------------------------------------------

// A warp's gradient: c[m][j][i] has 16 own rows m, and of panel j columns 0 to 3 (i = 0) or 4 to 7 (1) of each chunk of eight.
template <int M, int J>
using Gradient = Accumulator[M][J][2];

// Adds the product over the rows of a step, at most 32 (for longer steps dq.cuh calls it once for every 32). Addresses:
// score_operand() (A) and column_operand() (B) of fragments.cuh. The warp computes its first `panels` panels. Compact: half of the
// code, four step rows in an iteration instead of eight, for kernels that would not fit the instruction cache.
template <class S, int PanelStep, bool Compact = kHasScoreFeatures, int M, int J>
__device__ __forceinline__ void accumulate(Gradient<M, J>& c, u32 a_address, u32 b_address, int panels = J) {
    constexpr int kRows = S::kStep < 32 ? S::kStep : 32;
    if (Compact) {
#pragma unroll 1
        for (int row = 0; row < kRows; row += 4) {
            const u32 a0 = a_address ^ (row * 2);  // step rows are columns of A's tile, 2 bytes each; XOR adds, as in chunk_after()
            uint2 a[M];
#pragma unroll
            for (int m = 0; m < M; m++) a[m] = load_shared2(a0 + m * 16 * kScoreRowBytes);
            // the swizzle repeats every eight rows; `row` is number 0 or 4 of these
            const u32 b0 = chunk_after<S::kChunks>(b_address, row % 8 ? row_swizzle<S::kChunks>(4) : 0) + row * S::kRowBytes;
#pragma unroll
            for (int j = 0; j < J; j++) {
                if (j >= panels) break;
                const uint4 b = load_shared(chunk_after<S::kChunks>(b0, 4 * PanelStep * j));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma_row_row(c[m][j][0], a[m].x, a[m].y, b.x, b.y);
                    mma_row_row(c[m][j][1], a[m].x, a[m].y, b.z, b.w);
                }
            }
        }
        return;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < kRows / 8; chunk++) {
        const u32 a0 = chunk_after<kScoreChunks>(a_address, chunk);
        uint4 a[M];
#pragma unroll
        for (int m = 0; m < M; m++) a[m] = load_shared(a0 + m * 16 * kScoreRowBytes);
        const u32 b_row = b_address + chunk * (8 * S::kRowBytes);
#pragma unroll
        for (int h = 0; h < 2; h++) {  // four step rows each
            const u32 b_half = chunk_after<S::kChunks>(b_row, row_swizzle<S::kChunks>(4 * h));
            uint4 b[J];
#pragma unroll
            for (int j = 0; j < J; j++)
                if (j < panels) b[j] = load_shared(chunk_after<S::kChunks>(b_half, 4 * PanelStep * j) + 4 * h * S::kRowBytes);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int j = 0; j < J; j++) {
                    if (j >= panels) break;
                    const u32 a_low = h ? a[m].z : a[m].x, a_high = h ? a[m].w : a[m].y;
                    mma_row_row(c[m][j][0], a_low, a_high, b[j].x, b[j].y);
                    mma_row_row(c[m][j][1], a_low, a_high, b[j].z, b[j].w);
                }
        }
    }
}

// Calls f(row, column, x, y) for each two neighbors x, y of a row in the lane's part of a warp's gradient, times `factor`. The warp
// has the rows from first_row on, and every PanelStep-th panel from first_panel on. score_own(), column_in_panel(): row and column
// of element v (fragments.cuh).
template <int PanelStep, int M, int J, class F>
__device__ __forceinline__ void for_each_pair(const Gradient<M, J>& c, float factor, int first_row, int first_panel, F f) {
    const Lane lane(remat_thread_index() & 31);  // else the lane is kept, or spilled, from the kernel's first use on
    unrolled<M, J, 2>([&](int m, int j, int i) {
#pragma unroll
        for (int v = 0; v < 8; v += 2)
            f(first_row + score_own(lane, m, v), 32 * (first_panel + PanelStep * j) + column_in_panel(lane, i, v),
              c[m][j][i][v] * factor, c[m][j][i][v + 1] * factor);
    });
}

// Stores a warp's gradient times `factor` as fp16 to the shared tile at address `tile`, which shared_to_output (backward/tiles.cuh)
// copies after a barrier.
template <class S, int PanelStep, int M, int J>
__device__ __forceinline__ void to_shared(const Gradient<M, J>& c, float factor, u32 tile, int first_row, int first_panel) {
    for_each_pair<PanelStep>(c, factor, first_row, first_panel, [&](int row, int column, float x, float y) {
        store_shared1(tile + swizzled<S::kChunks>(row, column / kChunk) + column % kChunk * 2, to_half2(x, y));
    });
}

// Stores a warp's gradient as fp32 to the output `out` of `head`. The sequence begins at row `origin` of out, and the thread block
// at row first_row of the sequence, which has all_rows rows. The warp's first row is warp_row rows further. `headdim`: columns of
// the output. Grid gives the batch entry: BatchAxis reads blockIdx.z. head_base() is the address of the head's row 0 as if elements
// were fp16, fp32_element() that of the same element in fp32 (tile.cuh).
template <int PanelStep, int M, int J, class Grid = BatchAxis>
__device__ __forceinline__ void to_fp32_output(const Gradient<M, J>& c, float factor, int warp_row, int first_panel,
                                               const BwdParams& p, const Output& out, int head, int origin, int first_row,
                                               int all_rows, int headdim, const Grid& grid = Grid()) {
    float* base = fp32_element(out, head_base(out, grid.batch(p), head));
    for_each_pair<PanelStep>(c, factor, first_row + warp_row, first_panel, [&](int row, int column, float x, float y) {
        if (row < all_rows && column < headdim) store_gradient2(base + (origin + row) * out.row_stride + column, x, y);
    });
}

}  // namespace volta
