// ALiBi, bias and dropout in the main kernels of the turing backward pass (blocks own keys, and compute dK and dV) that are
// compiled for exactly one score feature: single_role.cuh, and for dropout warp_specialized.cuh. (Softcap needs nothing here.)
// ALiBi and an fp16 bias are the initial accumulators of S^T = K Q^T, so no instruction adds them later. That product is not scaled
// yet, so they are divided by |softmax_scale| (Problem::scale). The forward kernels (turing/forward/one_feature.cuh) do the same,
// so scores round alike. -lse must not be there: scores would round at the size of lse (backward/probabilities.cuh). An fp32 bias,
// which is rare, is added after the product. Dropout masks packed P^T, and dP^T.
//
//   s[n][m]           the warp's scores: N column tiles of eight queries, by 16 keys; tile_of(s, n): all keys of a column tile
//   row, key, row_end the step's first query; the warp's first key; queries from here on do not exist, or see no key of the block
//   Layout            KeysLayout (fragments.cuh): of a column tile a lane has kRows (2) queries r, row_slot(r) after its first,
//                     each with kKeys (4) neighboring keys j; element(r, j) is theirs among its kElements (8)
//   ScoreCoord        query and key of a lane's elements: query(0) and key(0) are the first
//   unrolled<I, J>(f) calls f(i, j) for each i < I and j < J
//   remat_*()         reads a special register (threadIdx, blockIdx) again at its use, to hold no register in between (ptx.cuh)
#pragma once

#include "backward/modifiers.cuh"
#include "turing/backward/shape.cuh"

namespace turing {

// What S^T of a step begins with. A kernel for ALiBi calls alibi() before the product. A kernel for a bias calls load_bias() one
// step ahead, bias() before the product and, if the bias is fp32, add_fp32_bias() after it.
template <class Layout, int N>
struct InitialScores {
    using Scores = Accumulator[N][Layout::kTileKeys / 16];
    using Tile = typename Layout::Tile;
    // kRequiredFeatures (features.cuh): 0 in plain kernels and in those of several features, which do not call this
    static_assert(!kRequiredFeatures || (Layout::kKeys == 4 && Layout::kRows == 2), "a lane has four adjacent keys of two queries");
    static __device__ __forceinline__ Tile& tile_of(Scores& s, int n) { return reinterpret_cast<Tile&>(s[n]); }

    // Sets s to ALiBi's terms of query i and key j, -slope / scale * |i + seqlen_k - seqlen_q - j|.
    static __device__ __forceinline__ void alibi(Scores& s, const BwdParams& p, int head, int row, int key) {
        const ScoreOptions& o = p.score_options;
        const int batch = remat_block_batch();
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        // a volatile load, which each step repeats: the slope holds no register between steps
        const float slope = load_float_constant(o.alibi_slopes + batch * o.alibi_batch_stride + head);
        const float neg_slope = __fdividef(-slope, p.problem.scale);  // a product times `scale` is a score
        const ScoreCoord<Layout> coord(remat_lane(), row, key);
        const float first = static_cast<float>(coord.query(0) + sequence.seqlen_k() - sequence.seqlen_q() - coord.key(0));
        unrolled<N, Layout::kElements>([&](int n, int v) {
            tile_of(s, n)[v] = neg_slope * fabsf(first + static_cast<float>(8 * n + coord.query_minus_key(v)));
        });
    }

    // fp16 bias of a step, loaded one step ahead: of each column tile and query r of the lane, four keys
    uint2 loaded[N][2];

    // Address of a query's bias, from `base`, that of query 0. Queries from row_end on read that of row_end - 1: their P is 0.
    static __device__ __forceinline__ const char* bias_at(const BwdParams& p, const char* base, int query, int row_end, int bytes) {
        const unsigned row = min(query, row_end - 1);
        return base + static_cast<unsigned long long>(row) * (static_cast<unsigned>(p.score_options.bias_row_stride) * bytes);
    }
    // Address of the bias of query 0 and of four keys from `key` on; past the last key, of the last four. `bytes`: of an element.
    // The host pads rows of a bias to a multiple of 4 keys, and aligns them to 16 bytes (src/ops/blocks.rs).
    static __device__ __forceinline__ const char* bias_base(const BwdParams& p, int head, int key, int bytes) {
        const ScoreOptions& o = p.score_options;
        return reinterpret_cast<const char*>(o.bias) +
               (remat_block_batch() * o.bias_batch_stride + head * o.bias_head_stride + min(key, p.problem.seqlen_k - 1 & ~3)) *
                   bytes;
    }
    // Loads the fp16 bias of the step at `row`; an fp32 one counts as 0 here.
    __device__ __forceinline__ void load_bias(const BwdParams& p, int head, int row, int row_end, int key) {
        if (uses_fp32_bias(p.score_options)) {
#pragma unroll
            for (int i = 0; i < 2 * N; i++) loaded[i / 2][i % 2] = make_uint2(0, 0);
            return;
        }
        const ScoreCoord<Layout> coord(remat_lane(), row, key);
        const char* base = bias_base(p, head, coord.key(0), 2);
        unrolled<N, 2>([&](int n, int r) {
            const char* from = bias_at(p, base, coord.query(0) + 8 * n + Layout::row_slot(r), row_end, 2);
            load_global2_constant(loaded[n][r], from);
        });
    }
    static __device__ __forceinline__ void add_fp32_bias(Scores& s, const BwdParams& p, int head, int row, int row_end, int key) {
        const float inverse_scale = __fdividef(1.f, p.problem.scale);
        const ScoreCoord<Layout> coord(remat_lane(), row, key);
        const char* base = bias_base(p, head, coord.key(0), 4);
        unrolled<N, 2>([&](int n, int r) {
            const char* from = bias_at(p, base, coord.query(0) + 8 * n + Layout::row_slot(r), row_end, 4);
            float of_keys[4];
            Bias::to_float(p.score_options, __ldg(reinterpret_cast<const uint4*>(from)), of_keys);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float& x = tile_of(s, n)[Layout::element(r, j)];
                x = fmaf(of_keys[j], inverse_scale, x);
            }
        });
    }
    // Sets s to the fp16 bias that was loaded (0 if the bias is fp32).
    __device__ __forceinline__ void bias(Scores& s, const BwdParams& p) const {
        const float inverse_scale = __fdividef(1.f, p.problem.scale);
        unrolled<N, 2>([&](int n, int r) {
            const float2 low = to_float2(loaded[n][r].x), high = to_float2(loaded[n][r].y);
            Tile& x = tile_of(s, n);
            x[Layout::element(r, 0)] = low.x * inverse_scale, x[Layout::element(r, 1)] = low.y * inverse_scale;
            x[Layout::element(r, 2)] = high.x * inverse_scale, x[Layout::element(r, 3)] = high.y * inverse_scale;
        });
    }
};

// Dropout mask of a column tile: which probabilities dropout keeps, of the lane's two queries and four keys.
struct TileDropoutMask {
    u32 of_key[4];  // lower half: first query, upper half: second; 0xffff if the probability is kept, else 0

    // Draws random numbers. `row`: the tile's first query. A Philox call has 16-bit numbers of two queries 4 apart and four keys:
    // those of query r and keys c (lower half) and c + 2 (upper half) are in philox_word(drawn, r, c). lower_halves(a, b), or
    // upper, joins those halves of two words: a key's numbers of both queries. kept_halves() turns each into 0xffff or 0.
    template <class Layout>
    __device__ __forceinline__ void draw(Layout, const BwdParams& p, const Philox& philox, int row, int key) {
        static_assert(Layout::row_slot(1) == 4 && Layout::kKeys == 4, "one call draws for all keys of a lane");
        const DropoutRule rule(p.score_options);
        const ScoreCoord<Layout> coord(remat_lane(), row, key);
        const uint4 drawn = philox.numbers(coord.query(0), coord.key(0));
        of_key[0] = rule.kept_halves(lower_halves(philox_word(drawn, 0, 0), philox_word(drawn, 1, 0)));
        of_key[1] = rule.kept_halves(lower_halves(philox_word(drawn, 0, 1), philox_word(drawn, 1, 1)));
        of_key[2] = rule.kept_halves(upper_halves(philox_word(drawn, 0, 0), philox_word(drawn, 1, 0)));
        of_key[3] = rule.kept_halves(upper_halves(philox_word(drawn, 0, 1), philox_word(drawn, 1, 1)));
    }
};

}  // namespace turing
