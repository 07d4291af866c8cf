// Products of the forward kernel of fp32 tensors (forward/split.cuh) on turing's tensor cores. Each number is the sum of a high and
// a low fp16 part. Low times low is left out: it is at most 2^-21 of the product, typically near fp32's own rounding.
//
// Forward holds both parts of a step in shared memory: multiply() and add_output(). WideForward has room for one part at a time:
// the functions for high and low.
//
// Of a lane, quad is lane % 4 (turing/mma.cuh).
#pragma once

#include "forward/split.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

struct Split {
    using Layout = ForwardLayout;
    // Tiles of scores in a step, and from a lane's keys in one to those in the next.
    static constexpr int kTiles = 2, kNextTile = ForwardLayout::kNextTile;
    template <int Headdim>
    static constexpr int kOutputTiles = Headdim / 8;
    template <int Headdim>
    using Output = Accumulator[1][kOutputTiles<Headdim>];
    // The key of a step in row `row` of the shared tile.
    __device__ __forceinline__ static constexpr int key_of_row(int row) { return ForwardLayout::key_of_row(row); }

    // Address of a lane's row of four matrices: the first eight keys and the other eight, of a chunk and of that of its low parts.
    template <int Headdim>
    __device__ __forceinline__ static u32 fragment(u32 tile, int pitch) {
        const int lane = remat_lane();
        return tile + lane % 16 * pitch + lane / 16 * (Headdim / kChunk * kChunkBytes);
    }

    // The same of two neighboring chunks.
    __device__ __forceinline__ static u32 fragment_of_part(u32 tile, int pitch) {
        const int lane = remat_lane();
        return tile + lane % 16 * pitch + lane / 16 * kChunkBytes;
    }

    // A warp's 16 rows of Headdim columns of Q. The low parts are LowColumn columns on: WideForward gives each warp only Headdim
    // of a row's LowColumn columns.
    template <int Headdim, int LowColumn = Headdim>
    struct Queries {
        static constexpr int kHalf = Headdim / kChunk;  // chunks of the high parts
        // Volta's Queries keep low parts in shared memory. These have all in registers, so load() ignores its last two arguments.
        static constexpr int kSharedBytes = 0;
        OperandA q[1][2 * kHalf];

        // `base`: row 0.
        __device__ __forceinline__ void load(const Operand& from, const unsigned short* base, int row, int rows, u32 sign_flip, u32,
                                             int) {
            if constexpr (LowColumn == Headdim) {
                load_queries(q, from, base, row, rows, 2 * Headdim, sign_flip);
            } else {
                using Part = OperandA[1][kHalf];
                load_queries(reinterpret_cast<Part&>(q[0][0]), from, base, row, rows, Headdim, sign_flip);
                load_queries(reinterpret_cast<Part&>(q[0][kHalf]), from, base + LowColumn, row, rows, Headdim, sign_flip);
            }
        }
        // S = Q K^T. `tile`: K of the step. `small` sums the products with a low part, 2^-11 of the others. Tensor cores truncate
        // sums, so those would lose digits in one accumulator with the large ones.
        __device__ __forceinline__ void multiply(Scores<Layout, 1, 1> (&s)[kTiles], u32 tile, int pitch) const {
            const u32 from = fragment<Headdim>(tile, pitch);
            Accumulator small[kTiles] = {}, large[kTiles] = {};
#pragma unroll
            for (int c = 0; c < kHalf; c++) {
                __syncwarp();  // ptxas would load ahead into all registers
                u32 k[4];
                load_matrices(k, from + c * kChunkBytes);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(small[i], q[0][kHalf + c], k[i]);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(large[i], q[0][c], k[i]);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(small[i], q[0][c], k[2 + i]);
            }
#pragma unroll
            for (int i = 0; i < kTiles; i++)
#pragma unroll
                for (int v = 0; v < 4; v++) s[i].tile[0][0][v] = large[i][v] + small[i][v];
        }
        // Add the products with the high and with the low parts of K. `tile`: these parts of the step, from Q's first column on.
        __device__ __forceinline__ void multiply_high(Scores<Layout, 1, 1> (&small)[kTiles], Scores<Layout, 1, 1> (&large)[kTiles],
                                                      u32 tile, int pitch) const {
            each_fragment(tile, pitch, [&](int c, int i, u32 k) {
                mma(small[i].tile[0][0], q[0][kHalf + c], k);
                mma(large[i].tile[0][0], q[0][c], k);
            });
        }
        __device__ __forceinline__ void multiply_low(Scores<Layout, 1, 1> (&small)[kTiles], u32 tile, int pitch) const {
            each_fragment(tile, pitch, [&](int c, int i, u32 k) { mma(small[i].tile[0][0], q[0][c], k); });
        }
        // Calls f(chunk, tile of keys, operand B) for each operand.
        template <class F>
        __device__ __forceinline__ static void each_fragment(u32 tile, int pitch, F f) {
            const u32 from = fragment_of_part(tile, pitch);
#pragma unroll
            for (int c = 0; c < kHalf; c += 2) {
                __syncwarp();
                u32 k[4];
                load_matrices(k, from + c * kChunkBytes);
#pragma unroll
                for (int i = 0; i < 4; i++) f(c + i / 2, i % 2, k[i]);
            }
        }
    };

    struct Probabilities {
        OperandA high[kTiles], low[kTiles];

        __device__ __forceinline__ void split(const Scores<Layout, 1, 1> (&s)[kTiles]) {
#pragma unroll
            for (int i = 0; i < kTiles; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Accumulator& p = s[i].tile[0][0];
                    const auto x = ::split::split_probabilities(p[2 * h], p[2 * h + 1]);
                    high[i][h] = x.high, low[i][h] = x.low;
                }
        }
    };

    // O += P V. `tile`: V of the step.
    template <int Headdim>
    __device__ __forceinline__ static void add_output(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        const u32 from = fragment<Headdim>(tile, pitch);
#pragma unroll
        for (int j = 0; j < Headdim / kChunk; j++) {
            if (j % 2 == 0) __syncwarp();
            u32 v[4];
            load_matrices_transposed(v, from + j * kChunkBytes);
            Accumulator small = {}, large = {};
#pragma unroll
            for (int i = 0; i < kTiles; i++) {
                mma(small, p.low[i], v[i]);
                mma(large, p.high[i], v[i]);
                mma(small, p.high[i], v[2 + i]);
            }
#pragma unroll
            for (int w = 0; w < 4; w++) o[0][j][w] += large[w] + small[w];
        }
    }

    // Add the products with the high and with the low parts of V. `tile`: these parts of the step, from the output's first column
    // on.
    template <int Headdim>
    __device__ __forceinline__ static void add_high(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        add_part<Headdim>(o, tile, pitch, [&](Accumulator& x, const u32* v) {
            Accumulator small = {}, large = {};
#pragma unroll
            for (int i = 0; i < kTiles; i++) {
                mma(small, p.low[i], v[i]);
                mma(large, p.high[i], v[i]);
            }
#pragma unroll
            for (int w = 0; w < 4; w++) x[w] += large[w] + small[w];
        });
    }
    template <int Headdim>
    __device__ __forceinline__ static void add_low(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        add_part<Headdim>(o, tile, pitch, [&](Accumulator& x, const u32* v) {
            Accumulator small = {};
#pragma unroll
            for (int i = 0; i < kTiles; i++) mma(small, p.high[i], v[i]);
#pragma unroll
            for (int w = 0; w < 4; w++) x[w] += small[w];
        });
    }
    // Calls add(output tile, operands B) for each chunk.
    template <int Headdim, class F>
    __device__ __forceinline__ static void add_part(Output<Headdim>& o, u32 tile, int pitch, F add) {
        const u32 from = fragment_of_part(tile, pitch);
#pragma unroll
        for (int j = 0; j < Headdim / kChunk; j += 2) {
            if (j % 4 == 0) __syncwarp();
            u32 v[4];
            load_matrices_transposed(v, from + j * kChunkBytes);
#pragma unroll
            for (int i = 0; i < 2; i++) add(o[0][j + i], v + 2 * i);
        }
    }

    // Column of element v of output tile j.
    __device__ __forceinline__ static int column(const Lane& lane, int j, int v) { return 8 * j + 2 * lane.quad + (v & 1); }
};

}  // namespace turing
