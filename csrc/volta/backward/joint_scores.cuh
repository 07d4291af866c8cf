// From scores to P^T and dS^T in the single-role main kernel of the backward pass (single_role.cuh). Its thread block owns keys and
// visits queries in steps of 32; each warp has S^T and dP^T of its 32 keys. run() computes P^T, which it stores to shared memory,
// and dS^T, which stays in registers, with one score feature: a score function (softcap), ALiBi, bias or dropout. It is for kernels
// that require one feature. Kernels without features use begin() and Addends alone.
//
// Registers cannot be indexed dynamically. So a rolled loop over 16x16 tiles works on the first tile, x of S^T and dx of dP^T, and
// next_tile() moves the others down by one. dS of a tile, packed, goes to dp[1][1], which that frees; later moves bring it down to
// the tile's own place. Exponents have log2 units: P = 2^(score - lse), with both times log2(e).
//
//   m, n, v           a tile of 16 keys of the warp; of 16 queries; a lane's element (0 to 7) of a 16x16 tile
//   KeysLayout        of a tile a lane has kRows (4) queries r, each with two keys j: element(r, j) is theirs, row_of(v) the r of
//                     v (fragments.cuh). S::kRows is something else: the keys of a thread block
//   RowStats          global layout of -lse/scale (at kNegLseAt) and -delta, -rowsum(dO * O) (at kNegDeltaAt): kRowFloats a query
//   ScoreCoord        query(v), key(v) of element v of a tile in the sequence; ExponentAddends: of(n, v), what its query adds
//   PackedTile        a lane's eight elements of a tile as fp16: four words of two, x[i] (backward/packed_tile.cuh)
//   remat_*()         reads special registers again, to hold none; keep_in_register() stops that (ptx.cuh)
//   kHas...           whether the kernel is compiled for the feature (features.cuh)
#pragma once

#include "backward/modifiers.cuh"  // Alibi, Bias, philox_of() (random numbers), add_bias_gradient(); uses_...(): the problem has it
#include "backward/probabilities.cuh"  // ExponentAddends, kExponentShift, kExponentUnit
#include "volta/backward/bias_gradient.cuh"  // store_bias_gradient(): dbias as fp16
#include "volta/backward/key_block.cuh"  // KeyBlock: number() of the thread block's block of keys

namespace volta {

// S: the kernel's Shape (shape.cuh). A warp has 32 keys by 32 queries: tiles [m][n] of keys m and queries n. "Joint": it has both
// S^T and dP^T of these, which in warp_specialized.cuh are in different warps.
template <class S>
struct JointScores {
    using Scores = Accumulator[2][2];
    using Coord = ScoreCoord<KeysLayout>;

    // What is added in the exponents of a step's queries, for kernels without score features; run() loads its own for each tile.
    // It is loaded as -lse / scale (RowStats). scale() turns that into -lse in log2 units plus kExponentShift (-100).
    using Addends = ExponentAddends<KeysLayout, 2>;
    // Sets the initial accumulators before the products of a step: 0 for S; for dP -delta. `stats`: the lane's statistics of the
    // step. Dropout scales dP but not delta: with it dP begins with 0 too, and run() adds -delta.
    static __device__ __forceinline__ void begin(Scores& s, Scores& dp, const float* stats) {
        clear_tiles(s);
        if (kHasDropout)
            clear_tiles(dp);
        else
            load_stats(dp, stats + RowStats::kNegDeltaAt);
    }

    // Returns ALiBi's distance in tokens, seqlen_k - seqlen_q + query - key, of the lane's first score in a step that begins at
    // query 0. `key`: the warp's first.
    static __device__ __forceinline__ int first_distance(const BlockSeqlenInfo& sequence, const Lane& lane, int key) {
        if (!kHasAlibi) return 0;
        return keep_in_register(sequence.seqlen_k() - sequence.seqlen_q() + KeysLayout::first_query(lane) - key -
                                KeysLayout::first_key(lane));
    }

    // Computes P^T and dS^T of a step from S^T (s) and dP^T - delta (dp; with dropout dP^T). `head`: the query head. `row`: the
    // step's first query; queries from row_end on see no key of the block. `stats`: the lane's row statistics of the step.
    // `masked`: the step needs the causal, window or length mask. `packed`: shared address of the lane's P^T. keys_left: keys that
    // exist, from the lane's first on; P^T of others is not stored. `distance`: first_distance().
    static __device__ __forceinline__ void run(Scores& s, Scores& dp, const BwdParams& p, int head, int row, int row_end,
                                               const float* stats, bool masked, u32 packed, int keys_left, int distance) {
        static_assert(!(kHasBias && kHasScoreFunction), "a score function takes -lse before the bias is loaded");
        const ScoreOptions& options = p.score_options;
        float neg_slope = 0.f;
        if (uses_alibi(options)) neg_slope = load_neg_slope(options, head);
#pragma unroll 1
        for (int tile = 0; tile < 4; tile++) {
            const int m = tile / 2, n = tile % 2;
            Accumulator &x = s[0][0], &dx = dp[0][0];
            // -lse, loaded here; with a bias below, because the loaded biases leave no registers for it.
            ExponentAddends<KeysLayout, 1> addends;
            if (!kHasBias) load_rows(addends.of_row, stats + RowStats::kNegLseAt + 16 * n * RowStats::kRowFloats);
            // The score function maps a product to a state, from which score and derivative follow (score_function.cuh). score()
            // leaves out the score's constant term, constant() (log2 units), so the addend has it.
            if (uses_score_function(options)) {
                const ScoreFunction function = ScoreFunction::rematerialized(p.problem, options);
                addends.scale(p.problem.scale_log2, function.constant() + kExponentShift);
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const float state = function.state(x[v]);
                    x[v] = function.score(state, addends.of(0, v));
                    dx[v] *= ScoreFunction::derivative(state);
                }
            } else {
                if (!kHasBias) addends.scale(p.problem.scale_log2, kExponentShift);
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = fmaf(x[v], p.problem.scale_log2, kHasBias ? 0.f : addends.of(0, v));
            }
            if (uses_alibi(options)) {
                const float first = static_cast<float>(distance + row + 16 * (n - m));
#pragma unroll
                for (int v = 0; v < 8; v++)
                    x[v] = Alibi::of(-neg_slope, x[v], first + static_cast<float>(Coord::query_minus_key(v)));
            }
            if (uses_bias(options)) {
                if (uses_fp32_bias(options))
                    add_bias<true>(x, p, head, row_end, remat_coord(p, row, m, n));
                else
                    add_bias<false>(x, p, head, row_end, remat_coord(p, row, m, n));
            }
            if (masked)
                mask_tile(x, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch())),
                          remat_coord(p, row, m, n));
            if (kHasBias) {
                load_rows(addends.of_row, stats + RowStats::kNegLseAt + 16 * n * RowStats::kRowFloats);
                addends.scale(p.problem.scale_log2, kExponentShift);
            }
            // x becomes P * 2^kExponentShift (2^-100), which pack_probability_tile() packs to fp16 P * 2^12. kExponentUnit (2^100)
            // restores P for dS.
#pragma unroll
            for (int v = 0; v < 8; v++) x[v] = exp2_approx(kHasBias ? x[v] + addends.of(0, v) : x[v]);
            PackedTile probabilities = pack_probability_tile(x);
            // DroppedKeys (packed_tile.cuh) draws which probabilities are dropped. signs(i) has their sign bits in word i of a
            // packed tile: 0x8000 of its first element (even v), 0x80000000 of the second. sign_masks() widens each to all 16 bits.
            if (uses_dropout(options)) {
                const DroppedKeys<KeysLayout> dropped(philox_of(p, head), DropoutRule(options), remat_coord(p, row, m, n));
                float neg_delta[1][KeysLayout::kRows];
                load_rows(neg_delta, stats + RowStats::kNegDeltaAt + 16 * n * RowStats::kRowFloats);
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const bool is_dropped = dropped.signs(packed_word(v)) & (v % 2 ? 0x80000000 : 0x8000);
                    dx[v] = fmaf(dx[v], is_dropped ? 0.f : options.dropout_scale, neg_delta[0][KeysLayout::row_of(v)]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) probabilities.x[i] &= ~sign_masks(dropped.signs(i));
            }
            store(packed, m, n, probabilities, keys_left);
#pragma unroll
            for (int v = 0; v < 8; v++) dx[v] *= x[v] * kExponentUnit;
            if (kHasBias && p.dbias && !p.dbias_is_fp16) add_bias_gradient(dx, p, head, remat_coord(p, row, m, n));
            const PackedTile ds = pack_tile(dx);
            if (kHasBias && p.dbias && p.dbias_is_fp16) store_bias_gradient(ds, p, head, remat_coord(p, row, m, n));
            next_tile(s);
            next_tile(dp);
#pragma unroll
            for (int i = 0; i < 4; i++) dp[1][1][i] = __uint_as_float(ds.x[i]);
        }
    }
    // Returns dS of a tile from dp[m][n] after run().
    static __device__ __forceinline__ PackedTile gradients(const Accumulator& dp) {
        return {{__float_as_uint(dp[0]), __float_as_uint(dp[1]), __float_as_uint(dp[2]), __float_as_uint(dp[3])}};
    }

private:
    // Returns minus the head's ALiBi slope, in log2 units: the factor of the distance. Alibi::of() expects the slope and negates
    // it, so run() negates this first; both signs are part of one fma.
    static __device__ __forceinline__ float load_neg_slope(const ScoreOptions& o, int head) {
        return Alibi::load_slope(o, remat_block_batch(), head) * -kLog2e;
    }
    // Adds the bias, in log2 units, to the scores x of a tile. Unlike add_bias() of backward/modifiers.cuh it takes the dtype as a
    // template argument (FP32, else fp16), and four registers fewer for fp32.
    template <bool FP32>
    static __device__ __forceinline__ void add_bias(Accumulator& x, const BwdParams& p, int head, int row_end, const Coord& coord) {
        ScoreOptions options = p.score_options;
        options.bias_is_fp32 = FP32;
        asm volatile("mov.b64 %0, %0;" : "+l"(options.bias_row_stride));  // read again, holds no register between steps
        const Bias bias(p.problem, options, remat_block_batch(), head);
        constexpr int kRows = KeysLayout::kRows, kAtOnce = FP32 ? 1 : kRows;
#pragma unroll
        for (int first = 0; first < kRows; first += kAtOnce) {
            // Queries from row_end on read the bias of query row_end - 1: min(query, row_end - 1). load4() brings an aligned group
            // of four keys. every_second() takes the lane's from it: 0 and 2, or 1 and 3.
            uint4 loaded[kAtOnce];
#pragma unroll
            for (int r = 0; r < kAtOnce; r++)
                loaded[r] =
                    bias.load4(options, min(coord.query(KeysLayout::element(first + r, 0)) + 1, row_end) - 1, coord.key(0) & ~3);
            if (FP32) __syncwarp();  // one row's four registers after the other's
            float2 key_bias[kAtOnce];
            Bias::every_second(options, loaded, coord.key(0) & 1, key_bias);
#pragma unroll
            for (int r = 0; r < kAtOnce; r++) {
                float &first_key = x[KeysLayout::element(first + r, 0)], &second_key = x[KeysLayout::element(first + r, 1)];
                first_key = fmaf(key_bias[r].x, kLog2e, first_key);
                second_key = fmaf(key_bias[r].y, kLog2e, second_key);
            }
        }
    }
    // The coordinates of tile (m, n), computed again on each call. KeyBlock: no kernel with a score feature has a stream-K grid.
    static __device__ __forceinline__ Coord remat_coord(const BwdParams& p, int row, int m, int n) {
        const int thread = remat_thread_index();
        return Coord(Lane(thread & 31), row + 16 * n, KeyBlock::number(p) * S::kRows + thread / 32 * 32 + 16 * m);
    }
    // As store_packed() (fragments.cuh), but without branches. A lane has two keys of a tile, two apart: packed_first() and
    // packed_second() are the shared addresses of either key's four queries. keys_left counts from the lane's first key.
    static __device__ __forceinline__ void store(u32 address, int m, int n, const PackedTile& tile, int keys_left) {
        store_shared2_if(keys_left > 16 * m, packed_first(address, m, n), tile.x[0], tile.x[1]);
        store_shared2_if(keys_left > 16 * m + 2, packed_second(address, m, n), tile.x[2], tile.x[3]);
    }
};

}  // namespace volta
