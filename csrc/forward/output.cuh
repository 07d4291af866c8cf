// Turns the output that a forward kernel accumulates, P V without the division by the softmax's sum, into the final one. In the
// main loop rescale_output multiplies rows whose maximum has moved. After it finish_row adds the attention sink, writes a row's lse
// and returns its factor: 1 / sum, times dropout's 1 / (1 - p). The kernel multiplies the row by it as it stores. Decode kernels
// use add_sink alone. row_max has log2 units, lse natural ones.
//
// A Layout (score_layout.cuh) says which elements of a warp's tiles a lane has: element v is of the lane's row r = row_of(v), query
// first_query(lane) + row_slot(r) of the tile. leads_row() is true for one lane of each row.
#pragma once

#include "forward/scores.cuh"  // SoftmaxRows: row_max and sum of a warp's rows; kHas...: compiled features; FwdParams (src/params)
#include "seqlen_info.cuh"  // BlockSeqlenInfo: lengths and offsets of a batch entry's sequence

// Returns whether out is fp32: a parameter says so, in kernels compiled with the feature fp32_output. Others have only fp16 code.
__device__ __forceinline__ bool out_is_fp32(const FwdParams& p) { return kHasFp32Output && p.out_is_fp32; }

// Stores a lane's row r of the output tiles `o`, which is the sequence's row `row`, as fp32 times `scale`. `out`: address of row 0
// if elements were fp16. column(j, v) returns the column of element v of output tile j.
template <class Layout, int OutputTiles, class Column>
__device__ __forceinline__ void store_fp32_row(const FwdParams& p, const unsigned short* out, int row, int r, float scale,
                                               const typename Layout::Tile (&o)[OutputTiles], Column column) {
    float* to = fp32_element(p.out, out + row * p.out.row_stride);
#pragma unroll
    for (int j = 0; j < OutputTiles; j++)
#pragma unroll
        for (int v = 0; v < Layout::kElements; v += 2)
            if (Layout::row_of(v) == r && column(j, v) < p.problem.headdim_v)
                *reinterpret_cast<float2*>(to + column(j, v)) = make_float2(o[j][v] * scale, o[j][v + 1] * scale);
}

// Returns a function that multiplies the lane's row r of row tile mt of the output by a factor, for Scores::update_row_max.
template <class Layout, int RowTiles, int OutputTiles>
__device__ __forceinline__ auto rescale_output(typename Layout::Tile (&o)[RowTiles][OutputTiles]) {
    return [&o](int mt, int r, float factor) {
        unrolled<OutputTiles, Layout::kElements>([&](int j, int v) {
            if (Layout::row_of(v) == r) o[mt][j][v] *= factor;
        });
    };
}

// Adds an attention sink (one extra logit per head in the softmax's denominator) to a finished row's row_max and sum. Returns the
// factor for its output. SoftmaxRow::merge() joins a row's states over two sets of keys, and gives a factor for either's output.
// The sink merges as a row with one key of probability 1, whose output is 0, so other_factor is unused.
__device__ __forceinline__ float add_sink(const ScoreOptions& options, int head, float& row_max, float& sum) {
    float factor = 1.f;
    if (options.sinks) {
        SoftmaxRow row;
        row.row_max = row_max;
        row.sum = sum;
        float other_factor;
        factor = row.merge(__ldg(options.sinks + head) * kLog2e, 1.f, other_factor);
        row_max = row.row_max;
        sum = row.sum;
    }
    return factor;
}

// Finishes the lane's row r of the warp's row tile mt. `row` is the warp's first row, `lse` that of the sequence's row 0. Writes
// the lse if the row exists, and returns the factor for its output. All lanes of the warp call it together, because row_sum
// shuffles. SoftmaxResult: the row's lse, and output_scale, which divides its output by the sum.
//
// Packed: P V took probabilities rounded to fp16, while the sum has them unrounded. From |row_max| = kInexactRowMax (8192) on, fp32
// rounds row_max to multiples of 2^-10, but not the score in the exponent: the probability of a row's only visible key may not be
// 1. So the sum that divides `out` is rounded to fp16's digits too: else out of that row would differ from the key's V.
template <bool Packed = true, class Layout, int RowTiles>
__device__ __forceinline__ float finish_row(const FwdParams& p, const BlockSeqlenInfo& sequence, const typename Layout::Lane& lane,
                                            int head, int row, const SoftmaxRows<Layout, RowTiles>& softmax, int mt, int r,
                                            float* lse) {
    const SoftmaxRow& state = softmax.row[mt][r];
    float row_max = state.row_max, sum = row_sum<Layout>(state.sum), factor = 1.f;
    constexpr bool kHasFactor = kHasSinks || kHasDropout;
    if (kHasSinks) factor = add_sink(p.score_options, head, row_max, sum);
    if (kHasDropout && p.score_options.rng_state) factor *= p.score_options.dropout_scale;
    const SoftmaxResult result(row_max, sum);
    const bool rounds = Packed && fabsf(row_max) >= kInexactRowMax && result.output_scale != 0.f;
    const float output_scale = rounds ? SoftmaxResult(row_max, rounded_like_packed(sum)).output_scale : result.output_scale;
    const float scale = kHasFactor ? output_scale * factor : output_scale;
    const int i = row + Layout::kTileQueries * mt + Layout::first_query(lane) + Layout::row_slot(r);
    if (Layout::leads_row(lane) && i < sequence.seqlen_q()) lse[i] = result.lse;
    return scale;
}
