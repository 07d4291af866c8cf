// Products of the forward kernels of fp32 tensors (forward/split.cuh, their template argument Family) on turing's tensor cores.
// Each number is the sum of a high and a low fp16 part. The low one is at most 2^-11 of it, or 2^-10 of P, whose high part is
// truncated. Low times low, so at most 2^-21 of the product, is left out. A row of Q, K or V has all of its high parts, then the
// low ones: the cast kernel has split them, after scaling to fp16's range.
//
// A step is 16 keys, two tiles of 8. split::Forward (headdim up to 128) holds both parts of K and V of a step in shared memory:
// multiply() and add_output(). split::WideForward (larger headdims), whose warps have 128 columns each, has room for one part at a
// time: the functions for high and low. `tile`: shared address of K or V of the step; `pitch`: bytes between its rows.
//
// A warp has one row tile, 16 queries. s[i].tile[0][0] has the lane's scores of key tile i of a step, o[0][j] its output in columns
// 8j to 8j + 7. A chunk (kChunk, kChunkBytes) is eight fp16 columns, 16 bytes. remat_*() read a special register again (ptx.cuh).
#pragma once

#include "forward/split.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

struct Split {
    using Layout = ForwardLayout;
    // kTiles: tiles of 8 keys in a step. kNextTile: keys from a lane's in a tile to those in the next.
    static constexpr int kTiles = 2, kNextTile = ForwardLayout::kNextTile;
    template <int Headdim>
    static constexpr int kOutputTiles = Headdim / 8;
    template <int Headdim>
    using Output = Accumulator[1][kOutputTiles<Headdim>];
    // Returns the key of a step that lies in row `row` (0 to 15) of K or V in shared memory.
    __device__ __forceinline__ static constexpr int key_of_row(int row) { return ForwardLayout::key_of_row(row); }

    // Returns the lane's address for load_matrices() (ldmatrix) of four matrices, each 8 keys by a chunk: key tiles 0 and 1 of
    // chunk 0 of the high parts, then of the low parts. The next chunk is kChunkBytes further.
    template <int Headdim>
    __device__ __forceinline__ static u32 fragment_address(u32 tile, int pitch) {
        const int lane = remat_lane();
        return tile + lane % 16 * pitch + lane / 16 * (Headdim / kChunk * kChunkBytes);
    }

    // The same in a tile of one part: key tiles 0 and 1 of chunk 0, then of chunk 1.
    __device__ __forceinline__ static u32 part_fragment_address(u32 tile, int pitch) {
        const int lane = remat_lane();
        return tile + lane % 16 * pitch + lane / 16 * kChunkBytes;
    }

    // A warp's 16 rows of Headdim columns of Q, both parts in registers. In global memory a row has LowColumn high parts, then the
    // low ones. WideForward gives each warp only Headdim (128) of these columns.
    template <int Headdim, int LowColumn = Headdim>
    struct Queries {
        static constexpr int kHalf = Headdim / kChunk;  // chunks of the high parts
        // Volta's Queries keep low parts in shared memory. These have all in registers, so load() ignores its last two arguments.
        static constexpr int kSharedBytes = 0;
        OperandA q[1][2 * kHalf];  // of each chunk the lane's part of the 16 rows: high parts, then low ones

        // Loads rows from `row` on, of the `rows` that exist; others are 0. `base`: address of row 0, at the warp's first column.
        // sign_flip: 0x80008000 to flip the signs of Q, for a negative softmax_scale, else 0.
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
        // S = Q K^T. `small` sums products with a low part, at most 2^-11 of the others. Tensor cores truncate sums, so small
        // products would lose digits in one accumulator with the large ones.
        __device__ __forceinline__ void multiply(Scores<Layout, 1, 1> (&s)[kTiles], u32 tile, int pitch) const {
            const u32 from = fragment_address<Headdim>(tile, pitch);
            Accumulator small[kTiles] = {}, large[kTiles] = {};
#pragma unroll
            for (int c = 0; c < kHalf; c++) {
                __syncwarp();  // keeps ptxas from loading ahead into all registers
                u32 k[4];
                load_matrices(k, from + c * kChunkBytes);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(small[i], q[0][kHalf + c], k[i]);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(large[i], q[0][c], k[i]);
#pragma unroll
                for (int i = 0; i < kTiles; i++) mma(small[i], q[0][c], k[2 + i]);
            }
            unrolled<kTiles, 4>([&](int i, int v) { s[i].tile[0][0][v] = large[i][v] + small[i][v]; });
        }
        // Add the products with the high and with the low parts of K. `tile`: address of these parts, at the warp's first column.
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
        // Calls f(chunk, key tile, operand B) for each operand of K.
        template <class F>
        __device__ __forceinline__ static void each_fragment(u32 tile, int pitch, F f) {
            const u32 from = part_fragment_address(tile, pitch);
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

    // A step's probabilities in high and low parts: operand A of each key tile. split_probabilities() multiplies them by 2^8
    // (kPackedOne), to use the upper end of fp16's range; the factor of a finished row of output undoes that (softmax.cuh).
    struct Probabilities {
        OperandA high[kTiles], low[kTiles];

        // `s`: the probabilities, fp32, in the place of the scores.
        __device__ __forceinline__ void split(const Scores<Layout, 1, 1> (&s)[kTiles]) {
            unrolled<kTiles, 2>([&](int i, int h) {
                const Accumulator& p = s[i].tile[0][0];
                const auto x = ::split::split_probabilities(p[2 * h], p[2 * h + 1]);
                high[i][h] = x.high, low[i][h] = x.low;
            });
        }
    };

    // O += P V.
    template <int Headdim>
    __device__ __forceinline__ static void add_output(Output<Headdim>& o, const Probabilities& p, u32 tile, int pitch) {
        const u32 from = fragment_address<Headdim>(tile, pitch);
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

    // Add the products with the high and with the low parts of V. `tile`: address of these parts, at the warp's first column.
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
    // Calls add(accumulator of the output, operands B of the key tiles) for each chunk of V.
    template <int Headdim, class F>
    __device__ __forceinline__ static void add_part(Output<Headdim>& o, u32 tile, int pitch, F add) {
        const u32 from = part_fragment_address(tile, pitch);
#pragma unroll
        for (int j = 0; j < Headdim / kChunk; j += 2) {
            if (j % 4 == 0) __syncwarp();
            u32 v[4];
            load_matrices_transposed(v, from + j * kChunkBytes);
#pragma unroll
            for (int i = 0; i < 2; i++) add(o[0][j + i], v + 2 * i);
        }
    }

    // Returns the column of element v of output tile j. quad: lane % 4.
    __device__ __forceinline__ static int column(const Lane& lane, int j, int v) { return 8 * j + 2 * lane.quad + (v & 1); }
};

}  // namespace turing
