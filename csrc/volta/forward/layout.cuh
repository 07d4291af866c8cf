// What the volta forward kernels share (register_q.cuh, shared_q.cuh, column_groups.cuh; split.cuh: layout and P alone): which
// lane holds which score, operand and output; P as an operand; write_output(), called last; partial results, where several blocks
// or warps have the same rows; the default grid policy. Grid, a template argument of the kernels, tells a block its rows, its
// steps of keys and how it loads them.
//
// A warp owns 16 * RowTiles query rows and takes keys in tiles of 16. An mma.m8n8k4 is four 8x8x4 products, one for each quad-pair
// of the warp. A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, where quad is lane % 4 and half is lane / 16. The
// four quad-pairs form a 2x2 over a tile of 16 by 16. A lane's quad-pair is in row qm (bit 2 of the lane) and column qn (bit 3) of
// it (Lane, volta/mma.cuh). m and n are row and column of the quad-pair's 8x8x4 product, k the index that it sums over.
//
// Rows and keys of a 16x16 tile of scores are assigned so that shared loads have immediate offsets and no bank conflicts:
//
//   row of operand Q         qm + 2 * quad + 8 * half            (m = t)
//   key of operand K         half + 2 * quad + 8 * qn            (n = t)
//   key of operand V         u + 2 * quad + 8 * qn               (k = quad; eight keys take two products, u = 0 and 1)
//
// Eight consecutive lanes read rows of Q that differ in bits 0 to 2, and keys that differ in bits 1 and 2: these select the
// 16-byte bank group in a swizzled tile (tile.cuh). Bit 0 of a row of V is u, known at compile time.
//
//   mt, r, v          a row tile (16 rows); one of a lane's two rows in it; a lane's element (0 to 7) of an Accumulator
//   chunk, panel      eight fp16 columns, 16 bytes; four chunks
//   j                 an output tile, 16 columns: tile 2 * panel has the first four columns of each of the panel's chunks, the next
//                     tile the last four
//   rows_of(x, batch, head, row)  address of that row of tensor x (tile.cuh)
//   BlockSeqlenInfo   lengths, and first row in the tensors, of a batch entry's sequence (seqlen_info.cuh)
//   remat_*()         read a special register again, so that the value holds no register in between (ptx.cuh)
//   kHasFp32Output    this kernel has code for an fp32 out (features.cuh)
#pragma once

#include "dense_steps.cuh"  // DenseSteps, NoMaskBits
#include "forward/output.cuh"  // finish_row(), SoftmaxRows; forward/block.cuh: DenseBlock, ForwardBlock, HeadGroupBlock
#include "half.cuh"
#include "tile.cuh"
#include "volta/mma.cuh"

namespace volta {

// A lane's rows of the operands, in a tile of 16; the table above has them.
struct ForwardLane : Lane {
    using Lane::Lane;
    __device__ __forceinline__ int q_row() const { return qm + 2 * quad + 8 * half; }
    __device__ __forceinline__ int k_row() const { return half + 2 * quad + 8 * qn; }
    __device__ __forceinline__ int v_row() const { return 2 * quad + 8 * qn; }
    // Chunk of each panel of V that the lane reads. Its first four columns are the lane's operand (n from 4 * half on) of a product
    // for one output tile, its last four that for the next.
    __device__ __forceinline__ int v_chunk() const { return 2 * qn + half; }
};

// Layout of the scores, as score_layout.cuh describes it: a lane's element v of a tile is query first_query() + query_slot(v) and
// key first_key() + key_slot(v). Output tiles have the same rows; output_column() has their columns.
struct ForwardLayout {
    using Lane = volta::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 8;
    static constexpr bool kEitherOrder = true;  // for forward/block.cuh: grids may have heads on their first axis
    // Two rows, each with four consecutive keys.
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return l.qm + 2 * (l.t & 1) + 8 * l.half; }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return 2 * (l.t & 2) + 8 * l.qn; }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return row_slot(row_of(v)); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return 2 * (v & 1) + (v >> 2); }

    // kRows: rows of a lane in a tile. Element v belongs to row row_of(v), which is query first_query() + row_slot(row_of(v)).
    static constexpr int kRows = 2, kKeys = 4;  // kKeys: size of the aligned group of a lane's keys
    __device__ __forceinline__ static constexpr int row_of(int v) { return (v >> 1) & 1; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 4 * r; }
    // shfl_xor masks that reach the other lanes of a row: lane ^ 2 in the same quad-pair, lane ^ 8 in the other column's.
    static constexpr int kRowLaneMasks[2] = {2, 8};
    // True for one lane of each row, which writes the row's lse.
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return l.qn == 0 && (l.t & 2) == 0; }
};
static_assert(covers_tile<ForwardLayout>() && has_rows<ForwardLayout>(), "each score of a tile has one place (score_layout.cuh)");

// row[mt][r] has row_max, the lazy row maximum in log2 units, which moves only if an unscaled score exceeds `limit`; and `sum`, of
// the lane's probabilities (softmax.cuh).
template <int RowTiles>
using SoftmaxState = SoftmaxRows<ForwardLayout, RowTiles>;

// Four fp16 of one row of operand A, in two registers. In accumulators lanes t and t ^ 2 have two rows, and two of four columns
// each. to_operand_rows exchanges them: each lane then has one row, m = t, with all four. x, y: the lane's two fp16 of r = 0 and 1.
struct RowPair {
    u32 lo, hi;
};
__device__ __forceinline__ RowPair to_operand_rows(const Lane& lane, u32 x, u32 y) {
    const bool upper = lane.t & 2;
    const u32 received = __shfl_xor_sync(~0u, upper ? x : y, 2);
    return {upper ? received : x, upper ? y : received};
}

// Probabilities of 16 keys as operand A of the second product, O += P V. The first product leaves the scores of eight keys in each
// quad-pair column. In the second, a column has its own columns of O, for all 16 keys. pairs[mt][0] has P of the lane's own eight
// keys, [1] of the other column's, for that column's rows of V. u is 0 for the even four of the eight keys, 1 for the odd.
template <int RowTiles>
struct Probabilities {
    RowPair pairs[RowTiles][2][2];  // [row tile][own, other][u]

    // Packs elements 4u to 4u + 3 of p, one tile's probabilities, times 2^8 to use the upper end of fp16's range (softmax.cuh).
    __device__ __forceinline__ void pack_own(const Lane& lane, int mt, int u, const Accumulator& p) {
        pack_own(lane, mt, u, p, [](u32&, u32&) {});
    }
    // drop(x, y) may change the words (two keys of either row) before they go to other lanes: dropout.
    template <class Drop>
    __device__ __forceinline__ void pack_own(const Lane& lane, int mt, int u, const Accumulator& p, Drop drop) {
        u32 x = pack_probabilities(p[4 * u], p[4 * u + 1]), y = pack_probabilities(p[4 * u + 2], p[4 * u + 3]);
        drop(x, y);
        pairs[mt][0][u] = to_operand_rows(lane, x, y);
    }
    // Gets the other column's probabilities, from lane ^ 8, into [to]; 0 replaces the lane's own. All lanes of a warp call it.
    __device__ __forceinline__ void exchange(int to = 1) {
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                pairs[mt][to][u].lo = __shfl_xor_sync(~0u, pairs[mt][0][u].lo, 8);
                pairs[mt][to][u].hi = __shfl_xor_sync(~0u, pairs[mt][0][u].hi, 8);
            }
    }
};

// Returns the column of element v of output tile j.
__device__ __forceinline__ int output_column(const Lane& lane, int j, int v) {
    return (4 * (j / 2) + 2 * lane.qn + (v >> 2)) * kChunk + j % 2 * 4 + (lane.t & 2) + (v & 1);
}

// Writes out and softmax_lse of the warp's rows, from `row` on, after the last step. finish_row() writes a row's lse and returns
// its output's factor: 1 / sum, times that of features such as dropout. Of a panel's four chunks quad-pair column qn has number
// 2 qn, as elements 0 to 3 of both output tiles, and 2 qn + 1, as elements 4 to 7.
template <int RowTiles, int OutputTiles>
__device__ __forceinline__ void write_output(const FwdParams& p, const ForwardLane& lane, int batch, int head, int row,
                                             const SoftmaxState<RowTiles>& softmax, const Accumulator (&o)[RowTiles][OutputTiles]) {
    const Problem& problem = p.problem;
    const BlockSeqlenInfo sequence(p, batch);
    unsigned short* out = rows_of(p.out, batch, head, sequence.q_offset());
    float* lse = p.softmax_lse + sequence.lse_row(batch, head);
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++) {
        float scale[2];
#pragma unroll
        for (int r = 0; r < ForwardLayout::kRows; r++) scale[r] = finish_row(p, sequence, lane, head, row, softmax, mt, r, lse);
        if constexpr (kHasFp32Output) {
            if (p.out_is_fp32) {
#pragma unroll
                for (int r = 0; r < ForwardLayout::kRows; r++) {
                    const int i = row + 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r);
                    if (i < sequence.seqlen_q())
                        store_fp32_row<ForwardLayout>(p, out, i, r, scale[r], o[mt],
                                                      [&](int j, int v) { return output_column(lane, j, v); });
                }
                continue;
            }
        }
        const int i = row + 16 * mt + lane.q_row();  // after the exchange, rows are those of operand A
#pragma unroll
        for (int panel = 0; panel < OutputTiles / 2; panel++)
#pragma unroll
            for (int second = 0; second < 2; second++) {
                RowPair columns[2];  // the first four columns of the chunk, and the last four
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    const Accumulator& x = o[mt][2 * panel + tile];
                    columns[tile] = to_operand_rows(lane, to_half2(x[4 * second] * scale[0], x[4 * second + 1] * scale[0]),
                                                    to_half2(x[4 * second + 2] * scale[1], x[4 * second + 3] * scale[1]));
                }
                const int chunk = 4 * panel + 2 * lane.qn + second;
                if (i < sequence.seqlen_q() && chunk * kChunk < problem.headdim_v)
                    store_global4(out + i * p.out.row_stride + chunk * kChunk,
                                  make_uint4(columns[0].lo, columns[0].hi, columns[1].lo, columns[1].hi));
            }
    }
}

// A partial result is the softmax state and unscaled output of rows over some of their keys: of a stream-K block (in scratch
// memory, stream_k.cuh), or of a group of warps (in shared memory, shared_q.cuh). A lane stores its own in 16-byte chunks, here
// four fp32: for each row tile row_max and sum of the lane's two rows, then the tile's output. kPartialChunks: chunks of a lane.
template <int RowTiles, int OutputTiles>
constexpr int kPartialChunks = RowTiles * (1 + 2 * OutputTiles);

// Calls put(number, chunk) for each chunk of the lane's partial result, which stores it.
template <int RowTiles, int OutputTiles, class Put>
__device__ __forceinline__ void store_partial(const SoftmaxState<RowTiles>& softmax, const Accumulator (&o)[RowTiles][OutputTiles],
                                              Put put) {
    const auto chunk = [](float a, float b, float c, float d) {
        return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
    };
    int number = 0;
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++) {
        const SoftmaxRow* row = softmax.row[mt];
        put(number++, chunk(row[0].row_max, row[0].sum, row[1].row_max, row[1].sum));
#pragma unroll
        for (int j = 0; j < OutputTiles; j++)
#pragma unroll
            for (int v = 0; v < 8; v += 4) {
                const float* x = o[mt][j] + v;
                put(number++, chunk(x[0], x[1], x[2], x[3]));
            }
    }
}

// Adds the same lane's partial result over other keys; get(number) loads its chunks. merge() moves the row's state to the larger
// row_max of both, and returns the factors that bring the outputs there: the lane's own, and the other's.
template <int RowTiles, int OutputTiles, class Get>
__device__ __forceinline__ void combine_partial(SoftmaxState<RowTiles>& softmax, Accumulator (&o)[RowTiles][OutputTiles], Get get) {
    int number = 0;
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++) {
        const uint4 rows = get(number++);
        float factor[2], other_factor[2];
        factor[0] = softmax.row[mt][0].merge(__uint_as_float(rows.x), __uint_as_float(rows.y), other_factor[0]);
        factor[1] = softmax.row[mt][1].merge(__uint_as_float(rows.z), __uint_as_float(rows.w), other_factor[1]);
#pragma unroll
        for (int j = 0; j < OutputTiles; j++)
#pragma unroll
            for (int v = 0; v < 8; v += 4) {
                const uint4 x = get(number++);
                const u32 other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int r = ForwardLayout::row_of(v + i);
                    o[mt][j][v + i] = o[mt][j][v + i] * factor[r] + __uint_as_float(other[i]) * other_factor[r];
                }
            }
    }
}

// The default grid policy: one block per BlockRows query rows of a head, with all of their keys. StreamKGrid (stream_k.cuh) splits
// the keys, BlockMaskGrid (block_mask.cuh) takes them from lists.
struct DataParallelGrid {
    // The grid has an axis for heads and one for batch entries, which some code reads directly.
    static constexpr bool kHasHeadAndBatchAxes = true;
    // Iterator over the steps of Step keys; bits that hide single scores (none); loader of tiles of K and V: Rows keys by Chunks
    // chunks, by Threads threads.
    template <int Step>
    using Steps = DenseSteps<Step>;
    template <int Rows, int Step>
    using Bits = NoMaskBits;
    template <int Chunks, int Rows, int Threads>
    using Stream = TileStream<Chunks, Rows, Threads>;
    // A block's first row, head, KV head, batch entry and range of keys (forward/block.cuh).
    template <int BlockRows>
    using Block = DenseBlock<ForwardBlock<BlockRows, ForwardLayout::kEitherOrder>, BlockRows>;
    // Combines partial results of the row tile. Returns whether this block writes the output: always here, as its only block.
    template <int Threads, int RowTiles, int OutputTiles>
    __device__ __forceinline__ bool combine_splits(SoftmaxState<RowTiles>&, Accumulator (&)[RowTiles][OutputTiles]) const {
        return true;
    }
    __device__ __forceinline__ static int remat_batch(const Problem&) { return remat_block_batch(); }
    __device__ __forceinline__ static int remat_head(const Problem& p) { return ::remat_head<ForwardLayout::kEitherOrder>(p); }
};

// Grid policy of shared_q.cuh for short windows: a block has BlockRows / Heads rows of each of Heads query heads of one KV head,
// and one warp for each head (HeadGroupBlock, forward/block.cuh).
template <int Heads>
struct HeadGroupGrid : DataParallelGrid {
    template <int BlockRows>
    using Block = DenseBlock<HeadGroupBlock<BlockRows, Heads>, BlockRows / Heads>;
    __device__ __forceinline__ static int remat_head(const Problem&) { return remat_group_head<Heads>(); }
};

}  // namespace volta

template <int Heads>  // query heads that a block computes: 1 with other policies (forward/block.cuh)
constexpr int kBlockHeads<volta::HeadGroupGrid<Heads>> = Heads;
