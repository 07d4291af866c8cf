// Lane layout of the turing forward kernels: which lane holds which score, operand and output element of m16n8k8 products. Also
// their loads of Q, load_queries(), and their epilogue, write_output(). Included by pipelined.cuh (headdim up to 256),
// column_groups.cuh (512) and split.cuh (fp32 tensors), not by the fast kernel (turing/fast). Lane (turing/mma.cuh): group is
// lane / 4, quad lane % 4. BlockSeqlenInfo has the lengths and the first row of a batch entry's sequence (seqlen_info.cuh).
// remat_lane() reads the lane's number again, so that it holds no register in between.
#pragma once

#include "forward/output.cuh"
#include "half.cuh"
#include "tile.cuh"
#include "turing/mma.cuh"

namespace turing {

// Layout of the scores, as shared code expects it (score_layout.cuh): a lane has elements v = 0 to 3 of a tile, two keys of each of
// two query rows. A tile is C of a product of 16 rows of Q and 8 keys (the output: of P and 8 columns of V). A step, an iteration
// of the main loop, has 16 keys, two tiles. Rows of K in shared memory may be any permutation of the keys, if V has the same. With
// score features (softcap, ALiBi, bias, dropout) a lane so has four neighboring keys, for one load of the bias and one call of
// dropout's generator (Philox). Keys two apart share a word of its random numbers.
//
//   kernel with (features.cuh)                    first_key()  first tile  second tile  kNextTile
//   no score features                             2 * quad     + 0, 1      + 8, 9       8
//   score features (kHasScoreFeatures)            4 * quad     + 0, 1      + 2, 3       2
//   dropout alone, in all problems (kRequires...) 4 * quad     + 0, 2      + 1, 3       1
struct ForwardLayout {
    using Lane = turing::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 8, kElements = 4;
    static constexpr bool kEitherOrder = true;  // for forward/block.cuh: grids may have heads on their first axis
    static constexpr bool kFourKeys = kHasScoreFeatures;  // lines 2 and 3 of the table
    static constexpr bool kEverySecondKey = kRequiresDropout;  // line 3
    // A slot is an element's distance from the lane's first query or key. Rows of Q may be permuted too: in kernels with dropout
    // (kHasDropout) a lane's two rows are four apart, not eight, because rows four apart share a Philox call.
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) {
        return kHasDropout ? l.group % 4 + l.group / 4 * 8 : l.group;
    }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return (kFourKeys ? 4 : 2) * l.quad; }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return row_slot(row_of(v)); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return (v & 1) * (kEverySecondKey ? 2 : 1); }
    // Keys from a lane's in the first tile of a step to those in the second.
    static constexpr int kNextTile = kEverySecondKey ? 1 : kFourKeys ? 2 : kTileKeys;
    // The key, of a step's 16, in row `row` (0 to 15) of K and V in shared memory.
    __device__ __forceinline__ static constexpr int key_of_row(int row) {
        return kFourKeys ? row % 8 / 2 * 4 + key_slot(row) + row / 8 * kNextTile : row;
    }

    // kRows: query rows of a lane in a tile. Element v belongs to row row_of(v): query first_query() + row_slot(row_of(v)). Its
    // keys in a row of a tile lie in one aligned group of kKeys.
    static constexpr int kRows = 2, kKeys = kEverySecondKey ? 4 : 2;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v >> 1; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return (kHasDropout ? 4 : 8) * r; }
    static constexpr int kRowLaneMasks[2] = {1, 2};  // shfl_xor masks that reach the other lanes of a row
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return l.quad == 0; }
};
// Returns whether the lanes' elements of a step's two tiles (`half`) cover each query and key once, and key_of_row() agrees.
__device__ constexpr bool covers_step() {
    bool held[16 * 16] = {};
    for (int lane = 0; lane < 32; lane++)
        for (int half = 0; half < 2; half++)
            for (int v = 0; v < ForwardLayout::kElements; v++) {
                const Lane l(lane);
                const int query = ForwardLayout::first_query(l) + ForwardLayout::query_slot(v);
                const int key = ForwardLayout::first_key(l) + half * ForwardLayout::kNextTile + ForwardLayout::key_slot(v);
                if (key != ForwardLayout::key_of_row(8 * half + 2 * l.quad + (v & 1)) || held[16 * query + key]) return false;
                held[16 * query + key] = true;
            }
    return true;
}
// has_rows(): whether kRows, row_of() and row_slot() agree with the elements
static_assert(covers_step() && has_rows<ForwardLayout>(), "each score of a tile has one place (score_layout.cuh)");

// A lane's part of operand A, 16 rows of a chunk (kChunk: 8 columns). Word h: the lane's row h, columns 2 * quad and 2 * quad + 1.
using OperandA = u32[2];

// Loads RowTiles tiles (mt) of 16 rows of Q as operand A, Chunks chunks each, from the warp's first row `row` on; zeros for rows
// and columns that do not exist. `base`: address of row 0; `rows`: rows that exist; `headdim`: columns. sign_flip: 0x80008000, the
// signs of two fp16, for a negative softmax_scale, else 0.
template <int RowTiles, int Chunks>
__device__ __forceinline__ void load_queries(OperandA (&q)[RowTiles][Chunks], const Operand& from, const unsigned short* base,
                                             int row, int rows, int headdim, u32 sign_flip) {
    const Lane lane(threadIdx.x & 31);
    unrolled<RowTiles, 2>([&](int mt, int h) {
        const int i = row + 16 * mt + ForwardLayout::row_slot(h) + ForwardLayout::first_query(lane);
        const unsigned short* source = base + i * from.row_stride + 2 * lane.quad;
#pragma unroll
        for (int c = 0; c < Chunks; c++) {
            q[mt][c][h] = 0;
            if (i < rows && c * kChunk < headdim)
                q[mt][c][h] = __ldg(reinterpret_cast<const u32*>(source + c * kChunk)) ^ sign_flip;
        }
    });
}

// Writes out, divided by the rows' sums, and softmax_lse of the warp's rows, from `row` on. softmax.row[mt][r]: maximum and sum of
// the lane's row r of row tile mt. o[mt][j]: P V of that tile, columns 8j to 8j + 7. finish_row() (forward/output.cuh) stores a
// row's lse and returns its output's factor, about 1 / sum. out is fp32 where the kernel has code for that (kHasFp32Output) and the
// parameter says so, else fp16.
template <int RowTiles, int OutputTiles>
__device__ __forceinline__ void write_output(const FwdParams& p, int batch, int head, int row,
                                             const SoftmaxRows<ForwardLayout, RowTiles>& softmax,
                                             const Accumulator (&o)[RowTiles][OutputTiles]) {
    const BlockSeqlenInfo sequence(p, batch);
    const Lane lane(remat_lane());
    unsigned short* out = rows_of(p.out, batch, head, sequence.q_offset());
    float* lse = p.softmax_lse + sequence.lse_row(batch, head);
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
        for (int r = 0; r < ForwardLayout::kRows; r++) {
            const float scale = finish_row(p, sequence, lane, head, row, softmax, mt, r, lse);
            const int i = row + 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r);
            if constexpr (kHasFp32Output) {
                if (p.out_is_fp32) {
                    const auto column = [&](int j, int v) { return j * kChunk + 2 * lane.quad + v % 2; };
                    // out: row 0's address, as if elements were fp16; column(j, v): that of element v of o[mt][j]
                    if (i < sequence.seqlen_q()) store_fp32_row<ForwardLayout>(p, out, i, r, scale, o[mt], column);
                    continue;
                }
            }
            unsigned short* to = out + i * p.out.row_stride + 2 * lane.quad;
#pragma unroll
            for (int j = 0; j < OutputTiles; j++)
                if (i < sequence.seqlen_q() && j * kChunk < p.problem.headdim_v)
                    *reinterpret_cast<u32*>(to + j * kChunk) = to_half2(o[mt][j][2 * r] * scale, o[mt][j][2 * r + 1] * scale);
        }
}

}  // namespace turing
