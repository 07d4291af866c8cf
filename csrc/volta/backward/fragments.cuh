// Lane layouts of the volta backward kernels (mma.m8n8k4): which scores and gradient elements a lane holds, where operands lie in
// shared memory, and how scores become operands. products.cuh and the kernels of this folder use it; nothing outside does.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, in row qm and column qn of the warp's 2x2 (volta/mma.cuh). Here
// quad is lane % 4, and half is lane / 16.
//
// Every product is made of 16x16 tiles. Row t of operand A of quad-pair qm is key t%4 + 4*qm + 8*(t/4) of 16 (own_row_of): eight
// consecutive lanes, one shared-memory wavefront, then read eight consecutive keys. Column n of quad-pair qn is query 8*qn +
// 4*bit1(n) + 2*bit2(n) + bit0(n) of 16: a lane's four accumulators of one key are then four consecutive queries, 8 bytes of fp16.
//
// "Own rows" are the rows that a block owns: keys in the main kernels, queries in the dq kernel. "Step rows" are those that it
// visits. m counts tiles of 16 own rows, n of 16 step rows, v (0 to 7) a lane's elements in a 16x16 tile. A chunk is 16 bytes,
// eight fp16. S in templates is the kernel's Shape (shape.cuh): kChunks chunks of a row of Q, K, V or dO, kRowBytes bytes.
#pragma once

#include "backward/packed_tile.cuh"
#include "backward/scratch.cuh"
#include "backward/score_coord.cuh"
#include "tile.cuh"
#include "volta/backward/shape.cuh"
#include "volta/mma.cuh"

namespace volta {

// Own row of a 16-row tile in row t of operand A of quad-pair row qm.
__device__ __forceinline__ int own_row_of(int t, int qm) { return t % 4 + 4 * qm + 8 * (t / 4); }

// ---- scores ---------------------------------------------------------------------------------------

// Own row and step row of element v of a 16x16 tile of scores, from those of element 0.
__device__ __forceinline__ constexpr int own_row(int first, int v) { return first + (v & 2); }
__device__ __forceinline__ constexpr int step_row(int first, int v) { return first + (v & 1) + 2 * (v >> 2); }
// The same of tile m or n of the warp, counted from the warp's first own row and first step row.
__device__ __forceinline__ constexpr int score_own(const Lane& lane, int m, int v) {
    return own_row(16 * m + 4 * lane.qm + (lane.t & 1), v) + 8 * (lane.t >> 2);
}
__device__ __forceinline__ constexpr int score_step(const Lane& lane, int n, int v) {
    return step_row(16 * n + 8 * lane.qn + 4 * ((lane.t >> 1) & 1), v);
}

// S^T and dP^T in the main kernels: rows are keys. backward/score_coord.cuh says what each member is. Slots are the query and key
// of element v, counted from the lane's first ones.
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

    // kKeyRows: rows of the product are keys.
    // In all other names below, "row" means query. A lane has kRows queries, each with kKeys keys kKeyStride apart. Element v is of
    // query row_of(v), and element(r, j) is that of query r and key j. Lane ^ 1 has the keys between, lane ^ 2 queries 4 away.
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

    // A lane has kRows queries, each with kKeys keys. Lane ^ 4, of the other qm, has the queries 4 before or after.
    static constexpr bool kKeyRows = false;
    static constexpr int kRows = 2, kKeys = 4, kKeyStride = 1, kQueryPartnerMask = 4;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v / 2 % 2; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 2 * r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return 2 * r + j % 2 + 4 * (j / 2); }
};
static_assert(covers_tile<KeysLayout>() && covers_tile<QueriesLayout>(), "each score of a tile has one place (score_layout.cuh)");
static_assert(has_rows_and_keys<KeysLayout>() && has_rows_and_keys<QueriesLayout>(), "rows, keys and elements agree");

// Where a lane's packed scores lie in a tile of P^T or dS^T. A PackedTile has two own rows of two words, and a word the fp16 scores
// of two step rows. packed_address: of the lane's first word in tile (0, 0). The warp's scores begin at own row `row` and at chunk
// `chunk` of eight step rows. `tile`: shared address of the tile of P^T or dS^T.
__device__ __forceinline__ u32 packed_address(u32 tile, const Lane& lane, int row, int chunk) {
    return tile + swizzled<kScoreChunks>(row + score_own(lane, 0, 0), chunk + lane.qn) + 8 * ((lane.t >> 1) & 1);
}
// In tile (m, n), 16 * m rows and 2 * n chunks further: packed_first is the address of the lane's first two words, packed_second
// that of the other two, two rows further, where the swizzle puts the chunk row_swizzle(2) chunks from its place in the first row.
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

// RowStats (backward/scratch.cuh) has groups of four queries, each value twice, kCopyDistance floats apart: two 16-byte loads fill
// an accumulator, whose elements are two keys of each query.

// Returns whether float v of a group's statistic is the value of element v's query, for all v.
__device__ constexpr bool statistics_fill_an_accumulator() {
    for (int v = 0; v < KeysLayout::kElements; v++)
        if (RowStats::offset(KeysLayout::query_slot(v)) + RowStats::kCopyDistance * (KeysLayout::key_slot(v) / 2) != v)
            return false;
    return true;
}
static_assert(statistics_fill_an_accumulator(), "load_stats loads accumulators as they are");

// Loads -delta from the row statistics as the initial accumulators of dP^T. `stats`: that of the lane's four queries in tile 0.
// Both tiles of keys begin with the same values. Two different instructions load them, because ptxas would merge equal loads and
// spend a move on every element of the second tile. Fresh: this kernel wrote the statistics, so the second load takes L2.
template <bool Fresh = false, int M, int N>
__device__ __forceinline__ void load_stats(Accumulator (&c)[M][N], const float* stats) {
    static_assert(M <= 2, "load_stats has two load instructions");
    unrolled<M, N>([&](int m, int n) {
#pragma unroll
        for (int v = 0; v < 8; v += 4) {
            const float* from = stats + n * KeysLayout::kTileQueries * RowStats::kRowFloats + v;
            const float4 x = !m ? load_global4(from) : Fresh ? load_global4_l2(from) : load_global4_constant(from);
            c[m][n][v] = x.x, c[m][n][v + 1] = x.y, c[m][n][v + 2] = x.z, c[m][n][v + 3] = x.w;
        }
    });
}
// Loads a statistic, one copy, of the lane's four queries in each tile. Not by the read-only path: a fused kernel has written it.
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
// Offset, in floats, of the lane's group in the statistics of a tile of queries.
__device__ __forceinline__ int lane_stats_offset(const Lane& lane) { return score_step(lane, 0, 0) * RowStats::kRowFloats; }

// ---- operands -------------------------------------------------------------------------------------
// Shared addresses of the lane's first 16 bytes of operands. `tile`: the operand's tile. `row`: the warp's first row in it.

// Operand A of S^T and dP^T: own rows.
template <class S>
__device__ __forceinline__ u32 own_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<S::kChunks>(row + own_row_of(lane.t, lane.qm), 0);
}
// Operand B of S^T and dP^T: step rows. Row row + 8 * qn + in_eight is column n = t at the top of the file.
template <class S>
__device__ __forceinline__ u32 step_operand(u32 tile, const Lane& lane, int row) {
    const int in_eight = (lane.t & 1) + 2 * (lane.t >> 2) + 4 * ((lane.t >> 1) & 1);
    return tile + swizzled<S::kChunks>(row + 8 * lane.qn + in_eight, 0);
}

// Operand A of dV and dK (P^T, dS^T), or of the dq kernel's dQ (dS), row-major.
__device__ __forceinline__ u32 score_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<kScoreChunks>(row + own_row_of(lane.t, lane.qm), 0);
}
// Operand B of dV, dK and dQ (dO, Q or K), row-major. `block`: the warp's first block of 32 columns.
template <class S>
__device__ __forceinline__ u32 column_operand(u32 tile, const Lane& lane, int block) {
    return tile + swizzled<S::kChunks>(lane.quad, 4 * block + 2 * lane.qn + lane.half);
}
// Returns the column, in its block of 32, of element v of a product with half i (four columns) of a column_operand() chunk.
__device__ __forceinline__ int column_in_block(const Lane& lane, int i, int v) {
    return 16 * lane.qn + 8 * (v >> 2) + 4 * i + (lane.t & 2) + (v & 1);
}

}  // namespace volta
