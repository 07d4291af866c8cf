// Tensor-core code of volta (StoredFamily) for the backward kernels that pass P and dS through scratch memory. They are for fp32
// tensors, whose numbers are two fp16 parts, and headdims above 256 (where faster above 192). backward/store_scores.cuh computes
// P and dS (keys are rows), backward/stored_gradients.cuh dV, dK and dQ from them. They load operands to shared memory a step (32
// terms) at a time, and call these functions between two barriers. A warp computes 64 by 64 elements: 4 by 4 tiles of 16 by 16.
//
// *_operand(), *_a() and *_b() return the byte offset of a lane's operand in its tile of shared memory. `row`, `column`: the warp's
// first in the tile. c: a lane's accumulators; a and b, a_address and b_address: shared addresses of its operands.
// for_each_pair() calls f(row, column, x, y) for sums x, y of neighboring columns. Row and column count from the warp's first.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair: quad is lane % 4, half is lane / 16. The quad-pair is in row qm
// (bit 2 of the lane) and column qn (bit 3) of the warp's 2x2 (volta/mma.cuh). v: a lane's element (0 to 7) of its 8x8 product.
// A chunk is 16 bytes, eight elements of a row; a panel is 32 columns, four chunks. chunk_after(x, n) is the address n chunks after
// x in a swizzled row, row_swizzle(4) how many chunks the swizzle moves one in the row 4 further (tile.cuh).
#pragma once

#include "backward/staged_tiles.cuh"
#include "volta/backward/bias_gradient.cuh"
#include "volta/backward/products.cuh"

namespace volta {

// Terms are a step's 32 (kStagedTerms) values of the summed index k: columns of TermColumns tiles (128 rows of 32), rows of
// TermRows (operand A, 128 columns) and OtherTermRows (B, 128 or 64 columns) tiles (backward/staged_tiles.cuh).
//
// multiply_* add a step's products to c. add_*, for fp32 tensors, sum a step apart first: tensor cores truncate long sums, whose
// last bits fp32 needs. The kernels load the parts, and call add_* once for each of their three products. add_keys and add_queries
// multiply these sums by `factor`, the power of two by which dS was divided, and compute one of kLoadParts equal parts of c, number
// `part`: loads of the next step come between the parts.
struct StoredFamily {
    // ---- S^T = K Q^T and dP^T = V dO^T ------------------------------------------------------------
    using Layout = KeysLayout;  // of a tile a lane has four queries ("rows", kRows) of two keys (fragments.cuh)
    // Floats of row statistics (-lse/scale and -delta, RowStats) for each query: those of the lane's four queries begin
    // first_query() * kLaneStatistics floats after the tile's.
    static constexpr int kLaneStatistics = RowStats::kRowFloats;
    static __device__ __forceinline__ void load_rows(float (&x)[1][Layout::kRows], const float* stats) {
        volta::load_rows(x, stats);
    }
    static __device__ __forceinline__ int tile_row(int row) { return row; }  // a row's place in a tile; turing permutes rows
    static __device__ __forceinline__ u32 own_operand(const Lane& lane, int row) {
        return volta::own_operand<TermColumns>(0, lane, row);
    }
    static __device__ __forceinline__ u32 other_operand(const Lane& lane, int row) {
        return step_operand<TermColumns>(0, lane, row);
    }
    // low, high: columns 0 to 3 and 4 to 7 of a chunk, not the parts of fp32 numbers
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
                __syncwarp();  // no operand is loaded before: registers hold those of one quarter of c
                Accumulator sums[2][2] = {};
#pragma unroll 2  // all of the loop over steps is then below the 12 KB of the L0 instruction cache
                for (int chunk = 0; chunk < TermColumns::kChunks; chunk++) {
                    const Fragments<TermColumns, 2, 2> f(
                        chunk_after<TermColumns::kChunks>(a, chunk) + m * 16 * TermColumns::kRowBytes,
                        chunk_after<TermColumns::kChunks>(b, chunk) + n * 16 * TermColumns::kRowBytes);
                    f.multiply_low(sums);
                    f.multiply_high(sums);
                }
                unrolled<4, 8>([&](int i, int v) { c[m + i / 2][n + i % 2][v] += sums[i / 2][i % 2][v]; });
            }
    }
    // Stores dS of a tile as dbias if that is fp16; else returns false, and the kernel adds it by atomics.
    static __device__ __forceinline__ bool store_bias_gradient(const Accumulator& ds, const BwdParams& p, int head, int row,
                                                               int key) {
        if (!p.dbias_is_fp16) return false;
        volta::store_bias_gradient(pack_tile(ds), p, head, ScoreCoord<KeysLayout>(Lane(), row, key));
        return true;
    }

    // ---- dK and dV --------------------------------------------------------------------------------
    static constexpr int kLoadParts = 2;  // parts in which the loads of a step come with add_keys and add_queries: spills least
    using KeySums = Gradient<4, 2>;  // [m: 16 keys][j: panel][i: columns 0 to 3 or 4 to 7 of each chunk of operand B][v]
    static __device__ __forceinline__ u32 key_a(const Lane& lane, int row) { return score_operand(0, lane, row); }
    static __device__ __forceinline__ u32 key_b(const Lane& lane, int column) {
        return column_operand<OtherTermRows>(0, lane, column / 32);
    }
    static __device__ __forceinline__ void multiply_keys(KeySums& c, u32 a, u32 b) { accumulate<OtherTermRows, 1>(c, a, b); }
    static __device__ __forceinline__ void add_keys(KeySums& c, u32 a, u32 b, float factor, int part) {
        constexpr int kTiles = 4 / kLoadParts;  // of 16 keys, of a part
#pragma unroll
        for (int m = part * kTiles; m < (part + 1) * kTiles; m++) {
            __syncwarp();  // no operand is loaded before
            Gradient<1, 2> sums = {};
            accumulate<OtherTermRows, 1>(sums, a + m * 16 * kScoreRowBytes, b);
            unrolled<4, 8>([&](int i, int v) {
                float& x = c[m][i / 2][i % 2][v];
                x = fmaf(sums[0][i / 2][i % 2][v], factor, x);
            });
        }
    }
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const KeySums& c, F f) {
        const Lane lane;
        unrolled<4, 2, 2>([&](int m, int j, int i) {
#pragma unroll
            for (int v = 0; v < 8; v += 2)
                f(score_own(lane, m, v), 32 * j + column_in_panel(lane, i, v), c[m][j][i][v], c[m][j][i][v + 1]);
        });
    }

    // ---- dQ ---------------------------------------------------------------------------------------
    // Rows of both operands are keys. A lane loads a chunk of eight queries (dS) and a chunk of eight columns (K) of one key. Half
    // i (4 queries) of the first is a column-major operand A, half h (4 columns) of the second is a row-major operand B.
    using QuerySums = Accumulator[2][2][2][2];  // [m: 32 queries, a panel of dS][i][j: panel of K][h]
    static __device__ __forceinline__ u32 query_a(const Lane& lane, int row) {
        return swizzled<TermRows::kChunks>(lane.quad, row / 8 + 2 * lane.qm + lane.half);
    }
    static __device__ __forceinline__ u32 query_b(const Lane& lane, int column) { return key_b(lane, column); }
    static __device__ __forceinline__ void multiply_queries(QuerySums& c, u32 a_address, u32 b_address) {
        constexpr int kChunks = TermRows::kChunks, kOtherChunks = OtherTermRows::kChunks;
#pragma unroll
        for (int key = 0; key < kStagedTerms; key += 4) {
            const u32 shift = key % 8 ? row_swizzle<kChunks>(4) : 0, other_shift = key % 8 ? row_swizzle<kOtherChunks>(4) : 0;
            const u32 a0 = chunk_after<kChunks>(a_address, shift) + key * TermRows::kRowBytes;
            const u32 b0 = chunk_after<kOtherChunks>(b_address, other_shift) + key * OtherTermRows::kRowBytes;
            const uint4 a[2] = {load_shared(a0), load_shared(chunk_after<kChunks>(a0, 4))};
            const uint4 b[2] = {load_shared(b0), load_shared(chunk_after<kOtherChunks>(b0, 4))};
            unrolled<2, 2>([&](int m, int j) {
                mma_col_row(c[m][0][j][0], a[m].x, a[m].y, b[j].x, b[j].y);
                mma_col_row(c[m][0][j][1], a[m].x, a[m].y, b[j].z, b[j].w);
                mma_col_row(c[m][1][j][0], a[m].z, a[m].w, b[j].x, b[j].y);
                mma_col_row(c[m][1][j][1], a[m].z, a[m].w, b[j].z, b[j].w);
            });
        }
    }
    static __device__ __forceinline__ void add_queries(QuerySums& c, u32 a_address, u32 b_address, float factor, int part) {
        constexpr int kChunks = TermRows::kChunks, kOtherChunks = OtherTermRows::kChunks, kPanels = 2 / kLoadParts;
#pragma unroll
        for (int m = part * kPanels; m < (part + 1) * kPanels; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                __syncwarp();
                Accumulator sums[2][2] = {};
#pragma unroll
                for (int key = 0; key < kStagedTerms; key += 4) {
                    const u32 shift = key % 8 ? row_swizzle<kChunks>(4) : 0,
                              other_shift = key % 8 ? row_swizzle<kOtherChunks>(4) : 0;
                    const uint4 a = load_shared(chunk_after<kChunks>(a_address, shift ^ 4 * m) + key * TermRows::kRowBytes);
                    const uint4 b =
                        load_shared(chunk_after<kOtherChunks>(b_address, other_shift ^ 4 * j) + key * OtherTermRows::kRowBytes);
                    mma_col_row(sums[0][0], a.x, a.y, b.x, b.y);
                    mma_col_row(sums[0][1], a.x, a.y, b.z, b.w);
                    mma_col_row(sums[1][0], a.z, a.w, b.x, b.y);
                    mma_col_row(sums[1][1], a.z, a.w, b.z, b.w);
                }
                unrolled<4, 8>([&](int i, int v) {
                    float& x = c[m][i / 2][j][i % 2][v];
                    x = fmaf(sums[i / 2][i % 2][v], factor, x);
                });
            }
    }
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const QuerySums& c, F f) {
        const Lane lane;
        unrolled<2, 2, 2, 2>([&](int m, int i, int j, int h) {
#pragma unroll
            for (int v = 0; v < 8; v += 2) {
                const int row = 32 * m + 16 * lane.qm + 8 * (lane.t >> 2) + 4 * i + (lane.t & 1) + (v & 2);
                f(row, 32 * j + column_in_panel(lane, h, v), c[m][i][j][h][v], c[m][i][j][h][v + 1]);
            }
        });
    }
};

}  // namespace volta
