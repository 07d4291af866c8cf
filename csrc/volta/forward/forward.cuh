// What the forward kernels share: where rows and keys lie in a warp's fragments, the mask on them, the
// step from probabilities to operands of the second product, and the epilogue.
//
// A warp owns 16 * RowTiles query rows and takes keys in tiles of 16. With the quad-pairs in 2x2 (mma.cuh),
// the rows and keys of a 16x16 tile of scores are dealt out so that shared memory serves them without
// bank conflicts and with immediate offsets (tile.cuh, `swizzled`):
//
//   row of operand Q         qm + 2 * quad + 8 * half            (m = t)
//   key of operand K         half + 2 * quad + 8 * qn            (n = t)
//   key of operand V         u + 2 * quad + 8 * qn               (k = quad, u the product's number)
//
// Eight consecutive lanes read rows of Q that differ in bits 0 to 2, and keys that differ in bits 1 and
// 2: these pick the bank group. Bit 0 of a V row is u, known at compile time.
#pragma once

#include "half.cuh"
#include "mask.cuh"
#include "score_modifier.cuh"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "volta/mma.cuh"

namespace volta {

// A warp's scores of 16 * RowTiles rows and 16 * KeyTiles keys.
template <int RowTiles, int KeyTiles>
using Scores = Accumulator[RowTiles][KeyTiles];

// Accumulator element v belongs to the lane's row number row_slot(v) of a 16-row tile.
__device__ __forceinline__ constexpr int row_slot(int v) { return (v >> 1) & 1; }

struct ForwardLane : Lane {
    using Lane::Lane;
    // The lane's rows of a 16-row tile of scores are score_row() and score_row() + 4, ...
    __device__ __forceinline__ int score_row() const { return qm + 2 * (t & 1) + 8 * half; }
    // ... its keys score_key() .. score_key() + 3; accumulator element v has key_slot(v) of them.
    __device__ __forceinline__ int score_key() const { return 2 * (t & 2) + 8 * qn; }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return 2 * (v & 1) + (v >> 2); }

    __device__ __forceinline__ int q_row() const { return qm + 2 * quad + 8 * half; }
    __device__ __forceinline__ int k_row() const { return half + 2 * quad + 8 * qn; }
    __device__ __forceinline__ int v_row() const { return 2 * quad + 8 * qn; }
    // A lane reads chunk v_chunk() of each group of four: four columns of it are its half's n of one
    // product, the other four of the next.
    __device__ __forceinline__ int v_chunk() const { return 2 * qn + half; }
};

template <int RowTiles>
struct SoftmaxState {
    SoftmaxRow row[RowTiles][2];
};

// Sets the scores of pairs outside the mask to -inf. `row` and `key` are the tile's first.
template <int RowTiles, int KeyTiles>
__device__ __forceinline__ void mask_scores(Scores<RowTiles, KeyTiles>& s, const Mask& mask, int row, int key) {
    const ForwardLane lane(thread_index_here() & 31);
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = row + 16 * mt + 4 * r + lane.score_row();
            const int first = i + mask.low - key - lane.score_key();
            const int last = min(i + mask.high, mask.seqlen_k - 1) - key - lane.score_key();
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const int j = 16 * nt + ForwardLane::key_slot(v);
                    if (row_slot(v) == r && (j < first || j > last)) s[mt][nt][v] = negative_infinity();
                }
        }
}

// Largest of a lane's scores in one of its rows.
template <int RowTiles, int KeyTiles>
__device__ __forceinline__ float lane_maximum(const Scores<RowTiles, KeyTiles>& s, int mt, int r) {
    float m[KeyTiles];
#pragma unroll
    for (int nt = 0; nt < KeyTiles; nt++) {
        const Accumulator& c = s[mt][nt];
        m[nt] = fmaxf(fmaxf(c[2 * r], c[2 * r + 1]), fmaxf(c[2 * r + 4], c[2 * r + 5]));
        if (nt > 0) m[0] = fmaxf(m[0], m[nt]);
    }
    return m[0];
}

// Whether any row of the warp has a score above its limit. Warp-uniform.
template <int RowTiles, int KeyTiles>
__device__ __forceinline__ bool exceeds_limit(const Scores<RowTiles, KeyTiles>& s, const SoftmaxState<RowTiles>& softmax) {
    bool exceeds = false;
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
        for (int r = 0; r < 2; r++) exceeds |= lane_maximum<RowTiles, KeyTiles>(s, mt, r) > softmax.row[mt][r].limit;
    return __any_sync(~0u, exceeds);
}

__device__ __forceinline__ float row_sum(float x) {
    for (int mate : kRowMates) x += __shfl_xor_sync(~0u, x, mate);
    return x;
}

// Moves the references of all rows to the maxima of s and rescales the output accumulated so far.
template <int RowTiles, int KeyTiles, int OutputTiles>
__device__ __forceinline__ void move_references(const Scores<RowTiles, KeyTiles>& s, SoftmaxState<RowTiles>& softmax,
                                                Accumulator (&o)[RowTiles][OutputTiles], float scale_log2,
                                                float inverse_scale_log2) {
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float m = lane_maximum<RowTiles, KeyTiles>(s, mt, r);
#pragma unroll
            for (int mate : kRowMates) m = fmaxf(m, __shfl_xor_sync(~0u, m, mate));
            const float factor = softmax.row[mt][r].move_reference(m, scale_log2, inverse_scale_log2);
#pragma unroll
            for (int j = 0; j < OutputTiles; j++)
#pragma unroll
                for (int v = 0; v < 8; v++)
                    if (row_slot(v) == r) o[mt][j][v] *= factor;
        }
}

// Rows of C as operand A: a lane pair (t, t^2) holds two rows and two of four columns each; afterwards
// each holds one row, m = t, and all four. x is the pair of columns of row slot 0, y of slot 1.
struct RowPair {
    u32 lo, hi;
};
__device__ __forceinline__ RowPair to_operand_rows(const Lane& lane, u32 x, u32 y) {
    const bool upper = lane.t & 2;
    const u32 received = __shfl_xor_sync(~0u, upper ? x : y, 2);
    return {upper ? received : x, upper ? y : received};
}

// Probabilities of 16 keys as the A operands of the second product. A quad-pair computes eight of the 16
// keys, and needs all of them for its rows: [0] are its own, [1] those of the quad-pair beside it, which
// it multiplies with the V rows of that one. u counts the products of four keys.
template <int RowTiles>
struct Probabilities {
    RowPair part[RowTiles][2][2];  // [row tile][own, other][u]

    // From element 4u .. 4u+3 of the scores, which are probabilities by now.
    __device__ __forceinline__ void pack_own(const Lane& lane, int mt, int u, const Accumulator& p) {
        part[mt][0][u] = to_operand_rows(lane, pack_probabilities(p[4 * u], p[4 * u + 1]),
                                         pack_probabilities(p[4 * u + 2], p[4 * u + 3]));
    }
    __device__ __forceinline__ void exchange() {
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                part[mt][1][u].lo = __shfl_xor_sync(~0u, part[mt][0][u].lo, 8);
                part[mt][1][u].hi = __shfl_xor_sync(~0u, part[mt][0][u].hi, 8);
            }
    }
};

// The scores from products q.k to units of log2 (score_modifier.cuh). `row` and `key` are the tile's first; key is a multiple
// of 4.
template <int RowTiles, int KeyTiles>
__device__ __forceinline__ void modify_scores(Scores<RowTiles, KeyTiles>& s, const FwdParams& p, const Mask& mask, int row, int key) {
    const ScoreOptions& options = p.score_options;
    // All made again at every step: what it is made of is in the parameters, and registers are short.
    const ForwardLane lane(thread_index_here() & 31);
    row += lane.score_row();
    key += lane.score_key();
    if (options.softcap > 0.f) {
        const Softcap softcap(p.problem, options);
        each(s, [&](float& x, int, int, int) { x = softcap(x); });
    } else {
        each(s, [&](float& x, int, int, int) { x *= p.problem.scale_log2; });
    }
    if (options.alibi_slopes) {
        const Alibi alibi(options, block_batch_here(), block_head_here(), mask.seqlen_q, mask.seqlen_k);
        each(s, [&](float& x, int mt, int nt, int v) {
            x = alibi(x, alibi.distance(row + 16 * mt + 4 * row_slot(v), key) - (16 * nt + ForwardLane::key_slot(v)));
        });
    }
}

// The bias of a step, which may be loaded early.
template <int RowTiles, int KeyTiles>
struct BiasStep {
    uint4 loaded[RowTiles][KeyTiles][2];

    __device__ __forceinline__ void load(const FwdParams& p, int row, int key) {
        const Bias bias(p.problem, p.score_options, block_batch_here(), block_head_here());
        const ForwardLane lane(thread_index_here() & 31);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    loaded[mt][nt][r] = bias.load4(p.score_options, min(row + 16 * mt + 4 * r + lane.score_row(), p.problem.seqlen_q - 1),
                                                   key + 16 * nt + lane.score_key());
    }
    __device__ __forceinline__ void add_to(Scores<RowTiles, KeyTiles>& s, const ScoreOptions& options) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float bias[4];
                    Bias::to_float(options, loaded[mt][nt][r], bias);
#pragma unroll
                    for (int v = 0; v < 8; v++)
                        if (row_slot(v) == r) s[mt][nt][v] = fmaf(bias[ForwardLane::key_slot(v)], kLog2e, s[mt][nt][v]);
                }
    }
};

// Which probabilities of 16 keys dropout keeps: kept_bit() says where.
__device__ __forceinline__ constexpr int kept_bit(int mt, int v) { return 4 * (2 * mt + row_slot(v)) + ForwardLane::key_slot(v); }
template <int RowTiles>
__device__ __forceinline__ unsigned kept_probabilities(const FwdParams& p, int row, int key) {
    const ScoreOptions& options = p.score_options;
    const Philox philox(options.rng_state, (p.lengths.first_batch + block_batch_here()) * p.problem.nheads + block_head_here());
    const ForwardLane lane(thread_index_here() & 31);
    row += lane.score_row();
    key += lane.score_key();
    unsigned bits = 0;
    // Rolled, for the instruction cache: of each row four columns.
#pragma unroll 1
    for (int i = 0; i < 2 * RowTiles; i++)
        bits |= kept(philox.numbers(row + 16 * (i / 2) + 4 * (i % 2), key), options.dropout_threshold) << (4 * i);
    return bits;
}

// Joins the sink to a finished row's sum. Returns the factor for its output, with dropout's.
__device__ __forceinline__ float finish_row(const ScoreOptions& options, int head, float& reference, float& sum) {
    float factor = 1.f;
    if (options.sinks) {
        SoftmaxRow row;
        row.reference = reference;
        row.sum = sum;
        float other_factor;
        factor = row.merge(fmaf(__ldg(options.sinks + head), kLog2e, kReferenceShift), exp2_approx(-kReferenceShift), other_factor);
        reference = row.reference;
        sum = row.sum;
    }
    return kGeneral && options.rng_state ? factor * options.dropout_scale : factor;
}

// The output columns of a lane. Accumulators 2j and 2j + 1 are columns 0..3 and 4..7 of each of the four
// chunks 4j .. 4j+3: quad-pair column qn owns chunks 4j + 2 qn and 4j + 2 qn + 1, the first as n < 4,
// the second as n >= 4 of both products. Writes out and lse of the warp's rows.
template <int RowTiles, int OutputTiles>
__device__ __forceinline__ void write_output(const FwdParams& p, const ForwardLane& lane, int batch, int head, int row,
                                             const SoftmaxState<RowTiles>& softmax, const Accumulator (&o)[RowTiles][OutputTiles]) {
    const Problem& problem = p.problem;
    const BlockSequence sequence(problem, p.lengths, batch);
    unsigned short* out = rows_of(p.out, batch, head, sequence.first_q());
    float* lse = p.softmax_lse + sequence.lse_row(batch, head);
#pragma unroll
    for (int mt = 0; mt < RowTiles; mt++) {
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const SoftmaxRow& state = softmax.row[mt][r];
            float reference = state.reference, sum = row_sum(state.sum), factor = 1.f;
            if (kRagged) factor = finish_row(p.score_options, head, reference, sum);
            SoftmaxResult result(reference, sum);
            scale[r] = kRagged ? result.output_scale * factor : result.output_scale;
            const int i = row + 16 * mt + lane.score_row() + 4 * r;
            if (lane.qn == 0 && (lane.t & 2) == 0 && i < sequence.seqlen_q()) lse[i] = result.lse;
        }
        const int i = row + 16 * mt + lane.q_row();  // after the exchange rows are those of operand A
#pragma unroll
        for (int j = 0; j < OutputTiles / 2; j++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                RowPair columns[2];
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const Accumulator& c = o[mt][2 * j + part];
                    columns[part] = to_operand_rows(lane, to_half2(c[4 * n] * scale[0], c[4 * n + 1] * scale[0]),
                                                    to_half2(c[4 * n + 2] * scale[1], c[4 * n + 3] * scale[1]));
                }
                const int chunk = 4 * j + 2 * lane.qn + n;
                if (i < sequence.seqlen_q() && chunk * kChunk < problem.headdim_v)
                    *reinterpret_cast<uint4*>(out + i * p.out.row_stride + chunk * kChunk) =
                        make_uint4(columns[0].lo, columns[0].hi, columns[1].lo, columns[1].hi);
            }
    }
}

// Which block of rows, head and batch entry a block works on. Blocks start in the order of blockIdx: the
// last rows first, since under a causal mask they see the most keys and a late long block is a tail.
template <int BlockRows>
struct ForwardBlock {
    int row, head, head_k, batch;
    __device__ __forceinline__ explicit ForwardBlock(const Problem& p)
        : row((gridDim.x - 1 - blockIdx.x) * BlockRows), head(blockIdx.y), head_k(blockIdx.y / (p.nheads / p.nheads_k)),
          batch(blockIdx.z) {}
};

}  // namespace volta
