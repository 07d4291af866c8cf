// Products of the forward kernels of fp32 tensors (forward/split.cuh, their template argument Family) on volta's tensor cores. Each
// number is the sum of a high and a low fp16 part. The low one is at most 2^-11 of it, or 2^-10 of P, whose high part is truncated.
// Low times low, so at most 2^-21 of the product, is left out.
//
// A step is 16 keys. Two kernels call, after Queries::load() and with block barriers (|) between their phases:
//
//   split::Forward           multiply(), softmax, split(), add_output() |
//   split::WideForward       multiply_high() | multiply_low() | sum over warps, softmax, split(), add_high() | add_low() |
//
// Forward (headdims 64, 128) has both parts of a step's K and V in shared memory. WideForward (larger headdims) has one part of K
// or V at a time, and gives each warp 128 columns.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, where quad is lane % 4 and half is lane / 16. A quad-pair is in
// row qm (bit 2 of the lane) and column qn (bit 3) of the warp's 2x2 (volta/mma.cuh). ForwardLane's q_row(), k_row() and v_row()
// are the lane's rows of the operands. A chunk (kChunk, kChunkBytes) is eight fp16 columns, 16 bytes; a panel is four chunks.
// s[0].tile[0][0] has the lane's eight scores of the step: one tile [0] of one row tile and one key tile. o[0][j] is output tile j,
// 16 columns. remat_*() read a special register again, so that the value holds no register in between (ptx.cuh).
#pragma once

#include "forward/split.cuh"
#include "volta/forward/layout.cuh"

namespace volta {

struct Split {
    using Layout = ForwardLayout;
    static constexpr int kTiles = 1, kNextTile = 16;  // 16x16 tiles of scores in a step; keys from one tile to the next
    template <int Headdim>
    static constexpr int kOutputTiles = Headdim / 16;
    template <int Headdim>
    using Output = Accumulator[1][kOutputTiles<Headdim>];
    // Returns the key of a step that lies in row `row` of the shared tile.
    __device__ __forceinline__ static constexpr int key_of_row(int row) { return row; }

    // A warp's 16 rows of Headdim columns of Q: the high parts in registers, the low ones in shared memory. In global memory a row
    // has LowColumn high parts, then the low ones. In WideForward a warp has only Headdim (128) of these columns.
    template <int Headdim, int LowColumn = Headdim>
    struct Queries {
        static constexpr int kPartChunks = Headdim / kChunk;  // chunks of a row's high parts; the low ones have as many
        static constexpr int kSharedBytes = (kPartChunks + 1) * kChunkBytes;  // of a row, padded by a chunk against bank conflicts
        uint4 high[kPartChunks];
        u32 low;  // shared address of the lane's row

        // Loads rows from `row` on, of the `rows` that exist; others are 0. `base`: address of row 0; rows are from.row_stride fp16
        // elements apart. sign_flip: 0x80008000 to flip the signs of Q, for a negative softmax_scale, else 0. `shared_rows`: shared
        // address of the block's first row. warp_row: the warp's first row in the block.
        __device__ __forceinline__ void load(const Operand& from, const unsigned short* base, int row, int rows, u32 sign_flip,
                                             u32 shared_rows, int warp_row) {
            const ForwardLane lane;
            const int i = row + lane.q_row();
            const unsigned short* source = base + i * from.row_stride;
            low = shared_rows + (warp_row + lane.q_row()) * kSharedBytes;
#pragma unroll
            for (int c = 0; c < kPartChunks; c++) {
                uint4 x = zero_chunk();
                high[c] = zero_chunk();
                if (i < rows) {
                    high[c] = flipped(load_global(source + c * kChunk), sign_flip);
                    x = flipped(load_global(source + LowColumn + c * kChunk), sign_flip);
                }
                store_shared(low + c * kChunkBytes, x);  // both lanes of a row store the same
            }
            __syncwarp();
        }
        // S = Q K^T. `tile`: shared address of K of the step; rows are `pitch` bytes apart. `small` sums the products with a low
        // part. Tensor cores truncate sums, so these would lose digits in one accumulator with the large ones, high times high.
        __device__ __forceinline__ void multiply(Scores<Layout, 1, 1> (&s)[1], u32 tile, int pitch) const {
            const u32 k = tile + ForwardLane(remat_thread_index() & 31).k_row() * pitch;
            Accumulator small = {}, large = {};
#pragma unroll
            for (int c = 0; c < kPartChunks; c++) {
                if (c % 2 == 0) __syncwarp();  // ptxas would load ahead into all registers
                const uint4 k_high = load_shared(k + c * kChunkBytes), k_low = load_shared(k + (kPartChunks + c) * kChunkBytes);
                const uint4 q_low = load_shared(low + c * kChunkBytes);
                mma_row_col(small, q_low.x, q_low.y, k_high.x, k_high.y);
                mma_row_col(large, high[c].x, high[c].y, k_high.x, k_high.y);
                mma_row_col(small, q_low.z, q_low.w, k_high.z, k_high.w);
                mma_row_col(large, high[c].z, high[c].w, k_high.z, k_high.w);
                mma_row_col(small, high[c].x, high[c].y, k_low.x, k_low.y);
                mma_row_col(small, high[c].z, high[c].w, k_low.z, k_low.w);
            }
#pragma unroll
            for (int v = 0; v < 8; v++) s[0].tile[0][0][v] = large[v] + small[v];
        }
        // The halves of multiply(): products with K's high parts, then its low ones. `tile`: these, at the warp's first column.
        __device__ __forceinline__ void multiply_high(Scores<Layout, 1, 1> (&small)[1], Scores<Layout, 1, 1> (&large)[1], u32 tile,
                                                      int pitch) const {
            const u32 k = tile + ForwardLane(remat_thread_index() & 31).k_row() * pitch;
#pragma unroll
            for (int c = 0; c < kPartChunks; c++) {
                if (c % 2 == 0) __syncwarp();  // ptxas would load ahead into all registers
                const uint4 x = load_shared(k + c * kChunkBytes), q_low = load_shared(low + c * kChunkBytes);
                mma_row_col(small[0].tile[0][0], q_low.x, q_low.y, x.x, x.y);
                mma_row_col(large[0].tile[0][0], high[c].x, high[c].y, x.x, x.y);
                mma_row_col(small[0].tile[0][0], q_low.z, q_low.w, x.z, x.w);
                mma_row_col(large[0].tile[0][0], high[c].z, high[c].w, x.z, x.w);
            }
        }
        __device__ __forceinline__ void multiply_low(Scores<Layout, 1, 1> (&small)[1], u32 tile, int pitch) const {
            const u32 k = tile + ForwardLane(remat_thread_index() & 31).k_row() * pitch;
#pragma unroll
            for (int c = 0; c < kPartChunks; c++) {
                if (c % 4 == 0) __syncwarp();
                const uint4 x = load_shared(k + c * kChunkBytes);
                mma_row_col(small[0].tile[0][0], high[c].x, high[c].y, x.x, x.y);
                mma_row_col(small[0].tile[0][0], high[c].z, high[c].w, x.z, x.w);
            }
        }
    };

    // A step's probabilities as operand A, in high and low parts. split_probabilities() multiplies them by 2^8 (kPackedOne), to use
    // the upper end of fp16's range; the factor of a finished row of output undoes that (softmax.cuh). pairs[0][w][u] of either are
    // the lane's four numbers of one product. w is 0 for the eight keys of the lane's quad-pair column, 1 for the other eight; u is
    // 0 for the even four of these, 1 for the odd.
    struct Probabilities {
        volta::Probabilities<1> high, low;

        __device__ __forceinline__ void split(const Scores<Layout, 1, 1> (&s)[1]) {
            const ForwardLane lane(remat_thread_index() & 31);
            const Accumulator& p = s[0].tile[0][0];
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const auto x = ::split::split_probabilities(p[4 * u], p[4 * u + 1]);
                const auto y = ::split::split_probabilities(p[4 * u + 2], p[4 * u + 3]);
                // exchanges words with lane ^ 2: each lane then has four numbers of one row (layout.cuh)
                high.pairs[0][0][u] = to_operand_rows(lane, x.high, y.high);
                low.pairs[0][0][u] = to_operand_rows(lane, x.low, y.low);
            }
            high.exchange();  // gets those of w = 1 from lane ^ 8
            low.exchange();
        }
    };

    // O += P V. `tile`: shared address of V. i is a panel's output tile: 0 has the first half of each chunk, 1 the second half.
    template <int Headdim>
    __device__ __forceinline__ static void add_output(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        const ForwardLane lane(remat_thread_index() & 31);
        const u32 v_own = tile + lane.v_row() * pitch + lane.v_chunk() * kChunkBytes;
        const int to_other = (lane.qn ? -8 : 8) * pitch;
#pragma unroll
        for (int panel = 0; panel < Headdim / 32; panel++) {
            Accumulator small[2] = {}, large[2] = {};
            unrolled<2, 2>([&](int w, int u) {
                __syncwarp();
                const u32 at = v_own + (w ? to_other : 0) + u * pitch + panel * 4 * kChunkBytes;
                const uint4 v_high = load_shared(at), v_low = load_shared(at + Headdim / kChunk * kChunkBytes);
                const RowPair &high = p.high.pairs[0][w][u], &low = p.low.pairs[0][w][u];
                mma_row_row(small[0], low.lo, low.hi, v_high.x, v_high.y);
                mma_row_row(small[1], low.lo, low.hi, v_high.z, v_high.w);
                mma_row_row(large[0], high.lo, high.hi, v_high.x, v_high.y);
                mma_row_row(large[1], high.lo, high.hi, v_high.z, v_high.w);
                mma_row_row(small[0], high.lo, high.hi, v_low.x, v_low.y);
                mma_row_row(small[1], high.lo, high.hi, v_low.z, v_low.w);
            });
            unrolled<2, 8>([&](int i, int v) { o[0][2 * panel + i][v] += large[i][v] + small[i][v]; });
        }
    }

    // The halves of add_output(): products with V's high parts, then its low ones. `tile`: these, at the warp's first column.
    template <int Headdim>
    __device__ __forceinline__ static void add_high(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        add_part<Headdim, 4>(o, tile, pitch, [&](Accumulator(&sums)[4], int w, int u, const uint4& v) {
            const RowPair &high = p.high.pairs[0][w][u], &low = p.low.pairs[0][w][u];
            mma_row_row(sums[0], low.lo, low.hi, v.x, v.y);
            mma_row_row(sums[1], low.lo, low.hi, v.z, v.w);
            mma_row_row(sums[2], high.lo, high.hi, v.x, v.y);
            mma_row_row(sums[3], high.lo, high.hi, v.z, v.w);
        });
    }
    template <int Headdim>
    __device__ __forceinline__ static void add_low(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        add_part<Headdim, 2>(o, tile, pitch, [&](Accumulator(&sums)[2], int w, int u, const uint4& v) {
            const RowPair& high = p.high.pairs[0][w][u];
            mma_row_row(sums[0], high.lo, high.hi, v.x, v.y);
            mma_row_row(sums[1], high.lo, high.hi, v.z, v.w);
        });
    }
    // Adds Sums sums of each panel (4 to keep products with a low part apart, else 2), number i to the panel's output tile i % 2.
    // add(sums, w, u, v) adds the products of four keys to the sums; v is the lane's chunk of V.
    template <int Headdim, int Sums, class F>
    __device__ __forceinline__ static void add_part(Output<Headdim>& o, u32 tile, int pitch, F add) {
        const ForwardLane lane(remat_thread_index() & 31);
        const u32 v_own = tile + lane.v_row() * pitch + lane.v_chunk() * kChunkBytes;
        const int to_other = (lane.qn ? -8 : 8) * pitch;
#pragma unroll
        for (int panel = 0; panel < Headdim / 32; panel++) {
            Accumulator sums[Sums] = {};
            unrolled<2, 2>([&](int w, int u) {
                __syncwarp();
                add(sums, w, u, load_shared(v_own + (w ? to_other : 0) + u * pitch + panel * 4 * kChunkBytes));
            });
            unrolled<2, 8>(
                [&](int i, int v) { o[0][2 * panel + i][v] += Sums > 2 ? sums[i][v] + sums[Sums - 2 + i][v] : sums[i][v]; });
        }
    }

    __device__ __forceinline__ static int column(const Lane& lane, int j, int v) { return output_column(lane, j, v); }
};

}  // namespace volta
