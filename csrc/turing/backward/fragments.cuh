// Lane layouts of the turing backward kernels (mma.m16n8k8, turing/mma.cuh): which scores and gradient elements a lane holds
// (KeysLayout, QueriesLayout), where operands lie in shared memory (by_rows() and others), and stores of gradients. Included by all
// kernels of this folder, directly or by shape.cuh, and by nothing outside it.
//
// "Own rows" are the rows that a thread block owns: keys in the main kernels (which compute dK and dV), queries in the dq kernels.
// "Step rows" are the other kind. A block visits kStep of them in each step. The products of the main kernels, for 16 own rows:
//
//   S^T  = K Q^T     A: own rows, registers or shared memory  B: step rows, from shared memory as they lie
//   dP^T = V dO^T    the same
//   dV += P^T dO     A: packed scores of the same lane        B: step rows, transposed by ldmatrix
//   dK += dS^T Q     the same
//   dQ += dS K       A: dS^T from shared memory, transposed   B: the block's K from shared memory, transposed
//
// The dq kernels have S = Q K^T and dP = dO V^T (A: registers), and dQ += dS K like dV: A is the lane's own packed dS.
//
// Four neighboring keys, from a multiple of four on, share a call of dropout's generator (Philox) and a load of the bias. So rows
// and columns of the products are permutations of the keys: with 32 keys a tile, a lane has all four. With 16 keys, or in the dq
// kernels' S, it has the first and third, or the second and fourth. Shared tiles whose rows are the block's keys are stored in the
// products' order. So the eight rows of a matrix are neighbors, which the swizzle (tile.cuh) puts into different banks.
//
// In names of layouts, "row" means query (kRows, row_of, row_slot); query_of_row and row_of_key have rows of a shared tile.
// Elsewhere it is an own row or a step row.
//
//   S (Shape)         sizes (shape.cuh): kChunks chunks of eight columns (16 bytes of fp16), kRowBytes bytes of a row
//   Lane              of a lane, group is lane / 4, and quad is lane % 4 (turing/mma.cuh)
//   kRequiresDropout  all problems of the kernel use dropout, and no other score feature: softcap, ALiBi, bias (features.cuh)
#pragma once

#include "backward/gradient_output.cuh"  // store_gradient2(), gradients_are_fp32()
#include "backward/score_coord.cuh"  // ScoreCoord: query and key of a lane's elements; has_rows_and_keys()
#include "half.cuh"
#include "score_mod.cuh"
#include "softmax.cuh"
#include "tile.cuh"  // swizzled(), chunk_after(x, n): shared addresses; kChunk: 8 columns, kChunkBytes: 16
#include "turing/mma.cuh"

namespace turing {

// threadIdx.x, read again to hold no register (ptx.cuh), as unsigned: divisions by powers of two are then one instruction.
__device__ __forceinline__ u32 remat_thread() { return remat_thread_index(); }
__device__ __forceinline__ Lane remat_lane() { return Lane(remat_thread() % 32); }

// ---- scores ---------------------------------------------------------------------------------------

// True if dropout is the one score feature. A lane then draws random numbers for itself alone (one_feature.cuh): with 32 keys it
// has all eight scores of a Philox call, two queries 4 apart by four keys. Else lanes draw for each other (modifiers.cuh).
constexpr bool kOneCallPerLane = kRequiresDropout;

// S^T and dP^T in the main kernels: a tile of 16 * KeyTiles keys by 8 queries, one accumulator for each 16 keys. Element v of a
// lane (kElements) is query first_query + query_slot(v) and key first_key + key_slot(v) of the tile (score_layout.cuh). query() and
// key() take `first`, the coordinate of element 0.
template <int KeyTiles>
struct KeysLayout {
    static_assert(KeyTiles == 1 || KeyTiles == 2, "a warp has one or two tiles of keys");
    using Lane = turing::Lane;
    using Tile = float[4 * KeyTiles];
    static constexpr int kTileQueries = 8, kTileKeys = 16 * KeyTiles, kElements = 4 * KeyTiles;
    // Where a lane draws for itself alone, its two queries are those of one Philox call (philox.cuh).
    static constexpr int kQueryStride = kOneCallPerLane ? 4 : 1;
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return kOneCallPerLane ? l.quad : 2 * l.quad; }
    // The query, of eight, in a row of the step's tiles of Q and dO, and the row of a query.
    __device__ __forceinline__ static constexpr u32 query_of_row(u32 row) { return kOneCallPerLane ? row / 2 + row % 2 * 4 : row; }
    __device__ __forceinline__ static constexpr u32 row_of_query(u32 query) {
        return kOneCallPerLane ? query % 4 * 2 + query / 4 : query;
    }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) {
        return KeyTiles == 2 ? 4 * l.group : l.group / 2 * 4 + l.group % 2;
    }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return (v & 1) * kQueryStride; }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return (v >> 1) * kKeyStride; }
    __device__ __forceinline__ static constexpr int query(int first, int v) { return first + query_slot(v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return first + key_slot(v); }

    // A lane has kRows queries ("rows" here), each with kKeys keys, kKeyStride apart. row_of(v): query of element v. element(r, j):
    // that of query r and key j. kKeyRows: rows of the product are keys.
    static constexpr bool kKeyRows = true;
    static constexpr int kRows = 2, kKeys = 2 * KeyTiles, kKeyStride = 2 / KeyTiles;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v & 1; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return r * kQueryStride; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return r + 2 * j; }

    // XOR mask to the lane that shares calls of the generator (modifiers.cuh). kKeyPartnerMask, with two keys a lane: to the lane
    // with the other two of four keys. kQueryPartnerMask, with four: to that with the queries 4 before or after.
    static constexpr int kKeyPartnerMask = 4, kQueryPartnerMask = 2;
    // The key of row h (of two) of the lane, in operand A of 16 keys number m of the tile. It is that of element 4 * m + 2 * h.
    __device__ __forceinline__ static constexpr int key_of_lane(const Lane& l, int m, int h) {
        return key(first_key(l), 4 * m + 2 * h);
    }
    // The row of a key in the operands, and in tiles in shared memory. With 32 keys, keys 0 to 3 have rows 0, 8, 16 and 24, which
    // are those of the lanes of group 0, and key 4 has row 1. With 16, keys 0 to 3 have rows 0, 1, 8 and 9, and key 4 has row 2.
    __device__ __forceinline__ static constexpr int row_of_key(int key) {
        if (KeyTiles == 2) return key / 32 * 32 + key / 2 % 2 * 16 + key % 2 * 8 + key / 4 % 8;
        return key / 16 * 16 + key / 2 % 2 * 8 + key / 4 % 4 * 2 + key % 2;
    }
};

// S and dP in the dq kernels: a tile of 16 queries by 8 keys, an accumulator. Members are those of KeysLayout.
struct QueriesLayout {
    using Lane = turing::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 8, kElements = 4;
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return l.group; }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return l.quad / 2 * 4 + l.quad % 2; }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return v >> 1 << 3; }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return (v & 1) << 1; }
    __device__ __forceinline__ static constexpr int query(int first, int v) { return first + query_slot(v); }
    __device__ __forceinline__ static constexpr int key(int first, int v) { return first + key_slot(v); }

    static constexpr bool kKeyRows = false;
    static constexpr int kRows = 2, kKeys = 2, kKeyStride = 2;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v >> 1; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 8 * r; }
    __device__ __forceinline__ static constexpr int element(int r, int j) { return 2 * r + j; }

    static constexpr int kKeyPartnerMask = 1;
    // The key, of eight, of column n of operand B. Columns 0 to 3 are keys 0, 2, 1 and 3: a lane has two neighboring columns.
    __device__ __forceinline__ static constexpr int key_of_column(u32 n) { return n / 4 * 4 + n % 2 * 2 + n / 2 % 2; }
};
static_assert(covers_tile<KeysLayout<1>>() && covers_tile<KeysLayout<2>>() && covers_tile<QueriesLayout>(),
              "each score of a tile has one place (score_layout.cuh)");
static_assert(has_rows_and_keys<KeysLayout<1>>() && has_rows_and_keys<KeysLayout<2>>() && has_rows_and_keys<QueriesLayout>(),
              "backward/score_coord.cuh");  // which says what kRows and the members after it promise

// ---- operands -------------------------------------------------------------------------------------

// A lane's part of operand A: 16 rows by eight k. Word h has two neighboring fp16 of row group + 8 * h.
using OperandA = u32[2];

// Moves all packed tiles of a warp down by one, and puts `tile` last: rolled loops cannot index registers. The dq kernels
// with score features call it for each tile of P or dS.
template <int M, int N>
__device__ __forceinline__ void append_tile(OperandA (&x)[M][N], const OperandA& tile) {
#pragma unroll
    for (int i = 0; i < M * N; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) x[i / N][i % N][h] = i + 1 < M * N ? x[(i + 1) / N][(i + 1) % N][h] : tile[h];
}

// Loads the warp's own rows, from `row` of the sequence on, as operands a[m][c] from global memory, before the steps: tiles m of 16
// rows, chunks c. Zeros where a row is not among the `rows` of the sequence, or a column not below headdim. `base`: row 0. h: one
// of the lane's two rows in a tile; row_of_lane(lane, m, h): its number in the warp. sign_flip: XORed into each pair of fp16;
// 0x80008000 negates both, for a negative softmax_scale; else 0.
template <int M, int Chunks, class RowOfLane>
__device__ __forceinline__ void load_own_fragments(OperandA (&a)[M][Chunks], const Operand& from, const unsigned short* base,
                                                   int row, int rows, int headdim, u32 sign_flip, RowOfLane row_of_lane) {
    const Lane lane(threadIdx.x & 31);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = row + row_of_lane(lane, m, h);
            const unsigned short* source = base + i * from.row_stride + 2 * lane.quad;
#pragma unroll
            for (int c = 0; c < Chunks; c++) {
                a[m][c][h] = 0;
                if (i < rows && c * kChunk < headdim)
                    a[m][c][h] = __ldg(reinterpret_cast<const u32*>(source + c * kChunk)) ^ sign_flip;
            }
        }
}
// row_of_lane of the dq kernels.
__device__ __forceinline__ constexpr int query_of_lane(const Lane& lane, int m, int h) { return 16 * m + lane.group + 8 * h; }

// Byte offset of a chunk in a tile of swizzled rows: swizzled() (tile.cuh, which explains it) on unsigned numbers.
template <int Chunks>
__device__ __forceinline__ u32 remat_swizzled(u32 row, u32 chunk) {
    const u32 parity = Chunks % 8 == 0 ? (row & 1) << 2 : 0;
    return (row * Chunks + (chunk ^ (row >> 1 & 3) ^ parity)) * kChunkBytes;
}
// Address of a lane's row for ldmatrix (load_matrices): 16 rows by two chunks of a shared `tile` (its address), as four 8x8
// matrices; lane i has row i % 8 of matrix i / 8. by_chunks orders them along the chunks first, so matrices 0 and 1 are rows 0 to
// 7, chunks 0 and 1. by_rows orders them down the rows first, so matrices 0 and 1 are the first chunk, `chunk`.
template <class S>
__device__ __forceinline__ u32 by_chunks(u32 tile, u32 lane) {
    return tile + remat_swizzled<S::kChunks>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class S>
__device__ __forceinline__ u32 by_rows(u32 tile, u32 lane, u32 chunk = 0) {
    return tile + remat_swizzled<S::kChunks>(lane % 8 + lane / 8 % 2 * 8, chunk + lane / 16);
}
// by_chunks and by_rows in dq kernels, whose tiles of K and V lie in the keys' own order: in the order of QueriesLayout's columns.
template <class S>
__device__ __forceinline__ u32 keys_by_chunks(u32 tile, u32 lane) {
    return tile + remat_swizzled<S::kChunks>(QueriesLayout::key_of_column(lane % 8) + lane / 16 * 8, lane / 8 % 2);
}
template <class S>
__device__ __forceinline__ u32 keys_by_rows(u32 tile, u32 lane) {
    return tile + remat_swizzled<S::kChunks>(QueriesLayout::key_of_column(lane % 8) + lane / 8 % 2 * 8, lane / 16);
}
// Address `pair` pairs of chunks (16 columns each) further in its row.
template <class S>
__device__ __forceinline__ u32 pair_after(u32 address, int pair) {
    return chunk_after<S::kChunks>(address, 2 * pair);
}

// Byte offset of a chunk in a tile of dS^T, whose rows are the block's keys in row_of_key's order: Chunks chunks of eight queries.
template <int Chunks>
__device__ __forceinline__ u32 score_offset(u32 row, u32 chunk) {
    static_assert(Chunks == 2 || Chunks == 4, "steps of 16 or 32 queries");
    // Rows of two chunks are 32 bytes, so rows r and r + 4 share banks. In the second four rows the chunks trade places: one chunk
    // of eight rows then lies in all banks.
    if (Chunks == 2) return (row * 2 + (chunk ^ (row >> 2 & 1))) * kChunkBytes;
    return remat_swizzled<4>(row, chunk);
}
// Address of another chunk of the same row of dS^T, from that of chunk 0.
__device__ __forceinline__ u32 score_chunk(u32 address, int chunk) { return address ^ chunk * kChunkBytes; }

// ---- output ---------------------------------------------------------------------------------------

// Stores a warp's rows of a gradient, c[m][j]: M tiles of 16 rows by Tiles tiles of 8 columns, times `factor`. Its rows are `row` +
// row_of_lane(lane, m, h), of `rows` that exist. Of the pairs of column tiles the warp has every PairStep-th, from first_pair on.
// `base`: row 0 of the sequence in `out`, of the output's dtype (Element).
template <int PairStep, int M, int Tiles, class Element, class RowOfLane>
__device__ __forceinline__ void write_gradient_as(const Accumulator (&c)[M][Tiles], const Output& out, Element* base, float factor,
                                                  int row, int rows, int headdim, RowOfLane row_of_lane, int first_pair) {
    const Lane lane = remat_lane();
    const int first_column = first_pair * 2 * kChunk;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = row + row_of_lane(lane, m, h);
            Element* to = base + i * out.row_stride + first_column + 2 * lane.quad;
#pragma unroll
            for (int j = 0; j < Tiles; j++) {
                const int column = (j / 2 * PairStep * 2 + j % 2) * kChunk;
                if (i < rows && column < headdim - first_column)
                    store_gradient2(to + column, c[m][j][2 * h] * factor, c[m][j][2 * h + 1] * factor);
            }
        }
}
// write_gradient_as() in the output's dtype. Branches once around all stores: the code exists twice, and runs once.
template <int PairStep = 1, int M, int Tiles, class RowOfLane>
__device__ __forceinline__ void write_gradient(const Accumulator (&c)[M][Tiles], const BwdParams& p, const Output& out,
                                               unsigned short* base, float factor, int row, int rows, int headdim,
                                               RowOfLane row_of_lane, int first_pair = 0) {
    if (gradients_are_fp32(p))
        write_gradient_as<PairStep>(c, out, fp32_element(out, base), factor, row, rows, headdim, row_of_lane, first_pair);
    else
        write_gradient_as<PairStep>(c, out, base, factor, row, rows, headdim, row_of_lane, first_pair);
}

}  // namespace turing
