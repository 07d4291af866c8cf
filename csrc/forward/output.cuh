// Scaling of the output in the forward kernels, for any Layout (score_layout.cuh): rescale_output in the main loop, and the
// epilogue. The epilogue adds the attention sink, applies dropout's scale 1 / (1 - p) and writes a row's lse.
#pragma once

#include "forward/scores.cuh"

// Returns a function that multiplies rows of the output, for Scores::update_row_max. A lane has the same rows of output tiles
// as of tiles of scores.
template <class Layout, int RowTiles, int OutputTiles>
__device__ __forceinline__ auto rescale_output(typename Layout::Tile (&o)[RowTiles][OutputTiles]) {
    return [&o](int mt, int r, float factor) {
#pragma unroll
        for (int j = 0; j < OutputTiles; j++)
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++)
                if (Layout::row_of(v) == r) o[mt][j][v] *= factor;
    };
}

// Adds an attention sink (one extra logit per head in the softmax's denominator) to a finished row's sum. Returns the factor
// for its output. The sink merges as a row of one probability of 1. It has no output, so other_factor is unused.
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

// Finishes row r of row tile mt. `row` is the warp's first row. Writes the lse if the row exists, and returns the factor for
// its output. All lanes of the warp call it together, because row_sum shuffles. Packed: probabilities were rounded to fp16. A key
// that has all of a row must then divide by the same number: else out is not exactly its value, and dq and dk are not 0
// (docs/design/numerics.md).
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
