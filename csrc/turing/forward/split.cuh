// Products of the forward kernel of fp32 tensors (forward/split.cuh) on turing's tensor cores.
#pragma once

#include "forward/split.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

struct Split {
    using Layout = ForwardLayout;
    static constexpr int kTiles = 2, kNextTile = ForwardLayout::kNextTile;
    template <int Headdim>
    static constexpr int kOutputTiles = Headdim / 8;
    template <int Headdim>
    using Output = Accumulator[1][kOutputTiles<Headdim>];
    __device__ __forceinline__ static constexpr int key_of_row(int row) { return ForwardLayout::key_of_row(row); }

    // Address of a lane's row of four matrices: the first eight keys and the other eight, of a chunk and of that of its low parts.
    template <int Headdim>
    __device__ __forceinline__ static u32 fragment(u32 tile, int pitch) {
        const int lane = remat_lane();
        return tile + lane % 16 * pitch + lane / 16 * (Headdim / kChunk * kChunkBytes);
    }

    // A warp's 16 rows of Q.
    template <int Headdim>
    struct Queries {
        static constexpr int kHalf = Headdim / kChunk;  // chunks of the high parts
        static constexpr int kSharedBytes = 0;
        OperandA q[1][2 * kHalf];

        // `base`: row 0.
        __device__ __forceinline__ void load(const Operand& from, const unsigned short* base, int row, int rows, u32 sign_flip, u32,
                                             int) {
            load_queries(q, from, base, row, rows, 2 * Headdim, sign_flip);
        }
        // S = Q K^T. `tile`: K of the step.
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

    // Column of element v of output tile j.
    __device__ __forceinline__ static int column(const Lane& lane, int j, int v) { return 8 * j + 2 * lane.quad + (v & 1); }
};

}  // namespace turing
