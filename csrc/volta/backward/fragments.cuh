// Lane layouts of the volta backward pass (m8n8k4): which scores and gradient elements a lane holds, where operands lie in
// shared memory, and how scores become operands. Nothing outside this folder depends on it.
//
// Every product is made of 16x16 tiles, with quad-pairs 2x2 (Lane::qm, Lane::qn; volta/mma.cuh). Row t of operand A of
// quad-pair qm is key t%4 + 4*qm + 8*(t/4) of 16 (key_of): eight consecutive lanes, one shared-memory wavefront, then read
// eight consecutive keys. Column n of quad-pair qn is query 8*qn + 4*bit1(n) + 2*bit2(n) + bit0(n) of 16: a lane's four
// accumulators of one key are then four consecutive queries, 8 bytes of fp16.
//
// "Own rows" are the rows that a block owns: keys in the main kernels, queries in the dq kernel. "Step rows" are the other
// kind.
//
// A lane is number t (0 to 7) of its quad-pair: t % 4 is quad, t / 4 is half. The four quad-pairs of a warp form a 2x2 over a tile
// of 16 by 16. The lane's quad-pair is in row qm and column qn of it (volta/mma.cuh).
#pragma once

#include "backward/packed_tile.cuh"
#include "backward/score_coord.cuh"
#include "tile.cuh"
#include "volta/backward/row_stats.cuh"
#include "volta/backward/shape.cuh"
#include "volta/mma.cuh"

namespace volta {

// Own row of a 16-row tile in row t of operand A of quad-pair row qm.
__device__ __forceinline__ int key_of(int t, int qm) { return t % 4 + 4 * qm + 8 * (t / 4); }

// ---- scores ---------------------------------------------------------------------------------------

// Own row and step row of element v of a 16x16 tile of scores, from those of element 0.
__device__ __forceinline__ constexpr int own_row(int first, int v) { return first + (v & 2); }
__device__ __forceinline__ constexpr int step_row(int first, int v) { return first + (v & 1) + 2 * (v >> 2); }
// The same in tile m or n, from the warp's first own row and first step row.
__device__ __forceinline__ constexpr int score_own(const Lane& lane, int m, int v) {
    return own_row(16 * m + 4 * lane.qm + (lane.t & 1), v) + 8 * (lane.t >> 2);
}
__device__ __forceinline__ constexpr int score_step(const Lane& lane, int n, int v) {
    return step_row(16 * n + 8 * lane.qn + 4 * ((lane.t >> 1) & 1), v);
}

// S^T and dP^T in the main kernels: rows are keys. backward/score_coord.cuh says what each member is.
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

    // A lane has kRows queries ("rows" here), each with kKeys keys that are kKeyStride apart. row_of(v) is the query of element v.
    // element(r, j) is the element of query r and key j. kKeyRows says whether the rows of the product are keys.
    static constexpr bool kKeyRows = true;
    static constexpr int kRows = 4, kKeys = 2, kKeyStride = 2, kKeyPartnerMask = 1, kQueryPartnerMask = 2;
    __device__ __forceinline__ static constexpr int row_of(int v) { return query_slot(v); }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return r % 2 + 4 * (r / 2) + 2 * j; }
};

// S and dP in the dq kernel: rows are queries.
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
static_assert(covers_tile<KeysLayout>() && covers_tile<QueriesLayout>(), "each score of a tile has one place (score_layout.cuh)");
static_assert(has_rows_and_keys<KeysLayout>() && has_rows_and_keys<QueriesLayout>(), "backward/score_coord.cuh");

// Address of the lane's first word in shared memory. The warp's scores begin at own row `row` and at chunk `chunk` of eight
// step rows.
__device__ __forceinline__ u32 packed_address(u32 tile, const Lane& lane, int row, int chunk) {
    return tile + swizzled<kScoreChunks>(row + score_own(lane, 0, 0), chunk + lane.qn) + 8 * ((lane.t >> 1) & 1);
}
// Address of tile (m, n): 16 * m rows and 2 * n chunks further. packed_first has its first two words, packed_second the other
// two.
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
// Stores only the rows that exist: rows_left of them from the lane's first on.
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile, int rows_left) {
    if (rows_left > 16 * m) store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    if (rows_left > 16 * m + 2) store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
__device__ __forceinline__ PackedTile load_packed(u32 address, int m, int n) {
    const uint2 a = load_shared2(packed_first(address, m, n)), b = load_shared2(packed_second(address, m, n));
    return {{a.x, a.y, b.x, b.y}};
}

// ---- initial accumulators -------------------------------------------------------------------------

// Whether a group of statistics has, in order, the values that elements v begin with.
__device__ constexpr bool statistics_fill_an_accumulator() {
    for (int v = 0; v < KeysLayout::kElements; v++)
        if (RowStats::offset(KeysLayout::query_slot(v)) + RowStats::kCopyDistance * (KeysLayout::key_slot(v) / 2) != v)
            return false;
    return true;
}
static_assert(statistics_fill_an_accumulator(), "load_stats loads accumulators as they are");

// Loads the initial accumulators of dP^T from the row statistics. `stats`: -delta of the lane's four queries in tile 0.
// Both tiles of keys begin with the same values. Two different instructions load them, because ptxas would merge equal loads
// and spend a move on every element of the second tile. Fresh: this kernel has written the statistics itself, so the second
// load bypasses L1 and the read-only path.
template <bool Fresh = false, int M, int N>
__device__ __forceinline__ void load_stats(Accumulator (&c)[M][N], const float* stats) {
    static_assert(M <= 2, "load_stats has two load instructions");
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
// Loads one copy of a statistic of the lane's four queries in each tile. Not by the read-only path: a fused kernel has written it.
template <int N>
__device__ __forceinline__ void load_rows(float (&x)[N][KeysLayout::kRows], const float* stats) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < KeysLayout::kRows; r += 2) {
            const uint2 two = load_global2(stats + n * KeysLayout::kTileQueries * RowStats::kRowFloats + RowStats::offset(r));
            x[n][r] = __uint_as_float(two.x), x[n][r + 1] = __uint_as_float(two.y);
        }
}
// Offset of the lane's group in the statistics of a tile of queries.
__device__ __forceinline__ int lane_stats_offset(const Lane& lane) { return score_step(lane, 0, 0) * RowStats::kRowFloats; }

// ---- operands -------------------------------------------------------------------------------------

// Address of the lane's row of operand A of S^T and dP^T (own rows), from the warp's first row.
template <class S>
__device__ __forceinline__ u32 own_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<S::kChunks>(row + key_of(lane.t, lane.qm), 0);
}
// Address of the lane's row of operand B (step rows), from the warp's first row. Column t is the query described at the top.
template <class S>
__device__ __forceinline__ u32 step_operand(u32 tile, const Lane& lane, int row) {
    const int in_eight = (lane.t & 1) + 2 * (lane.t >> 2) + 4 * ((lane.t >> 1) & 1);
    return tile + swizzled<S::kChunks>(row + 8 * lane.qn + in_eight, 0);
}

// Address of the lane's row of operand A of dV and dK (P^T, dS^T) or of dQ (dS), row-major, from the warp's first row.
__device__ __forceinline__ u32 score_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<kScoreChunks>(row + key_of(lane.t, lane.qm), 0);
}
// Address of the lane's part of operand B (dO, Q or K), row-major. `block`: the warp's first block of 32 columns.
template <class S>
__device__ __forceinline__ u32 column_operand(u32 tile, const Lane& lane, int block) {
    return tile + swizzled<S::kChunks>(lane.quad, 4 * block + 2 * lane.qn + lane.half);
}
// Column of element v of c[..][j][i], relative to the warp's blocks; see column_operand.
__device__ __forceinline__ int column_in_block(const Lane& lane, int i, int v) {
    return 16 * lane.qn + 8 * (v >> 2) + 4 * i + (lane.t & 2) + (v & 1);
}

}  // namespace volta
