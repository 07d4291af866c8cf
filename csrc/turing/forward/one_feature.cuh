// ALiBi, bias and dropout of the turing forward kernel up to headdim 256 (pipelined.cuh and pipelined_parts.cuh call this file), in
// kernels compiled for exactly one of these. (Kernels for the fourth score feature, softcap, need nothing here.)
//
//   ALiBi, fp16 bias  initial accumulators of Q K^T, so that nothing comes between product and softmax. As products are not scaled
//                     yet, they are divided by |softmax_scale|. (A negative softmax_scale has flipped the signs of Q.)
//   fp32 bias         rare: added to the product, divided as the fp16 bias is
//   dropout           masks packed probabilities of a step; also in generic kernels, whose problems may have any features. At the
//                     end finish_row() scales the output by 1 / (1 - dropout_p)
//
//   step, half        16 keys, an iteration; one of its two tiles of 8 keys, 0 or 1. A lane has four neighboring keys of a step: 0
//                     and 1 in tile 0, 2 and 3 in tile 1. (With dropout alone, kEverySecondKey: 0 and 2, then 1 and 3.)
//   mt, r, v          one of the warp's RowTiles tiles of 16 query rows; one of a lane's two rows in it; a lane's element of a tile
//                     (0 to 3): query first_query() + query_slot(v), key first_key() + key_slot(v) (ForwardLayout, layout.cuh)
//   Scores<..., RowTiles, 1>  a warp's scores of one tile of 8 keys (forward/scores.cuh): tile[mt][0][v]; each(f) calls f(element,
//                     mt, 0, v) for each
//   kEitherOrder      heads may be on the grid's first axis
//   remat_*()         read a special register again at its use, so that it holds no register in between
#pragma once

#include "turing/forward/layout.cuh"

namespace turing {

// ALiBi as initial accumulators: neg_slope * |query position - key|.
template <int RowTiles>
struct InitialAlibi {
    float neg_slope;  // -slope / |softmax_scale|; Alibi::slope and scale_log2 both have a factor of log2(e)
    float distance;  // position of the lane's first query minus its first key, in a tile that begins at key 0

    // `row`: the warp's first row.
    __device__ __forceinline__ void start(const FwdParams& p, const Mask& mask, int row) {
        const Lane lane(remat_lane());
        const Alibi alibi(p.score_options, remat_block_batch(), remat_head<ForwardLayout::kEitherOrder>(p.problem), mask.seqlen_q,
                          mask.seqlen_k);
        neg_slope = -alibi.slope / p.problem.scale_log2;
        distance = alibi.distance(row + ForwardLayout::first_query(lane), ForwardLayout::first_key(lane));
    }
    // Sets the initial accumulators of the tile whose first key is `key`.
    __device__ __forceinline__ void init_scores(Scores<ForwardLayout, RowTiles, 1>& s, int key) const {
        const float from_key = distance - static_cast<float>(key);
        s.each([&](float& x, int mt, int, int v) {
            const int slot_difference =
                ForwardLayout::kTileQueries * mt + ForwardLayout::query_slot(v) - ForwardLayout::key_slot(v);
            x = neg_slope * fabsf(from_key + static_cast<float>(slot_difference));
        });
    }
};

// Bias as initial accumulators. An fp16 bias is loaded one step ahead, the four keys of a lane at once: 8 bytes, two keys of each
// tile. Rows of a bias have a multiple of four keys in memory (the host copies others), so the last load stays inside.
template <int RowTiles>
struct InitialBias {
    using Tile = Scores<ForwardLayout, RowTiles, 1>;
    uint2 next[RowTiles][2];  // [mt][r]: the step that load() has loaded; x: keys of its tile 0, y: of tile 1
    u32 second[RowTiles][2];  // y of a step, kept by init_scores() of tile 0 for that of tile 1: load() comes between
    const char* base;  // row 0 of the bias of the head, at the lane's first key in a step at key 0
    unsigned row_bytes;  // from one row of the bias to the next
    int row;  // the lane's first query
    float inverse_scale;  // 1 / |softmax_scale|

    // `row_`: the warp's first row.
    __device__ __forceinline__ void start(const FwdParams& p, int row_) {
        const Lane lane(remat_lane());
        const ScoreOptions& o = p.score_options;
        const int bytes = uses_fp32_bias(o) ? 4 : 2;
        base = reinterpret_cast<const char*>(o.bias) +
               (remat_block_batch() * o.bias_batch_stride +
                remat_head<ForwardLayout::kEitherOrder>(p.problem) * o.bias_head_stride + ForwardLayout::first_key(lane)) *
                   bytes;
        row_bytes = static_cast<unsigned>(o.bias_row_stride) * bytes;
        row = row_ + ForwardLayout::first_query(lane);
        inverse_scale = 1.f / p.problem.scale;
#pragma unroll
        for (int i = 0; i < 2 * RowTiles; i++) next[i / 2][i % 2] = make_uint2(0, 0);  // they stay so if the bias is fp32
    }
    // Loads an fp16 bias for the step whose first key is `key`.
    __device__ __forceinline__ void load(const FwdParams& p, int key) {
        if (uses_fp32_bias(p.score_options)) return;
        each(p, key, 2, [&](int mt, int r, const char* from) { next[mt][r] = __ldg(reinterpret_cast<const uint2*>(from)); });
    }
    // Sets the initial accumulators of tile `half` of a step. load() of this step precedes tile 0, that of the next step tile 1.
    __device__ __forceinline__ void init_scores(Tile& s, int half) {
        unrolled<RowTiles, 2>([&](int mt, int r) {
            const float2 bias = to_float2(half ? second[mt][r] : next[mt][r].x);
            s.tile[mt][0][2 * r] = bias.x * inverse_scale;
            s.tile[mt][0][2 * r + 1] = bias.y * inverse_scale;
            if (half == 0) second[mt][r] = next[mt][r].y;
        });
    }
    // Adds the bias of tile `half` of the step from `key` on, if it is fp32.
    __device__ __forceinline__ void add_fp32(const FwdParams& p, Tile& s, int half, int key) const {
        each(p, key, 4, [&](int mt, int r, const char* from) {
            float bias[2];
            Bias::to_float(p.score_options, __ldg(reinterpret_cast<const uint2*>(from) + half), bias);
#pragma unroll
            for (int i = 0; i < 2; i++) s.tile[mt][0][2 * r + i] = fmaf(bias[i], inverse_scale, s.tile[mt][0][2 * r + i]);
        });
    }

private:
    // Calls f(mt, r, address of the bias of the lane's four keys in the step from `key` on). Past the last key, it is that of the
    // last four; past the last row, of the last row. bytes: of an element.
    template <class F>
    __device__ __forceinline__ void each(const FwdParams& p, int key, int bytes, F f) const {
        key = min(key, (p.problem.seqlen_k - 1 & ~3) - ForwardLayout::first_key(Lane(remat_lane())));
        unrolled<RowTiles, 2>([&](int mt, int r) {
            const int i = min(row + ForwardLayout::kTileQueries * mt + ForwardLayout::row_slot(r), p.problem.seqlen_q - 1);
            f(mt, r, base + static_cast<unsigned long long>(static_cast<unsigned>(i)) * row_bytes + key * bytes);
        });
    }
};

// Dropout mask of a step. One call of the generator (Philox) has the eight random numbers, of 16 bits, of a lane in one row tile:
// two rows by four keys, two numbers in a word. With dropout alone (kEverySecondKey), the two numbers of a row and tile share a
// word. Else halves(a, b, half) makes that word of the lower (half = 0) or upper halves of two. dropout_inverted, from the host, is
// 0 if numbers from the threshold on keep their probability, all ones if those below it do (dropout_p above 0.5).
template <int RowTiles>
struct StepDropoutMask {
    // [mt][r][half]: 0xffff for each of two keys whose random number is not below the threshold (DropoutRule, philox.cuh)
    u32 not_below[RowTiles][2][2];

    // Returns the random numbers of the block's head.
    __device__ __forceinline__ static Philox numbers_of(const FwdParams& p) {
        return DropoutBits<ForwardLayout, RowTiles>::numbers_of(p);
    }
    // Draws the step's mask. numbers(row, key): a Philox call. `row`: the warp's first; `key`: the step's first. Sequential: where
    // registers are short, the empty PTX makes the call of a row tile wait for the one before.
    template <bool Sequential, class Numbers>
    __device__ __forceinline__ void draw(const FwdParams& p, int row, int key, Numbers numbers) {
        const DropoutRule rule(p.score_options);
        const Lane lane(remat_lane());
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const uint4 drawn = numbers(row + ForwardLayout::kTileQueries * mt + ForwardLayout::first_query(lane),
                                        key + ForwardLayout::first_key(lane));
            // [r][c]: the numbers of keys c and c + 2 of the lane's four, in the lower and upper half. So halves() takes keys 0 and
            // 1, or 2 and 3.
            const u32 words[2][2] = {{philox_word(drawn, 0, 0), philox_word(drawn, 0, 1)},
                                     {philox_word(drawn, 1, 0), philox_word(drawn, 1, 1)}};
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    not_below[mt][r][half] =
                        rule.not_below(ForwardLayout::kEverySecondKey ? words[r][half] : halves(words[r][0], words[r][1], half));
            if (Sequential) asm("" : "+r"(row), "+r"(not_below[mt][1][1]));
        }
    }
    // A mask that keeps all, for problems without dropout.
    __device__ __forceinline__ void keep_all(const FwdParams& p) {
#pragma unroll
        for (int i = 0; i < 4 * RowTiles; i++) not_below[i / 4][i / 2 % 2][i % 2] = ~p.score_options.dropout_inverted;
    }
    // Returns the packed probabilities of tile `half`, with dropped ones set to 0.
    __device__ __forceinline__ u32 apply(const FwdParams& p, u32 probabilities, int mt, int r, int half) const {
        return probabilities & (not_below[mt][r][half] ^ p.score_options.dropout_inverted);
    }
};

}  // namespace turing
