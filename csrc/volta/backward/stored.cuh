// The volta Family of the backward kernels for large headdims (backward/store_scores.cuh, backward/stored_gradients.cuh).
//
// A lane is number t (0 to 7) of its quad-pair: t % 4 is quad, t / 4 is half. The four quad-pairs of a warp form a 2x2 over a tile
// of 16 by 16. The lane's quad-pair is in row qm and column qn of it (volta/mma.cuh).
#pragma once

#include "backward/staged_tiles.cuh"
#include "volta/backward/bias_gradient.cuh"
#include "volta/backward/products.cuh"

namespace volta {

// Members: backward/store_scores.cuh and backward/stored_gradients.cuh say what each is. multiply_* add products to c. add_* sum a
// step's products apart first: fp32 tensors need that, because tensor cores truncate long sums.
// Terms are the k of a product: columns of TermColumns, rows of TermRows (backward/staged_tiles.cuh).
struct StoredFamily {
    using RowStats = volta::RowStats;

    // ---- scores -----------------------------------------------------------------------------------
    using Layout = KeysLayout;
    // Floats for each query of the tile before the lane's first. A lane's four queries are a group (row_stats.cuh).
    static constexpr int kLaneStatistics = RowStats::kRowFloats;
    static __device__ __forceinline__ void load_rows(float (&x)[1][Layout::kRows], const float* stats) {
        volta::load_rows(x, stats);
    }
    static __device__ __forceinline__ int tile_row(int row) { return row; }
    static __device__ __forceinline__ u32 own_operand(const Lane& lane, int row) {
        return volta::own_operand<TermColumns>(0, lane, row);
    }
    static __device__ __forceinline__ u32 other_operand(const Lane& lane, int row) {
        return step_operand<TermColumns>(0, lane, row);
    }
    static __device__ __forceinline__ void multiply_scores(Accumulator (&c)[4][4], u32 a, u32 b) {
#pragma unroll
        for (int chunk = 0; chunk < TermColumns::kChunks; chunk++) {
            const Fragments<TermColumns, 4, 4> f(chunk_after<TermColumns::kChunks>(a, chunk),
                                                 chunk_after<TermColumns::kChunks>(b, chunk));
            f.multiply_low(c);
            f.multiply_high(c);
        }
    }
    static __device__ __forceinline__ void add_scores(Accumulator (&c)[4][4], u32 a, u32 b) {
#pragma unroll
        for (int m = 0; m < 4; m += 2)
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                __syncwarp();  // no operand is loaded before: registers hold those of one quarter
                Accumulator sums[2][2] = {};
#pragma unroll
                for (int chunk = 0; chunk < TermColumns::kChunks; chunk++) {
                    const Fragments<TermColumns, 2, 2> f(
                        chunk_after<TermColumns::kChunks>(a, chunk) + m * 16 * TermColumns::kRowBytes,
                        chunk_after<TermColumns::kChunks>(b, chunk) + n * 16 * TermColumns::kRowBytes);
                    f.multiply_low(sums);
                    f.multiply_high(sums);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int v = 0; v < 8; v++) c[m + i / 2][n + i % 2][v] += sums[i / 2][i % 2][v];
            }
    }
    static __device__ __forceinline__ bool store_bias_gradient(const Accumulator& ds, const BwdParams& p, int head, int row,
                                                               int key) {
        if (!p.dbias_is_fp16) return false;
        volta::store_bias_gradient(pack_tile(ds), p, head, ScoreCoord<KeysLayout>(Lane(), row, key));
        return true;
    }

    // ---- dK and dV --------------------------------------------------------------------------------
    using KeySums = Gradient<4, 2>;
    static __device__ __forceinline__ u32 key_a(const Lane& lane, int row) { return score_operand(0, lane, row); }
    static __device__ __forceinline__ u32 key_b(const Lane& lane, int column) {
        return column_operand<TermRows>(0, lane, column / 32);
    }
    static __device__ __forceinline__ void multiply_keys(KeySums& c, u32 a, u32 b) { accumulate<TermRows, 1>(c, a, b); }
    static __device__ __forceinline__ void add_keys(KeySums& c, u32 a, u32 b, float factor) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
            __syncwarp();  // as in add_scores
            Gradient<1, 2> sums = {};
            accumulate<TermRows, 1>(sums, a + m * 16 * kScoreRowBytes, b);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    float& x = c[m][i / 2][i % 2][v];
                    x = fmaf(sums[0][i / 2][i % 2][v], factor, x);
                }
        }
    }
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const KeySums& c, F f) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int v = 0; v < 8; v += 2)
                        f(score_own(lane, m, v), 32 * j + column_in_block(lane, i, v), c[m][j][i][v], c[m][j][i][v + 1]);
    }

    // ---- dQ ---------------------------------------------------------------------------------------
    // Rows of both operands are keys. A lane loads a chunk of eight queries and a chunk of eight columns of one key: half i of the
    // first is a column-major operand A, half h of the second is an operand B.
    using QuerySums = Accumulator[2][2][2][2];  // [block of 32 queries][i][block of 32 columns][h]
    static __device__ __forceinline__ u32 query_a(const Lane& lane, int row) {
        return swizzled<TermRows::kChunks>(lane.quad, row / 8 + 2 * lane.qm + lane.half);
    }
    static __device__ __forceinline__ u32 query_b(const Lane& lane, int column) { return key_b(lane, column); }
    static __device__ __forceinline__ void multiply_queries(QuerySums& c, u32 a_address, u32 b_address) {
        constexpr int kChunks = TermRows::kChunks;
#pragma unroll
        for (int key = 0; key < kStagedTerms; key += 4) {
            const u32 shift = key % 8 ? row_swizzle<kChunks>(4) : 0;
            const u32 a0 = chunk_after<kChunks>(a_address, shift) + key * TermRows::kRowBytes;
            const u32 b0 = chunk_after<kChunks>(b_address, shift) + key * TermRows::kRowBytes;
            const uint4 a[2] = {load_shared(a0), load_shared(chunk_after<kChunks>(a0, 4))};
            const uint4 b[2] = {load_shared(b0), load_shared(chunk_after<kChunks>(b0, 4))};
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    mma_col_row(c[m][0][j][0], a[m].x, a[m].y, b[j].x, b[j].y);
                    mma_col_row(c[m][0][j][1], a[m].x, a[m].y, b[j].z, b[j].w);
                    mma_col_row(c[m][1][j][0], a[m].z, a[m].w, b[j].x, b[j].y);
                    mma_col_row(c[m][1][j][1], a[m].z, a[m].w, b[j].z, b[j].w);
                }
        }
    }
    static __device__ __forceinline__ void add_queries(QuerySums& c, u32 a_address, u32 b_address, float factor) {
        constexpr int kChunks = TermRows::kChunks;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                __syncwarp();
                Accumulator sums[2][2] = {};
#pragma unroll
                for (int key = 0; key < kStagedTerms; key += 4) {
                    const u32 shift = key % 8 ? row_swizzle<kChunks>(4) : 0;
                    const uint4 a = load_shared(chunk_after<kChunks>(a_address, shift ^ 4 * m) + key * TermRows::kRowBytes);
                    const uint4 b = load_shared(chunk_after<kChunks>(b_address, shift ^ 4 * j) + key * TermRows::kRowBytes);
                    mma_col_row(sums[0][0], a.x, a.y, b.x, b.y);
                    mma_col_row(sums[0][1], a.x, a.y, b.z, b.w);
                    mma_col_row(sums[1][0], a.z, a.w, b.x, b.y);
                    mma_col_row(sums[1][1], a.z, a.w, b.z, b.w);
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int v = 0; v < 8; v++) {
                        float& x = c[m][i / 2][j][i % 2][v];
                        x = fmaf(sums[i / 2][i % 2][v], factor, x);
                    }
            }
    }
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const QuerySums& c, F f) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int v = 0; v < 8; v += 2) {
                            const int row = 32 * m + 16 * lane.qm + 8 * (lane.t >> 2) + 4 * i + (lane.t & 1) + (v & 2);
                            f(row, 32 * j + column_in_block(lane, h, v), c[m][i][j][h][v], c[m][i][j][h][v + 1]);
                        }
    }
};

}  // namespace volta
