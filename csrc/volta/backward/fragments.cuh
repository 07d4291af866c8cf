// Lane layouts of the volta backward kernels (mma.m8n8k4): which elements of scores and gradients a lane holds, where its operands
// lie in shared memory, and how scores become operands. For all kernels of this folder: main kernels, whose thread blocks own keys
// and compute dK, dV, most dQ too; the dq kernel, whose blocks own queries; stored.cuh. "Own rows" are those that a block owns,
// "step rows" the others, which it visits a step at a time. Where a comment says key and query, it speaks of main kernels.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, the eight lanes of an 8x8x4 product: quad is lane % 4, half is
// lane / 16. A warp has 2x2 quad-pairs, in rows qm (bit 2 of the lane) and columns qn (bit 3). Products are made of 16x16 tiles.
// Row t of operand A of quad-pair qm is key t%4 + 4*qm + 8*(t/4) of 16: eight consecutive lanes, which shared memory serves
// together, then read eight consecutive keys. Column n of operand B of quad-pair qn is query 8*qn + 4*bit1(n) + 2*bit2(n) + bit0(n)
// of 16: a lane's four accumulators of one key are then four consecutive queries, 8 bytes of fp16.
//
//   m, n, v           a tile of 16 own rows of the warp; of 16 step rows; a lane's element (0 to 7) of a 16x16 tile
//   chunk, panel      16 bytes, eight fp16 elements of a row; 32 columns (of headdim) of a gradient, four chunks
//   S                 in templates the kernel's Shape (shape.cuh): kChunks chunks, kRowBytes bytes of a row of Q, K, V or dO
//   kScoreChunks, kScoreRowBytes  of a row of P^T or dS^T in shared memory: 4 chunks of eight step rows; 64 bytes
//   swizzled(r, c)    byte offset of chunk c of row r in a tile with permuted chunks; chunk_after(x, n): address n chunks after x
#pragma once

#include "backward/packed_tile.cuh"  // PackedTile: a lane's eight scores as fp16
#include "backward/scratch.cuh"  // RowStats
#include "backward/score_coord.cuh"  // what both layouts promise to shared code: covers_tile(), has_rows_and_keys()
#include "tile.cuh"  // swizzled(), chunk_after(); load_shared() 16 bytes, load_shared2() 8
#include "volta/backward/shape.cuh"
#include "volta/mma.cuh"

namespace volta {

// Row of a 16-row tile that is row t of operand A of quad-pair row qm.
__device__ __forceinline__ int operand_row(int t, int qm) { return t % 4 + 4 * qm + 8 * (t / 4); }

// ---- scores ---------------------------------------------------------------------------------------

// Own row and step row of a lane's element v of a tile of scores, from those of its element 0.
__device__ __forceinline__ constexpr int element_own_row(int first, int v) { return first + (v & 2); }
__device__ __forceinline__ constexpr int element_step_row(int first, int v) { return first + (v & 1) + 2 * (v >> 2); }
// The same in tile m or n of the warp, counted from the warp's first own row and first step row.
__device__ __forceinline__ constexpr int score_own(const Lane& lane, int m, int v) {
    return element_own_row(16 * m + 4 * lane.qm + (lane.t & 1), v) + 8 * (lane.t >> 2);
}
__device__ __forceinline__ constexpr int score_step(const Lane& lane, int n, int v) {
    return element_step_row(16 * n + 8 * lane.qn + 4 * ((lane.t >> 1) & 1), v);
}

// S^T and dP^T in the main kernels: rows are keys. Tells shared code (interface: backward/score_coord.cuh) that element v is query
// first_query(lane) + query_slot(v) and key first_key(lane) + key_slot(v) of a tile: slots count from the lane's first ones.
// query(first, v) and key(first, v) add the slot to `first`.
struct KeysLayout {
    using Lane = volta::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 8;
    __device__ __forceinline__ static constexpr int first_query(const Lane& lane) { return score_step(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int first_key(const Lane& lane) { return score_own(lane, 0, 0); }
    __device__ __forceinline__ static constexpr int query(int first, int v) { return element_step_row(first, v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return element_own_row(first, v); }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return query(0, v); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return key(0, v); }

    // kKeyRows: rows of the product are keys. In this struct's other names, "row" means query. A lane has kRows queries r, each
    // with kKeys keys j kKeyStride apart. Query r is row_slot(r) after the lane's first. Element v is of query r = row_of(v), and
    // element(r, j) is the v of query r and key j. Lane ^ 1 (kKeyPartnerMask) has the keys between, lane ^ 2 queries 4 away.
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
    __device__ __forceinline__ static constexpr int query(int first, int v) { return element_own_row(first, v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return element_step_row(first, v); }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return query(0, v); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return key(0, v); }

    // Members as above. Lane ^ 4 (kQueryPartnerMask), of the other qm, has the queries 4 before or after.
    static constexpr bool kKeyRows = false;
    static constexpr int kRows = 2, kKeys = 4, kKeyStride = 1, kQueryPartnerMask = 4;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v / 2 % 2; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 2 * r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return 2 * r + j % 2 + 4 * (j / 2); }
};
static_assert(covers_tile<KeysLayout>() && covers_tile<QueriesLayout>(), "each score of a tile has one place (score_layout.cuh)");
static_assert(has_rows_and_keys<KeysLayout>() && has_rows_and_keys<QueriesLayout>(), "rows, keys and elements agree");

// A PackedTile is a lane's eight scores of a 16x16 tile (m, n) as fp16: four words x[i], two for each of two own rows; a word has
// two step rows. packed_address() returns the shared address of the lane's first word in (0, 0). `tile`: that of the block's P^T or
// dS^T, with a row for each own row. The warp's scores begin there at row `row` and chunk `chunk`.
__device__ __forceinline__ u32 packed_address(u32 tile, const Lane& lane, int row, int chunk) {
    return tile + swizzled<kScoreChunks>(row + score_own(lane, 0, 0), chunk + lane.qn) + 8 * ((lane.t >> 1) & 1);
}
// `address`: packed_address(). Tile (m, n) is 16 * m rows and 2 * n chunks further. packed_first() returns the address of its words
// x[0] and x[1], packed_second() that of x[2] and x[3], two rows further, where the swizzle moves a chunk by row_swizzle(2).
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
// Stores only the own rows that exist: rows_left of them from the lane's first in tile (0, n) on.
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile, int rows_left) {
    if (rows_left > 16 * m) store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    if (rows_left > 16 * m + 2) store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
__device__ __forceinline__ PackedTile load_packed(u32 address, int m, int n) {
    const uint2 a = load_shared2(packed_first(address, m, n)), b = load_shared2(packed_second(address, m, n));
    return {{a.x, a.y, b.x, b.y}};
}

// ---- initial accumulators -------------------------------------------------------------------------

// RowStats (backward/scratch.cuh) is the layout of -lse/|softmax_scale| and -delta (rowsum(dO * O)) in global memory: kRowFloats
// (4) floats a query. Either statistic of four queries is eight floats, each value twice: query r's at offset(r), and kCopyDistance
// floats further. Two 16-byte loads fill an accumulator, whose elements are two keys of each query. `stats`: the statistic to load,
// of the lane's queries in tile 0 (lane_stats_offset()).

// Returns whether float v of a statistic of four queries is the value of element v's query, for all v.
__device__ constexpr bool statistics_fill_an_accumulator() {
    for (int v = 0; v < KeysLayout::kElements; v++)
        if (RowStats::offset(KeysLayout::query_slot(v)) + RowStats::kCopyDistance * (KeysLayout::key_slot(v) / 2) != v)
            return false;
    return true;
}
static_assert(statistics_fill_an_accumulator(), "load_stats loads accumulators as they are");

// Loads -delta as the initial accumulators of dP^T, M tiles of keys by N tiles of queries. Both tiles of keys begin with the same
// values. Two different instructions load them, because ptxas would merge equal loads and spend a move on every element of the
// second tile. Fresh: this kernel (the fused one, all of the backward pass) wrote the statistics, so the second load takes L2.
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
// Loads one copy of a statistic, of four queries of the lane in N tiles. Not by the read-only path: a fused kernel has written it.
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
// Offset, in floats, of the lane's four queries in the statistics of a tile of queries.
__device__ __forceinline__ int lane_stats_offset(const Lane& lane) { return score_step(lane, 0, 0) * RowStats::kRowFloats; }

// ---- operands -------------------------------------------------------------------------------------
// Shared addresses of the lane's first 16 bytes of an operand. `tile`: address of the block's tile that has it, rows of Q, K, V,
// dO, P^T or dS^T. `row`: the warp's first row in it. Products step from there with chunk_after() (products.cuh).

// Operand A of S^T and dP^T: own rows.
template <class S>
__device__ __forceinline__ u32 own_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<S::kChunks>(row + operand_row(lane.t, lane.qm), 0);
}
// Operand B of S^T and dP^T: step rows. 8 * qn + in_eight is the query of column n = t, by the formula at the top of the file.
template <class S>
__device__ __forceinline__ u32 step_operand(u32 tile, const Lane& lane, int row) {
    const int in_eight = (lane.t & 1) + 2 * (lane.t >> 2) + 4 * ((lane.t >> 1) & 1);
    return tile + swizzled<S::kChunks>(row + 8 * lane.qn + in_eight, 0);
}

// Operand A (row-major) of dV and dK: P^T and dS^T; in the dq kernel of dQ: dS.
__device__ __forceinline__ u32 score_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<kScoreChunks>(row + operand_row(lane.t, lane.qm), 0);
}
// Operand B (row-major) of dV, dK and the dq kernel's dQ: dO, Q or K. `panel`: number of the warp's first panel of 32 columns.
template <class S>
__device__ __forceinline__ u32 column_operand(u32 tile, const Lane& lane, int panel) {
    return tile + swizzled<S::kChunks>(lane.quad, 4 * panel + 2 * lane.qn + lane.half);
}
// A lane's chunk of that operand has two halves i of four columns, each for a product of its own. Returns the column, in the panel,
// of element v of product i.
__device__ __forceinline__ int column_in_panel(const Lane& lane, int i, int v) {
    return 16 * lane.qn + 8 * (v >> 2) + 4 * i + (lane.t & 2) + (v & 1);
}

}  // namespace volta
