// Kernels that do one thing to scores besides: how little it costs where it is known.
//
// ALiBi and a bias are what the accumulators of Q K^T begin with, in units of the products, so that nothing comes between these and
// the softmax. Softcap waits until probabilities are computed, beside the next products: a row's reference follows the products
// themselves, which rise as the capped scores do.
#pragma once

#include "turing/forward/layout.cuh"

namespace turing {

template <int RowTiles>
struct InitialAlibi {
    float slope, distance;  // -slope / scale; from the lane's first row to its first key, were that 0

    // `row` is the warp's first.
    __device__ __forceinline__ void start(const FwdParams& p, const Mask& mask, int row) {
        const Lane lane(lane_here());
        const Alibi alibi(p.score_options, block_batch_here(), head_here<ForwardLayout::kEitherOrder>(p.problem), mask.seqlen_q,
                          mask.seqlen_k);
        slope = -alibi.slope / p.problem.scale_log2;
        distance = alibi.distance(row + ForwardLayout::first_query(lane), ForwardLayout::first_key(lane));
    }
    // `key` is the first of a tile.
    __device__ __forceinline__ void to(Scores<ForwardLayout, RowTiles, 1>& s, int key) const {
        const float from_key = distance - static_cast<float>(key);
        s.each([&](float& x, int mt, int, int v) {
            const int place = ForwardLayout::kTileQueries * mt + ForwardLayout::query_slot(v) - ForwardLayout::key_slot(v);
            x = slope * fabsf(from_key + static_cast<float>(place));
        });
    }
};

// fp16 is loaded two steps ahead, the four keys of a lane at once; fp32 when it is needed.
template <int RowTiles>
struct InitialBias {
    using Tile = Scores<ForwardLayout, RowTiles, 1>;
    uint2 now[RowTiles][2], next[RowTiles][2];  // of the step whose second tile comes next, and of the one behind it
    const char* base;
    unsigned row_bytes;
    int row;
    float inverse_scale;

    // `row_` is the warp's first.
    __device__ __forceinline__ void start(const FwdParams& p, int row_) {
        const Lane lane(lane_here());
        const ScoreOptions& o = p.score_options;
        const int bytes = o.bias_is_fp32 ? 4 : 2;
        base = reinterpret_cast<const char*>(o.bias) +
               (block_batch_here() * o.bias_batch_stride + head_here<ForwardLayout::kEitherOrder>(p.problem) * o.bias_head_stride +
                ForwardLayout::first_key(lane)) * bytes;
        row_bytes = static_cast<unsigned>(o.bias_row_stride) * bytes;
        row = row_ + ForwardLayout::first_query(lane);
        inverse_scale = 1.f / p.problem.scale_log2 * kLog2e;
    }
    // Where the lane's keys of a row are; keys beyond the last are the last four.
    __device__ __forceinline__ const char* at(const FwdParams& p, int mt, int r, int key, int bytes) const {
        const int i = min(row + ForwardLayout::kTileQueries * mt + ForwardLayout::row_slot(r), p.problem.seqlen_q - 1);
        return base + static_cast<unsigned long long>(static_cast<unsigned>(i)) * row_bytes + key * bytes;
    }
    __device__ __forceinline__ int bounded(const FwdParams& p, int key) const {
        return min(key, (p.problem.seqlen_k - 1 & ~3) - ForwardLayout::first_key(Lane(lane_here())));
    }
    // `key` is the first of a step.
    __device__ __forceinline__ void load(const FwdParams& p, int key) {
        if (p.score_options.bias_is_fp32) return;
        key = bounded(p, key);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < 2; r++) next[mt][r] = __ldg(reinterpret_cast<const uint2*>(at(p, mt, r, key, 2)));
    }
    __device__ __forceinline__ void advance() {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < 2; r++) now[mt][r] = next[mt][r];
    }
    // Of tile number `half` of the step from `key` on.
    __device__ __forceinline__ void to(const FwdParams& p, Tile& s, int half, int key) const {
        if (p.score_options.bias_is_fp32) {
            key = bounded(p, key);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float bias[2];
                    Bias::to_float(p.score_options, __ldg(reinterpret_cast<const uint2*>(at(p, mt, r, key, 4)) + half), bias);
#pragma unroll
                    for (int i = 0; i < 2; i++) s.tile[mt][0][2 * r + i] = bias[i] * inverse_scale;
                }
            return;
        }
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 bias = to_float2(half ? now[mt][r].y : now[mt][r].x);
                s.tile[mt][0][2 * r] = bias.x * inverse_scale;
                s.tile[mt][0][2 * r + 1] = bias.y * inverse_scale;
            }
    }
};

// Scores are -2 * cap * logistic here, that is, less than they are by cap: the softmax is the same, and its references are told in
// the end.
struct CappedSoftmax {
    float to_exponent, scale_log2;

    __device__ __forceinline__ explicit CappedSoftmax(const FwdParams& p) {
        const Softcap softcap(p.problem, p.score_options);
        to_exponent = softcap.to_exponent;
        scale_log2 = -2.f * softcap.cap;
    }
    __device__ __forceinline__ float logistic(float product) const {
        return reciprocal_approx(exp2_approx(product * to_exponent) + 1.f);
    }
    // Moves the reference of a row whose largest product is above its limit to that; returns the factor for what has been
    // accumulated.
    __device__ __forceinline__ float move_reference(SoftmaxRow& row, float product) const {
        SoftmaxRow moved = row;
        const float factor = moved.template move_reference<MovedRows::kAll>(logistic(product) * scale_log2, 1.f, 1.f);
        // The product whose score is the new limit; none, where scores do not rise so far.
        const float inverse = scale_log2 / moved.limit;
        moved.limit = moved.limit < 0.f ? log2_approx(inverse - 1.f) / to_exponent : positive_infinity();
        if (!(product > row.limit)) return 1.f;
        row = moved;
        return factor;
    }
};

// Which of a step's probabilities dropout keeps: a call of the random numbers has the eight of a lane in one row tile.
template <int RowTiles>
struct KeptOfStep {
    u32 kept[RowTiles][2][2];  // [row][tile of keys]: 0xffff for each of two keys that is kept

    __device__ __forceinline__ static Philox numbers_of(const FwdParams& p) {
        return Philox(p.score_options.rng_state, (p.lengths.first_batch + block_batch_here()) * p.problem.nheads +
                                                     head_here<ForwardLayout::kEitherOrder>(p.problem));
    }
    // `row` and `key` are the warp's and the step's first.
    __device__ __forceinline__ void draw(const FwdParams& p, const Philox& philox, int row, int key) {
        const DropoutRule rule(p.score_options);
        const Lane lane(lane_here());
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const uint4 of = philox.numbers(row + ForwardLayout::kTileQueries * mt + ForwardLayout::first_query(lane),
                                            key + ForwardLayout::first_key(lane));
            kept[mt][0][0] = rule.kept_halves(__byte_perm(of.x, of.y, 0x5410));
            kept[mt][0][1] = rule.kept_halves(__byte_perm(of.x, of.y, 0x7632));
            kept[mt][1][0] = rule.kept_halves(__byte_perm(of.z, of.w, 0x5410));
            kept[mt][1][1] = rule.kept_halves(__byte_perm(of.z, of.w, 0x7632));
        }
    }
    __device__ __forceinline__ void keep_all() {
#pragma unroll
        for (int i = 0; i < 4 * RowTiles; i++) kept[i / 4][i / 2 % 2][i % 2] = ~0u;
    }
};

}  // namespace turing
