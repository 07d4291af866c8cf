// The arithmetic layer of the backward pass on m8n8k4: which element a lane holds of scores and of gradients, where its operands
// lie in shared memory, and how scores become operands. Nothing outside this folder knows.
//
// Every product is made of 16x16 tiles, quad-pairs 2x2 (Lane::qm, Lane::qn). Row t of the A
// operand of quad-pair qm is key  key_of(t, qm) = t%4 + 4*qm + 8*(t/4)  of 16: eight consecutive lanes,
// which one shared-memory wavefront serves, then read eight consecutive keys. Column n of quad-pair qn
// is query  8*qn + 4*bit1(n) + 2*bit2(n) + bit0(n)  of 16: the four accumulators of a lane that belong to
// one key are then four consecutive queries, 8 bytes of fp16.
//
// In the queries kernel keys and queries change places ("own rows": keys in the main kernels, queries there).
#pragma once

#include "backward/memory.cuh"
#include "backward/score_coord.cuh"
#include "half.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "volta/backward/row_stats.cuh"
#include "volta/backward/shape.cuh"
#include "volta/mma.cuh"

namespace volta {

__device__ __forceinline__ int key_of(int t, int qm) { return t % 4 + 4 * qm + 8 * (t / 4); }

// ---- scores ---------------------------------------------------------------------------------------

// Element v of a 16x16 tile of scores: its own row and its row of the step, from those of element 0.
__device__ __forceinline__ constexpr int own_row(int first, int v) { return first + (v & 2); }
__device__ __forceinline__ constexpr int step_row(int first, int v) { return first + (v & 1) + 2 * (v >> 2); }
// The same in tile m and tile n, from the warp's first row and the step's.
__device__ __forceinline__ constexpr int score_own(const Lane& lane, int m, int v) {
    return own_row(16 * m + 4 * lane.qm + (lane.t & 1), v) + 8 * (lane.t >> 2);
}
__device__ __forceinline__ constexpr int score_step(const Lane& lane, int n, int v) {
    return step_row(16 * n + 8 * lane.qn + 4 * ((lane.t >> 1) & 1), v);
}

// S^T and dP^T in the main kernels, whose rows are keys (backward/score_coord.cuh says what a layout is).
struct KeysLayout {
    using Lane = volta::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 8;
    __device__ __forceinline__ static constexpr int first_query(const Lane& lane) { return score_step(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int first_key(const Lane& lane) { return score_own(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int query(int first, int v) { return step_row(first, v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return own_row(first, v); }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return query(0, v); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return key(0, v); }

    static constexpr bool kKeyRows = true;
    static constexpr int kRows = 4, kKeys = 2, kKeyStride = 2;
    __device__ __forceinline__ static constexpr int row_of(int v) { return query_slot(v); }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return r % 2 + 4 * (r / 2) + 2 * j; }
};

// S and dP in the queries kernel, whose rows are queries.
struct QueriesLayout {
    using Lane = volta::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 8;
    __device__ __forceinline__ static constexpr int first_query(const Lane& lane) { return score_own(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int first_key(const Lane& lane) { return score_step(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int query(int first, int v) { return own_row(first, v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return step_row(first, v); }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return query(0, v); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return key(0, v); }

    static constexpr bool kKeyRows = false;
    static constexpr int kRows = 2, kKeys = 4, kKeyStride = 1, kQueryPartnerMask = 4;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v / 2 % 2; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 2 * r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return 2 * r + j % 2 + 4 * (j / 2); }
};
static_assert(covers_tile<KeysLayout>() && covers_tile<QueriesLayout>(), "score_layout.cuh");
static_assert(has_rows_and_keys<KeysLayout>() && has_rows_and_keys<QueriesLayout>(), "backward/score_coord.cuh");

// A 16x16 tile of P^T or dS^T as a lane holds it in fp16: queries 0,1 and 2,3 of its first key, then of
// the key two rows below.
struct PackedTile {
    u32 x[4];
};
// Word i has the elements packed_element(i) and the one behind it; element v is in word packed_word(v).
__device__ __forceinline__ constexpr int packed_element(int i) { return 4 * (i % 2) + 2 * (i / 2); }
__device__ __forceinline__ constexpr int packed_word(int v) { return (v & 2) + (v >> 2); }

template <class Pack>
__device__ __forceinline__ PackedTile packed(const Accumulator& s, Pack pack) {
    const auto word = [&](int i) { return pack(s[packed_element(i)], s[packed_element(i) + 1]); };
    return {{word(0), word(1), word(2), word(3)}};
}
__device__ __forceinline__ PackedTile pack_probability_tile(const Accumulator& s) { return packed(s, pack_probabilities); }
// fp32 to the end: dP - delta may be far beyond fp16 where P is small. Only dS itself is rounded to fp16,
// and beyond 65504 becomes infinite, which is what a GradScaler looks for.
__device__ __forceinline__ PackedTile pack_tile(const Accumulator& s) { return packed(s, to_half2); }
// s *= x.
__device__ __forceinline__ void multiply(Accumulator& s, const PackedTile& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_float2(x.x[i]);
        s[packed_element(i)] *= pair.x;
        s[packed_element(i) + 1] *= pair.y;
    }
}

// Address of the lane's first word in shared memory, for a warp whose scores begin at this own row and chunk of
// eight rows of the step.
__device__ __forceinline__ u32 packed_address(u32 tile, const Lane& lane, int row, int chunk) {
    return tile + swizzled<kScoreChunks>(row + score_own(lane, 0, 0), chunk + lane.qn) + 8 * ((lane.t >> 1) & 1);
}
// Tile (m, n) lies 16 * m rows and two chunks a tile on. Its first two words, and two rows further the other two.
__device__ __forceinline__ u32 packed_first(u32 address, int m, int n) {
    return chunk_after<kScoreChunks>(address, 2 * n) + 16 * m * kScoreRowBytes;
}
__device__ __forceinline__ u32 packed_second(u32 address, int m, int n) {
    return chunk_after<kScoreChunks>(address, 2 * n + row_swizzle<kScoreChunks>(2)) + (16 * m + 2) * kScoreRowBytes;
}
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile) {
    store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
// Only the rows that exist: `rows_left` is their number from the lane's first row on.
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile, int rows_left) {
    if (rows_left > 16 * m) store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    if (rows_left > 16 * m + 2) store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
__device__ __forceinline__ PackedTile load_packed(u32 address, int m, int n) {
    const uint2 a = load_shared2(packed_first(address, m, n)), b = load_shared2(packed_second(address, m, n));
    return {{a.x, a.y, b.x, b.y}};
}

// ---- initial accumulators -------------------------------------------------------------------------

// Where a group of statistics has the value that element v begins with.
__device__ constexpr bool statistics_fill_an_accumulator() {
    for (int v = 0; v < KeysLayout::kElements; v++)
        if (RowStats::offset(KeysLayout::query_slot(v)) + RowStats::kCopyDistance * (KeysLayout::key_slot(v) / 2) != v)
            return false;
    return true;
}
static_assert(statistics_fill_an_accumulator(), "load_stats loads accumulators as they are");

// Initial accumulators of S^T or dP^T from the row statistics: `stats` is those of the lane's group of
// four queries in tile 0. The two tiles of keys begin with the same values. They are loaded twice, by two
// different instructions: else ptxas would load once and spend a move on every element of the second tile.
// Fresh: this kernel itself has written them, which the second instruction may not find.
template <bool Fresh = false, int M, int N>
__device__ __forceinline__ void load_stats(Accumulator (&c)[M][N], const float* stats) {
    static_assert(M <= 2, "there are two instructions");
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 8; v += 4) {
                const float* from = stats + n * KeysLayout::kTileQueries * RowStats::kRowFloats + v;
                const float4 x = !m ? load_global4(from) : Fresh ? load_global4_l2(from) : load_global4_constant(from);
                c[m][n][v] = x.x, c[m][n][v + 1] = x.y, c[m][n][v + 2] = x.z, c[m][n][v + 3] = x.w;
            }
}
// Offset of the lane's group in the statistics of a tile of queries.
__device__ __forceinline__ int lane_stats_offset(const Lane& lane) { return score_step(lane, 0, 0) * RowStats::kRowFloats; }

// ---- operands -------------------------------------------------------------------------------------

// Address of the lane's row of the A operand of S^T, dP^T (the block's own rows), from the warp's first row.
template <class S>
__device__ __forceinline__ u32 own_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<S::kChunks>(row + key_of(lane.t, lane.qm), 0);
}
// ... and of the B operand (a step's rows), from the warp's first. Column t is the query of the file's head.
template <class S>
__device__ __forceinline__ u32 step_operand(u32 tile, const Lane& lane, int row) {
    const int in_eight = (lane.t & 1) + 2 * (lane.t >> 2) + 4 * ((lane.t >> 1) & 1);
    return tile + swizzled<S::kChunks>(row + 8 * lane.qn + in_eight, 0);
}

// The lane's row of the A operand of dV, dK (dQ in the queries kernel): P^T or dS^T (dS), row-major, from the warp's first row.
__device__ __forceinline__ u32 score_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<kScoreChunks>(row + key_of(lane.t, lane.qm), 0);
}
// ... and of the B operand: dO or Q (K), row-major; the warp's first block of 32 columns.
template <class S>
__device__ __forceinline__ u32 column_operand(u32 tile, const Lane& lane, int block) {
    return tile + swizzled<S::kChunks>(lane.quad, 4 * block + 2 * lane.qn + lane.half);
}
// Column of accumulator element v of c[..][j][i] relative to the warp's blocks: see column_operand.
__device__ __forceinline__ int column_in_block(const Lane& lane, int i, int v) {
    return 16 * lane.qn + 8 * (v >> 2) + 4 * i + (lane.t & 2) + (v & 1);
}

}  // namespace volta
