// What general kernels do to scores and probabilities (score_modifier.cuh), in the layouts of the backward pass.
//
// They take the 16x16 tiles of a warp's scores in a rolled loop, for the instruction cache. Registers cannot be indexed: the
// loop works on the first tile, and the others move down by one (next_tile). What only some problems ask for is derived
// again at every step, so that it holds no registers in between.
#pragma once

#include "score_modifier.cuh"
#include "volta/backward/backward.cuh"

namespace volta {

template <int M, int N>
__device__ __forceinline__ void next_tile(Accumulator (&s)[M][N]) {
#pragma unroll
    for (int tile = 1; tile < M * N; tile++)
#pragma unroll
        for (int v = 0; v < 8; v++) s[(tile - 1) / N][(tile - 1) % N][v] = s[tile / N][tile % N][v];
}

// Where the lane's scores of a tile lie in the sequence.
template <Own OWN>
class ScorePlace {
    int own_, step_;  // of element 0

public:
    // `own` and `step` are the tile's first.
    __device__ __forceinline__ ScorePlace(const Lane& lane, int own, int step)
        : own_(own + score_own(lane, 0, 0)), step_(step + score_step(lane, 0, 0)) {}
    __device__ __forceinline__ int own(int v) const { return own_ + (v & 2); }
    __device__ __forceinline__ int step(int v) const { return step_ + (v & 1) + 2 * (v >> 2); }
    // What row - key is more than that of element 0.
    __device__ __forceinline__ static constexpr int row_minus_key(int v) {
        const int step_minus_own = (v & 1) + 2 * (v >> 2) - (v & 2);
        return OWN == Own::kKeys ? step_minus_own : -step_minus_own;
    }
    __device__ __forceinline__ int row(int v) const { return OWN == Own::kKeys ? step(v) : own(v); }
    __device__ __forceinline__ int key(int v) const { return OWN == Own::kKeys ? own(v) : step(v); }
};

__device__ __forceinline__ Philox philox_of(const BwdParams& p, int head) {
    return Philox(p.score_options.rng_state, (p.lengths.first_batch + block_batch_here()) * p.problem.nheads + head);
}

// ALiBi and bias, to scores in units of log2. Rows from row_end on do not exist, or see none of the keys.
template <Own OWN>
__device__ __forceinline__ void add_position_terms(Accumulator& s, const BwdParams& p, int head, int row_end, const ScorePlace<OWN>& place) {
    const ScoreOptions& options = p.score_options;
    const int batch = block_batch_here();
    if (options.alibi_slopes) {
        const BlockSequence sequence(p.problem, p.lengths, batch);
        const Alibi alibi(options, batch, head, sequence.seqlen_q(), sequence.seqlen_k());
        // one conversion, by the XU pipe, for the eight elements
        const float first = alibi.distance(place.row(0), place.key(0));
#pragma unroll
        for (int v = 0; v < 8; v++) s[v] = alibi(s[v], first + static_cast<float>(ScorePlace<OWN>::row_minus_key(v)));
    }
    if (options.bias) {
        const Bias bias(p.problem, options, batch, head);
        if (OWN == Own::kKeys) {
            // a lane has the first and third, or the second and fourth, of four keys
            uint4 loaded[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                loaded[i] = bias.load4(options, min(place.step(i % 2 + 4 * (i / 2)), row_end - 1), place.own(0) & ~3);
            float2 of_keys[4];
            Bias::every_second(options, loaded, place.own(0) & 1, of_keys);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int v = i % 2 + 4 * (i / 2);
                s[v] = fmaf(of_keys[i].x, kLog2e, s[v]);
                s[v + 2] = fmaf(of_keys[i].y, kLog2e, s[v + 2]);
            }
        } else {
#pragma unroll
            for (int h = 0; h < 4; h += 2) {  // element 0 of four keys
                float of_keys[4];
                Bias::to_float(options, bias.load4(options, min(place.own(h), row_end - 1), place.step(0)), of_keys);
#pragma unroll
                for (int i = 0; i < 4; i++) s[h + i % 2 + 4 * (i / 2)] = fmaf(of_keys[i], kLog2e, s[h + i % 2 + 4 * (i / 2)]);
            }
        }
    }
}

// From q.k - lse / scale to the capped score minus lse, in units of log2. `statistic` is the -lse / scale that an element
// began with, slope softcap's derivative there.
__device__ __forceinline__ float capped_score(float s, float statistic, const BwdParams& p, const Softcap& softcap, float& slope) {
    // Rows without probabilities have -inf, and s is that too.
    const float logistic = softcap.logistic(s - fmaxf(statistic, kLowest));
    slope = Softcap::derivative(logistic);
    return fmaf(-2.f * softcap.cap, logistic, fmaf(statistic, p.problem.scale_log2, softcap.cap));
}

template <Own OWN>
__device__ __forceinline__ void mask_tile(Accumulator& s, const Mask& mask, const ScorePlace<OWN>& place) {
#pragma unroll
    for (int v = 0; v < 8; v++)
        if (!mask.visible(place.row(v), place.key(v))) s[v] = negative_infinity();
}

// Which of a tile's probabilities dropout drops, where own rows are keys. A lane has two keys of a group of four, for four
// queries, and so has its neighbour: each computes the numbers of two queries. All lanes of the warp together.
class DroppedKeys {
    u32 kept_ = 0;

public:
    __device__ __forceinline__ DroppedKeys(const Philox& philox, unsigned threshold, const ScorePlace<Own::kKeys>& place) {
        const int odd = place.own(0) & 1, row = place.step(0) + 2 * odd, key = place.own(0) & ~3;
        u32 mine = 0;
#pragma unroll 1
        for (int i = 0; i < 2; i++) mine |= kept(philox.numbers(row + i, key), threshold) << 16 * i;
        const u32 other = __shfl_xor_sync(~0u, mine, 1);
        // bits: key of four, of which the lane has 0 and 2 from here on; pair of queries * 8; query of the pair * 16
        kept_ = (odd ? other | mine << 8 : mine | other << 8) >> odd;
    }
    // The sign bits of those of word i of a packed tile.
    __device__ __forceinline__ u32 signs(int i) const { return ~kept_ << (15 - 2 * (i / 2) - 8 * (i % 2)) & 0x80008000; }
};

// Which of a tile's probabilities dropout keeps, where own rows are queries: a bit each, those of a row together.
__device__ __forceinline__ u32 kept_queries(const Philox& philox, unsigned threshold, const ScorePlace<Own::kQueries>& place) {
    u32 bits = 0;
#pragma unroll 1
    for (int h = 0; h < 2; h++) bits |= kept(philox.numbers(place.own(2 * h), place.step(0)), threshold) << 4 * h;
    return bits;
}
__device__ __forceinline__ bool is_kept(u32 bits, int v) { return bits >> (2 * (v & 2) + (v & 1) + 2 * (v >> 2)) & 1; }

// 0xffff where `signs` has the sign bit of a half. (prmt copies signs where the selector says 8 and more; __byte_perm does not.)
__device__ __forceinline__ u32 halves_of(u32 signs) {
    u32 halves;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(halves) : "r"(signs));
    return halves;
}

// Adds the gradient of a tile's scores to that of the bias.
__device__ __forceinline__ void add_bias_gradient(const Accumulator& ds, const BwdParams& p, int head, const ScorePlace<Own::kKeys>& place) {
    const int batch = block_batch_here();
    const BlockSequence sequence(p.problem, p.lengths, batch);
    float* base = p.dbias + batch * p.dbias_batch_stride + head * p.dbias_head_stride;
#pragma unroll
    for (int v = 0; v < 8; v++) {
        const int row = place.row(v), key = place.key(v);
        if (row < sequence.seqlen_q() && key < sequence.seqlen_k())
            add_global(base + row * p.dbias_row_stride + key * p.dbias_key_stride, ds[v]);
    }
}

}  // namespace volta
