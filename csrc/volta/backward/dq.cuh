// dQ kernel of the volta backward pass, for plans without atomics (src/plan/backward/parts.rs): deterministic=True where this is
// faster, block-sparse masks with other features, or a tuning file that chooses it. The main kernel, whose blocks own keys, then
// computes dK and dV only (DqMode::kSeparate). Here a thread block owns queries and visits keys that they see, a step at a time:
//
//   S = Q K^T     P = exp(scale * S - lse)     dP = dO V^T     dS = P * (dP - delta)     dQ += dS K
//
// with lse = softmax_lse and delta = rowsum(dO * O), which the preprocess kernel has computed. So S and dP are computed
// twice, and dQ is a sum in a fixed order: deterministic. At the end it is multiplied by scale. The products are those of the main
// kernel with queries in the place of keys. A group of kGroupWarps warps shares 32 queries. Each warp computes some 16x16 tiles of
// S and dP, stores dS to shared memory, and computes some columns of dQ from all of the group's dS. csrc/entry.cu calls run().
//
//   S (Shape)         sizes (shape.cuh): kRows own rows (queries), kStep step rows (keys), kChunks chunks of eight columns,
//                     kRowBytes of a row; offsets in shared memory: kOwnS and kOwnDp (Q and dO), kStepS and kStepDp (K and V),
//                     kScores (dS); kOwnTile, kStepTile, kScoreTile: bytes of a tile
//   m, n, v           tile of 16 queries of the warp; tile of 16 keys; a lane's element (0 to 7) of a 16x16 tile
//   QueriesLayout     of a tile a lane has kRows (2) queries r, each with four keys j: element(r, j) is theirs, row_of(v) the r of
//                     v. score_own(lane, m, v): query of element v of tile m, from the warp's first (fragments.cuh)
//   RowStats          layout of -lse/|softmax_scale| (at kNegLseAt) and -delta (at kNegDeltaAt) in global memory: kRowFloats a
//                     query; rounded_row(): the sequence's first row there, of all heads; rounded_rows(): its rows, rounded up
//   range             first to end - 1: keys that the block's queries see; unmasked: first keys of steps that need no mask
//   keys              iterator over the block's steps: first() is the step's first key, after(n) that of the step n later
//   tiles             StepTiles, a thread's part of the next step's K and V: load(k, v, n) gets it (zeros past n keys) and moves
//                     on a step; skip(k, v, n) moves n keys further; store() puts it to shared memory
//   bits              under a block-sparse mask: which single scores of the warp exist in this step; else calls compile to nothing
//   chunk_after(x, n) the address n chunks after x in a swizzled row (tile.cuh)
//   remat_*()         reads threadIdx or blockIdx (x: block of queries, y: query head, z: batch entry) again, to hold no register
//   kVarlen, kHasScoreFeatures  what this kernel is compiled for (features.cuh); parameters choose among the score features
//                     (softcap, ALiBi, bias, dropout)
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/dense_blocks.cuh"  // DenseBlocks: all keys of a range
#include "backward/modifiers.cuh"  // score features: function_score(), add_position_terms(), draw_kept_rows(), dropped_gradient()
#include "backward/probabilities.cuh"  // exponentials(), ExponentAddends: P = 2^(score - lse)
#include "backward/scratch.cuh"  // RowStats; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/score_coord.cuh"  // ScoreCoord: query and key of a lane's elements; apply_mask(), mask_tile(): -inf where masked
#include "backward/tiles.cuh"  // load_own(), StepTiles: rows from global to shared memory; shared_to_output(): back
#include "backward/iteration_range.cuh"  // KeyRange: keys that the block's queries see
#include "volta/backward/products.cuh"  // Fragments, accumulate(): products; to_shared(), to_fp32_output(): dQ at the end

namespace volta {

// The kernel. BlockRows: queries of a block. Step: keys of a step. Blocks: which keys a block visits. DenseBlocks: all that a
// causal mask or window leaves; ListedBlocks (kListed): those in the lists of a block-sparse mask, where bits may hide scores.
template <int Headdim, int BlockRows, int Step, int Threads, class Blocks = DenseBlocks>
struct BackwardDq {
    // dS lies in tiles of 32 keys. Where shared memory (96 KB) has no room beside Q, dO, K and V, dS takes the place of V.
    static constexpr int kScoreTiles = Step / 32;
    static constexpr bool kScoresInV = Headdim > 96;
    using S = Shape<Headdim, BlockRows, Step, Threads, kScoresInV ? 0 : kScoreTiles>;
    static_assert(S::kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    using Layout = QueriesLayout;
    static_assert(!kScoresInV || kScoreTiles * S::kScoreTile <= S::kStepTile, "dS fits into the shared memory of V");

    static constexpr int kGroupWarps = 32 * S::kWarps / S::kRows;  // warps that share 32 queries

    // A warp's scores, in tiles of 16x16: its part of (two tiles of queries) x (the tiles of a step's keys). Two by two tiles need
    // 4 shared loads for 8 products, two by one 3 for 4, one by one 2 for 2. kKeyWarps warps share a step's keys.
    static constexpr int kStepKeyTiles = S::kStep / 16;
    static constexpr int kScoreKeyTiles = kStepKeyTiles > kGroupWarps ? kStepKeyTiles / kGroupWarps : 1;
    static constexpr int kKeyWarps = kStepKeyTiles / kScoreKeyTiles, kScoreQueryTiles = 2 * kKeyWarps / kGroupWarps;

    // A warp's dQ: 32 queries and every kGroupWarps-th panel (32 columns). Where that does not divide evenly, 16 queries.
    static constexpr bool kQueryHalves = S::kHeaddim / 32 % kGroupWarps != 0;
    static constexpr int kColumnWarps = kQueryHalves ? kGroupWarps / 2 : kGroupWarps, kQueryTiles = kQueryHalves ? 1 : 2;
    static constexpr int kPanels = S::kHeaddim / 32 / kColumnWarps;

    static constexpr int kScoreUnroll = S::kHeaddim <= 64 ? 1 : 2;  // chunks of headdim in one iteration of the first two products

    // Barrier of the warps that share 32 queries.
    static __device__ __forceinline__ void sync_group(int group) {
        if (kGroupWarps == 1)
            __syncwarp();
        else
            named_sync(1 + group, 32 * kGroupWarps);
    }

    // Kernels with score features: computes dS of a step from S and dP - delta, and stores it at the lane's address `packed`.
    // `row`, `key`: first of the warp. `addends` (-lse, log2 units), neg_delta: of the lane's rows (queries). `masked`: the step
    // needs the causal, window or length mask.
    using WarpScores = Accumulator[kScoreQueryTiles][kScoreKeyTiles];
    using Bits = typename Blocks::template Bits<Layout, 16 * kScoreQueryTiles>;
    using Addends = ExponentAddends<Layout, kScoreQueryTiles>;  // of_row[m][r]: -lse of a query, log2 units
    using LaneRows = float[kScoreQueryTiles][Layout::kRows];
    static __device__ __forceinline__ void generic_score_gradients(WarpScores& s, WarpScores& dp, const BwdParams& p, int row,
                                                                   int key, const Addends& addends, const LaneRows& neg_delta,
                                                                   bool masked, const Bits& bits, u32 packed) {
        const ScoreOptions& options = p.score_options;
        const Lane lane(remat_thread_index() & 31);
        // Registers cannot be indexed dynamically. So each iteration works on tile 0, and next_tile moves the others down by one.
#pragma unroll 1
        for (int tile = 0; tile < kScoreQueryTiles * kScoreKeyTiles; tile++) {
            const int m = tile / kScoreKeyTiles, n = tile % kScoreKeyTiles;
            const ScoreCoord<Layout> coord(lane, row + 16 * m, key + 16 * n);
            const auto value_of = [&](const LaneRows& x, int v) {  // of element v's query
                const int r = Layout::row_of(v);
                return m ? x[kScoreQueryTiles - 1][r] : x[0][r];  // one or two tiles: a choice of two needs no index
            };
            Accumulator &x = s[0][0], &dx = dp[0][0];  // x: S, then its exponent (log2 units); dx: dP, then dS
            if (uses_score_function(options)) {  // never together with dropout, which validation rejects
                const ScoreFunction function(p.problem, options);
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    float slope;
                    x[v] = function_score(x[v], value_of(addends.of_row, v), function, slope);
                    dx[v] *= slope;  // the function's derivative
                }
            } else {
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = fmaf(x[v], p.problem.scale_log2, value_of(addends.of_row, v));
            }
            add_position_terms(x, p, remat_block_y(), p.problem.seqlen_q, coord);  // ALiBi and bias
            if (masked) mask_tile(x, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch())), coord);
            if (bits.any()) bits.hide(x, m, n);
            if (uses_dropout(options)) {  // kept: a bit for each element that dropout keeps
                const u32 kept = draw_kept_rows(philox_of(p, remat_block_y()), DropoutRule(options), coord);
#pragma unroll
                for (int v = 0; v < 8; v++)
                    dx[v] = dropped_gradient(dx[v], value_of(neg_delta, v), !is_kept<Layout>(kept, v), options.dropout_scale);
            }
#pragma unroll
            for (int v = 0; v < 8; v++) dx[v] *= exp2_approx(x[v]);
            store_packed(packed, m, n, pack_tile(dx));
            next_tile(s);
            next_tile(dp);
        }
    }

    static __device__ __forceinline__ void run(const BwdParams& p, const Blocks& blocks = Blocks()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const Lane lane;
        const int warp = threadIdx.x / 32;
        const int group = warp / kGroupWarps, group_warp = warp % kGroupWarps;
        const int first_row = blocks.template first_row<S::kRows>(p);
        // The warp's first row (in the block) and key (in the step) of S and dP; its first row, and panel, of dQ.
        const int score_row = 32 * group + (kScoreQueryTiles == 1 ? 16 * (group_warp / kKeyWarps) : 0);
        const int score_key = 16 * kScoreKeyTiles * (group_warp % kKeyWarps);
        const int gradient_row = 32 * group + (kQueryHalves ? 16 * (group_warp / kColumnWarps) : 0);
        const int gradient_panel = group_warp % kColumnWarps;

        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        if (kVarlen && first_row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(p.problem, sequence);
        const KeyRange<S::kRows, S::kStep> range(mask, first_row);
        const int key_head = blockIdx.y / (p.problem.nheads / p.problem.nheads_k);

        auto keys = blocks.template steps<S::kStep>(p, blockIdx.y, first_row, range.first, range.end, sequence.seqlen_k());
        StepTiles<S> tiles(p, p.k, p.v, key_head, sequence.k_offset() + keys.first());
        tiles.load(p.k, p.v, sequence.seqlen_k() - keys.first());
        load_own<S>(p, p.q, p.dout, blockIdx.y, shared, sequence.q_offset(), first_row, sequence.seqlen_q());

        // The lane's shared addresses: operands of S (those of dP are a tile further); where its dS goes; operands of dQ. The
        // thread's: where its part of the step tiles goes.
        const u32 own_address = own_operand<S>(shared + S::kOwnS, lane, score_row);
        const u32 step_address = step_operand<S>(shared + S::kStepS, lane, score_key);
        const u32 packed =
            packed_address(shared + S::kScores + score_key / 32 * S::kScoreTile, lane, score_row, score_key % 32 / 8);
        const u32 score_address = score_operand(shared + S::kScores, lane, gradient_row);
        const u32 key_address = column_operand<S>(shared + S::kStepS, lane, gradient_panel);
        const u32 tile_address = shared + S::kStepS + StepTiles<S>::offset();

        // -lse and -delta of the lane's rows, two in each tile of 16. Rows past the scratch rows get what makes P 0.
        Addends addends;
        LaneRows neg_delta;
#pragma unroll
        for (int m = 0; m < kScoreQueryTiles; m++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                const int row = first_row + score_row + score_own(lane, m, Layout::element(r, 0));
                const long long head_row = rounded_row(p, sequence, blockIdx.z, blockIdx.y);
                const float* stats = p.row_stats + head_row * RowStats::kRowFloats + RowStats::offset(row);
                const bool exists = row < rounded_rows(p, sequence);
                addends.of_row[m][r] = exists ? stats[RowStats::kNegLseAt] : negative_infinity();
                neg_delta[m][r] = exists ? stats[RowStats::kNegDeltaAt] : 0.f;
            }
        addends.scale(p.problem.scale_log2, 0.f);  // to -lse in log2 units; 0: the shift, as dS alone is packed, not P

        Gradient<kQueryTiles, kPanels> dq = {};  // of the warp: tiles of 16 queries by panels of 32 columns

        tiles.store(tile_address);
        __syncthreads();

#pragma unroll 1
        for (; keys.exists(); keys.advance(blocks)) {
            const int key = keys.first();
            Bits bits;
            bits.load(blocks, keys, first_row + score_row, score_key, sequence.seqlen_k());
            // s: S, then P. dp: dP - delta, then dS.
            Accumulator s[kScoreQueryTiles][kScoreKeyTiles], dp[kScoreQueryTiles][kScoreKeyTiles];
            unrolled<kScoreQueryTiles, kScoreKeyTiles, 8>([&](int m, int n, int v) {
                s[m][n][v] = 0.f;
                dp[m][n][v] = neg_delta[m][Layout::row_of(v)];
            });
#pragma unroll kScoreUnroll
            for (u32 chunk = 0; chunk < S::kChunks; chunk++) {
                using Operands = Fragments<S, kScoreQueryTiles, kScoreKeyTiles>;
                const u32 a = chunk_after<S::kChunks>(own_address, chunk), b = chunk_after<S::kChunks>(step_address, chunk);
                // multiply_low adds products of columns 0 to 3 of the chunk, multiply_high those of 4 to 7
                const Operands qk(a, b), ov(a + S::kOwnTile, b + S::kStepTile);
                qk.multiply_low(s);
                ov.multiply_low(dp);
                qk.multiply_high(s);
                ov.multiply_high(dp);
            }
            const bool masked = !range.unmasked.contains(key);
            if (kHasScoreFeatures) {
                if (kScoresInV) __syncthreads();  // V is no longer needed
                generic_score_gradients(s, dp, p, first_row + score_row, key + score_key, addends, neg_delta, masked, bits, packed);
            } else {
                if (masked) apply_mask<Layout>(s, p, lane, first_row + score_row, key + score_key);
                if (bits.any())
#pragma unroll
                    for (int m = 0; m < kScoreQueryTiles; m++) bits.hide(s[m], m);
                exponentials(s, p.problem.scale_log2, addends);
                if (kScoresInV) __syncthreads();  // V is no longer needed
                unrolled<kScoreQueryTiles, kScoreKeyTiles>([&](int m, int n) {
#pragma unroll
                    for (int v = 0; v < 8; v++) dp[m][n][v] *= s[m][n][v];
                    store_packed(packed, m, n, pack_tile(dp[m][n]));
                });
            }
            // Loads of the next tile, which in a list need not be adjacent, are in flight from here on. Past the last key: none.
            if constexpr (Blocks::kListed) {
                tiles.skip(p.k, p.v, keys.after(1) - S::kStep - key);
                tiles.load(p.k, p.v, sequence.seqlen_k() - keys.after(1));
            } else {
                tiles.load(p.k, p.v, sequence.seqlen_k() - S::kStep - key);
            }
            sync_group(group);
#pragma unroll 1
            for (int tile = 0; tile < kScoreTiles; tile++)
                accumulate<S, kColumnWarps>(dq, score_address + tile * S::kScoreTile, key_address + tile * 32 * S::kRowBytes);
            __syncthreads();  // K, V and dS are free
            tiles.store(tile_address);
            __syncthreads();
        }

        // Queries that see no key get 0. The factor is signed: under a negative softmax_scale, load_own flips Q's signs, not K's.
        if (gradients_are_fp32(p)) {
            to_fp32_output<kColumnWarps>(dq, p.signed_scale, gradient_row, gradient_panel, p, p.dq, blockIdx.y, sequence.q_offset(),
                                         first_row, sequence.seqlen_q(), p.problem.headdim);
            return;
        }
        // Q is no longer needed: its tile stages dQ for the store.
        to_shared<S, kColumnWarps>(dq, p.signed_scale, shared + S::kOwnS, gradient_row, gradient_panel);
        __syncthreads();
        shared_to_output<S>(p, p.dq, blockIdx.y, shared + S::kOwnS, sequence.q_offset(), first_row, sequence.seqlen_q(),
                            p.problem.headdim);
    }
};

}  // namespace volta
