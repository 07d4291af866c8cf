// Lane layout of the turing forward kernels: which lane holds which score, operand and output element; loads of Q, and the
// epilogue. Included by all turing forward kernels but the fast one (turing/fast). A lane's group is lane / 4, its quad lane % 4.
// BlockSeqlenInfo has the lengths and the first row of a batch entry's sequence (seqlen_info.cuh). remat_lane() reads the lane's
// number again, so that it holds no register in between.
#pragma once

#include "forward/output.cuh"
#include "half.cuh"
#include "tile.cuh"
#include "turing/mma.cuh"

namespace turing {

// Layout of the scores (score_layout.cuh says what shared code expects of one). Scores are C of a product (m16n8k8) of 16 rows of Q
// and 8 keys; the output is C of one with 8 columns of V. A step of the main loop has 16 keys, two tiles. Rows of K in shared
// memory may be any permutation of the keys, if V has the same. Where scores are modified, a lane has four neighboring keys in the
// two tiles, for one load of a bias and one call of dropout's generator (Philox). kHas...: the kernel has code for the feature;
// kRequires...: all of its problems use it, and no other score feature (features.cuh). kHasScoreFeatures: for softcap, ALiBi, bias
// or dropout. kHasFp32Output: for an fp32 out.
struct ForwardLayout {
    using Lane = turing::Lane;
    using Tile = Accumulator;
    static constexpr int kTileQueries = 16, kTileKeys = 8, kElements = 4;
    static constexpr bool kEitherOrder = true;  // grids may have heads on their first axis
    static constexpr bool kFourKeys = kHasScoreFeatures;  // whether a lane's keys of a step are four neighbors
    // Whether a lane's two keys in a tile are two apart, in an aligned group of four. Their random numbers then share a word.
    static constexpr bool kEverySecondKey = kRequiresDropout;
    // Two rows, each with two keys. Rows of Q may be permuted too: with dropout a lane's two rows share a Philox call.
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) {
        return kHasDropout ? l.group % 4 + l.group / 4 * 8 : l.group;
    }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return (kFourKeys ? 4 : 2) * l.quad; }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return row_slot(row_of(v)); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return (v & 1) * (kEverySecondKey ? 2 : 1); }
    // Distance, in keys, of a lane's keys in the second tile of a step from those in the first.
    static constexpr int kNextTile = kEverySecondKey ? 1 : kFourKeys ? 2 : kTileKeys;
    // The key, of a step's 16, in row `row` of K and V.
    __device__ __forceinline__ static constexpr int key_of_row(int row) {
        return kFourKeys ? row % 8 / 2 * 4 + key_slot(row) + row / 8 * kNextTile : row;
    }

    // kRows: rows of a lane in a tile. Element v belongs to row row_of(v), which is query first_query() + row_slot(row_of(v)).
    static constexpr int kRows = 2, kKeys = kEverySecondKey ? 4 : 2;  // kKeys: size of the aligned group of a row's keys in a tile
    __device__ __forceinline__ static constexpr int row_of(int v) { return v >> 1; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return (kHasDropout ? 4 : 8) * r; }
    static constexpr int kRowLaneMasks[2] = {1, 2};  // shfl_xor masks that reach the other lanes of a row
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return l.quad == 0; }
};
// covers_tile() for the two tiles of a step, and whether key_of_row agrees with the layout.
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
static_assert(covers_step() && has_rows<ForwardLayout>(), "each score of a tile has one place (score_layout.cuh)");

// Operand A of a tile of 16 rows, for columns 8 * chunk to 8 * chunk + 7.
using OperandA = u32[2];

// Loads RowTiles tiles of 16 rows of Q as operand A, Chunks chunks (8 columns) each, from the warp's first row `row` on; zeros for
// rows and columns that do not exist. `base`: address of row 0; `rows`: rows that exist; `headdim`: columns. sign_flip: 0x80008000
// for a negative softmax_scale, else 0.
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

// Writes out, divided by the rows' sums, and lse of the warp's rows, from `row` on. o: the sums of P V; accumulator j of a row tile
// has columns 8j to 8j + 7. finish_row() (forward/output.cuh) stores a row's lse and returns its output's factor, about 1 / sum.
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
