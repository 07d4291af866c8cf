// Main kernel of the volta backward pass for headdim above 64, and at 64 for small grids, block-sparse masks and generic kernels
// (score features chosen by parameters). A thread block owns keys and visits the queries that see them, 16 or 32 a step:
//
//   S^T  = K Q^T                 P = exp(scale * S - lse)     dV += P^T dO
//   dP^T = V dO^T - delta        dS = P * dP                  dK += dS^T Q        dQ += dS K
//
// 8 warps have two roles (warp specialization). Warps 0 to 3 (first role) compute S^T, P and dV, warps 4 to 7 (second) dP^T, dS and
// dK: dV and dK together do not fit one warp's registers. P goes to the second role through shared memory. All warps compute dQ,
// which is added up by atomics in fp32, unscaled (Mode kAtomicAdd), left to dq.cuh (kSeparate), or stored by the fused kernel,
// whose block has all keys of a head (kStore). csrc/entry.cu calls run().
//
// With 128 keys a warp has 32 keys x 32 queries of the scores and 32 keys x headdim of its gradient. With 64 keys (headdim
// above 128, and small grids) two warps of a role share 32 keys, a key group. Of the scores each has half the queries (or half the
// keys, in steps of 16 queries), of the gradient every second panel: 32 columns.
//
// A step, whose tiles of Q and dO are in shared memory (K and V stay there):
//   first role                               second role
//   1. S^T; P^T to shared memory             1. dP^T
//   2. barrier of the key group: P^T stored  2. the same barrier; dS^T = P^T * dP^T to shared memory
//   3. begins loads of the next tiles; dV    3. begins loads of the next tiles; dK
//   4. block barrier; next tiles to shared memory; dQ; block barrier
//
//   S (Shape)         sizes (shape.cuh): kRows own rows (keys), kStep step rows (queries), kChunks chunks of eight columns,
//                     kRowBytes of a row; offsets in shared memory: kOwnS and kOwnDp (K and V), kStepS and kStepDp (Q and dO),
//                     kScores (P^T and dS^T); kOwnTile, kStepTile, kScoreTile: bytes of a tile
//   m, n, v           a tile of 16 keys of the warp; of 16 queries; a lane's element (0 to 7) of a 16x16 tile
//   KeysLayout        of a tile a lane has four queries of two keys; score_own(lane, m, v): key of element v of tile m, from the
//                     warp's first (fragments.cuh)
//   RowStats          layout of -lse/scale (at kNegLseAt) and -delta (at kNegDeltaAt; delta = rowsum(dO * O)) in global memory:
//                     kRowFloats a query; rounded_row(): the sequence's first row there, of all heads; lengths are rounded up to 32
//   range             first() to end - 1: query rows that see the block's keys; unmasked: first rows of steps that need no mask;
//                     rows(): rows that loads may read (QueryRange, backward/iteration_range.cuh)
//   tiles             StepTiles, a thread's part of the next step's Q and dO: load(q, dout, n) gets it (zeros past n rows), and
//                     moves on a step; skip(q, dout, n) moves n rows further; store() puts it to shared memory
//   grid              Grid: number() of the key block, head() its KV head, batch(), dq_accum() the fp32 accumulator
//   queries           with a block-sparse mask: iterator over listed steps; first(): a step's first query; after(n): n steps later
//   bits              with a block-sparse mask: which single scores of the warp exist in this step; else calls compile to nothing
//   named_sync(i, n)  barrier number i, of n threads (ptx.cuh)
//   chunk_after(x, n) the address n chunks after x in a swizzled row (tile.cuh); AddressPair: two shared addresses in one register
//   remat_*()         computes a value again at its use; keep_in_register(x) computes x once (ptx.cuh)
//   kHas...           score features (softcap, ALiBi, bias, dropout) that this kernel is compiled for (features.cuh)
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
//   PackedTile        fp16 P * kProbabilityUnit (2^12) or dS in words of two elements, whose sign bits are 0x8000 and 0x80000000;
//                     with_signs_of(x, y): x with y's sign bits; DroppedKeys: signs(i) marks dropped elements (packed_tile.cuh)
#pragma once

#include "backward/dense_blocks.cuh"  // DenseBlocks: all queries of a range
#include "backward/modifiers.cuh"  // score features: function_score(), add_position_terms(), dropped_gradient() and others
#include "backward/residual_signs.cuh"  // signs that say which way P was rounded
#include "backward/scratch.cuh"  // RowStats; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/score_coord.cuh"  // ScoreCoord: query and key of a lane's elements; apply_mask(), mask_tile(): -inf where masked
#include "backward/tiles.cuh"  // load_own(), StepTiles: rows from global to shared memory; shared_to_output(): back
#include "backward/iteration_range.cuh"  // QueryRange
#include "backward/gradient_output.cuh"  // DqMode; gradients_are_fp32(): whether dk and dv are fp32, else fp16
#include "backward/row_statistics.cuh"  // write_row_statistics(): -lse/scale and -delta, in the fused kernel
#include "volta/backward/bias_gradient.cuh"  // store_bias_gradient(): dbias as fp16
#include "volta/backward/key_block.cuh"  // KeyBlock
#include "volta/backward/dq_product.cuh"  // DqProduct
#include "volta/backward/products.cuh"  // Fragments, accumulate(): products; to_shared(), to_fp32_output(): dK and dV at the end

namespace volta {

// BlockRows: keys of a block. Step: queries of a step. HeaddimV: columns of V and dO to compute with; at most Headdim, which tiles
// have. Grid: which keys a block has: KeyBlock (all of their steps), or StreamKKeyBlock (a split, some of them). Blocks: which
// queries a block visits. DenseBlocks: all that a causal mask or window leaves; ListedBlocks (kListed): those in a mask's lists.
template <int Headdim, int BlockRows, int Step, int Threads, DqMode Mode, int HeaddimV = Headdim, class Blocks = DenseBlocks,
          class Grid = KeyBlock>
struct BackwardWarpSpecialized {
    using S = Shape<Headdim, BlockRows, Step, Threads, 2>;  // two tiles of scores: P^T and dS^T
    static_assert(S::kSharedBytes == SHARED_BYTES && HeaddimV == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static constexpr bool kWithDq = Mode != DqMode::kSeparate, kFused = Mode == DqMode::kStore, kStreamK = Grid::kStreamK;
    static_assert(RowStats::kRowRounding % S::kStep == 0, "each step finds statistics of all its queries");
    using Queries = QueryRange<S::kRows, S::kStep>;
    // Products take half of the code in kernels whose step would not fit the instruction cache: those with score features, and
    // those with lists and dQ above headdim 64.
    static constexpr bool kCompact = kHasScoreFeatures || (Blocks::kListed && kWithDq && Headdim > 64);
    using Dq = DqProduct<S, kCompact>;  // dQ += dS K of a step: multiply(), then add_to() or store() (dq_product.cuh)
    using Coord = ScoreCoord<KeysLayout>;
    static_assert(!Blocks::kListed || !kFused, "a fused kernel visits all rows, to store their dq");
    static_assert(S::kThreads == 256, "two roles of four warps");
    static constexpr int kGroupWarps = 128 / S::kRows;  // warps of a role that share a key group: 32 keys
    static_assert(kGroupWarps == 1 || kGroupWarps == 2, "64 or 128 keys");

    static constexpr int kScoreKeyTiles = kGroupWarps == 2 && S::kStep == 16 ? 1 : 2;  // a warp's scores, in tiles of 16
    static constexpr int kScoreQueryTiles = S::kStep / 16 / (kGroupWarps == 2 && S::kStep == 32 ? 2 : 1);
    static constexpr int kPanels = S::kHeaddim / 32 / kGroupWarps;  // a warp's panels (32 columns) of dV or dK

    static constexpr bool kSameHeaddims = HeaddimV == Headdim;
    static constexpr int kChunksV = HeaddimV / kChunk, kPanelsV = HeaddimV / 32 / kGroupWarps;  // of V, dO; of dV
    static_assert(HeaddimV <= Headdim && HeaddimV % (32 * kGroupWarps) == 0, "whole blocks of columns");

    // Chunks of headdim in one iteration of the first two products: two where the instruction cache has room.
    static constexpr int kScoreUnroll = kGroupWarps == 2 ? 2 : 1;

    // Named barriers, one set for each key group (at most 4): P is stored (both roles); with kGroupWarps = 2 the role's own P or dS
    // is stored (its two warps). The first role need not wait for the second, but with bar.arrive, which does not wait, kernels
    // gain under 3% in simulation, and compute-sanitizer's racecheck does not know it.
    enum Barrier { kProbabilitiesReady = 1, kRoleReady = kProbabilitiesReady + 4 };

    // Shared memory has a P^T tile, at kScores, and a dS^T tile, kScoreTile bytes further. The first role stores P to the P^T tile,
    // for dV, and to the dS^T tile a copy of P whose sign bits say which way it was rounded (residual_signs.cuh). The second role
    // replaces this copy by dS.
    //
    // In kernels with score features, generic_probabilities() is the first role's work and generic_score_gradients() the second's.
    // With dropout, signs of the copy mark dropped probabilities instead. With a score function (softcap; never both), the dS^T
    // tile has the function's derivative, at least 0, instead of P, with the same signs.
    using WarpScores = Accumulator[kScoreKeyTiles][kScoreQueryTiles];
    using Bits = typename Blocks::template Bits<KeysLayout, 16 * kScoreKeyTiles>;
    static constexpr int kWarpScoreTiles = kScoreKeyTiles * kScoreQueryTiles;

    // Computes P from S, and stores both tiles. `key`, `row`: the warp's first key and query. Queries from row_end on see no key.
    // `stats`: -lse/scale of the lane's queries in this step. `head`: query head. `masked`: the step needs the causal, window or
    // length mask. `packed`: the lane's shared address in the P^T tile. keys_left: keys that exist, from the lane's first on;
    // others are not stored.
    static __device__ __forceinline__ void generic_probabilities(WarpScores& s, const BwdParams& p, int head, int key, int row,
                                                                 int row_end, const float* stats, bool masked, const Bits& bits,
                                                                 u32 packed, int keys_left) {
        const ScoreOptions& options = p.score_options;
        const Lane lane(remat_thread_index() & 31);
        // Registers cannot be indexed dynamically. So each iteration works on tile 0, and next_tile moves the others down by one.
#pragma unroll 1
        for (int tile = 0; tile < kWarpScoreTiles; tile++) {
            const int m = tile / kScoreQueryTiles, n = tile % kScoreQueryTiles;
            const int tile_key = key + 16 * m, tile_row = row + 16 * n;
            const Coord coord(lane, tile_row, tile_key);
            Accumulator& x = s[0][0];
            PackedTile packed_slopes;
            ExponentAddends<KeysLayout, 1> addends;
            load_rows(addends.of_row, stats + 16 * n * RowStats::kRowFloats);
            addends.scale(p.problem.scale_log2, 0.f);  // from -lse/scale to -lse in log2 units
            if (uses_score_function(options)) {
                Accumulator slopes;
                const ScoreFunction function(p.problem, options);
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = function_score(x[v], addends.of(0, v), function, slopes[v]);
                packed_slopes = pack_tile(slopes);
            } else {
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = fmaf(x[v], p.problem.scale_log2, addends.of(0, v));
            }
            add_position_terms(x, p, head, row_end, coord);  // ALiBi and bias
            if (masked) mask_tile(x, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch())), coord);
            if (bits.any()) bits.hide(x, m, n);
#pragma unroll
            for (int v = 0; v < 8; v++) x[v] = exp2_approx(x[v] + kExponentShift);
            PackedTile with_signs, probabilities = pack_probability_tile(x, with_signs);
            if (uses_dropout(options)) {
                const DroppedKeys<KeysLayout> dropped(philox_of(p, head), DropoutRule(options), coord);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    // A set sign bit marks a dropped probability. sign_masks() widens it to all 16 bits.
                    with_signs.x[i] = probabilities.x[i] | dropped.signs(i);
                    probabilities.x[i] &= ~sign_masks(dropped.signs(i));
                }
            }
            if (uses_score_function(options)) with_signs = with_signs_of(packed_slopes, with_signs);
            store_packed(packed + S::kScoreTile, m, n, with_signs, keys_left);
            store_packed(packed, m, n, probabilities, keys_left);
            next_tile(s);
        }
    }

    // Computes dS from dP - delta (in dp) and from the two tiles that the first role has stored, and stores it to the dS^T tile.
    // Arguments: as above, but `stats` is -delta.
    static __device__ __forceinline__ void generic_score_gradients(WarpScores& dp, const BwdParams& p, int head, int key, int row,
                                                                   const float* stats, u32 packed, int keys_left) {
        const ScoreOptions& options = p.score_options;
        // on tile 0, as in generic_probabilities()
#pragma unroll 1
        for (int tile = 0; tile < kWarpScoreTiles; tile++) {
            const int m = tile / kScoreQueryTiles, n = tile % kScoreQueryTiles;
            Accumulator& x = dp[0][0];
            PackedTile copy = load_packed(packed + S::kScoreTile, m, n), probabilities = copy;
            if (uses_score_function(options)) {
                probabilities = with_signs_of(load_packed(packed, m, n), copy);
                copy = without_signs(copy);  // the function's derivative
            }
            if (uses_dropout(options)) {
                Accumulator neg_delta[1][1];
                load_stats(neg_delta, stats + 16 * n * RowStats::kRowFloats);
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const bool is_dropped = probabilities.x[packed_word(v)] & (v % 2 ? 0x80000000 : 0x8000);
                    x[v] = dropped_gradient(x[v], neg_delta[0][0][v], is_dropped, options.dropout_scale);
                }
            }
            // P is kept times kProbabilityUnit, 2^12 (probabilities.cuh). So dP - delta is divided by it.
#pragma unroll
            for (int v = 0; v < 8; v++) x[v] *= 1.f / kProbabilityUnit;
            multiply_by_probabilities(x, probabilities, !uses_dropout(options));  // without dropout, signs correct P's rounding
            if (kHasBias && p.dbias) {
                const Coord coord(Lane(remat_thread_index() & 31), row + 16 * n, key + 16 * m);
                if (p.dbias_is_fp16)
                    store_bias_gradient(pack_tile(x), p, head, coord);
                else
                    add_bias_gradient(x, p, head, coord);
            }
            if (uses_score_function(options)) multiply(x, copy);
            // Only keys that exist: for others the tile keeps the 0 (cleared by run()) that the next step reads as P.
            store_packed(packed + S::kScoreTile, m, n, pack_tile(x), keys_left);
            next_tile(dp);
        }
    }

    // Begins a step: sets the accumulators, of the second role to -delta, of the first to 0, and loads -lse/scale for the first
    // role's exponents. `stats`: the lane's statistic of the step and role. Kernels with score features load -lse/scale for one
    // tile at a time instead. load_stats<true>: this kernel wrote the statistics, so no load takes the read-only path.
    static __device__ __forceinline__ void begin(WarpScores& s, ExponentAddends<KeysLayout, kScoreQueryTiles>& addends, int role,
                                                 const float* stats) {
        if (role) {
            load_stats<kFused>(s, stats);
        } else {
            clear_tiles(s);
            if (!kHasScoreFeatures) load_rows(addends.of_row, stats);
        }
    }

    // Returns the first row of a listed step; past the last query, that of the last step with statistics: its scores are hidden.
    static __device__ __forceinline__ int existing_row(const BwdParams& p, int row) {
        return min(row, p.seqlen_q_rounded - S::kStep);
    }

    static __device__ __forceinline__ void run(const BwdParams& p, const Blocks& blocks = Blocks(), const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const Lane lane;
        const int warp = threadIdx.x / 32, role = warp / 4;
        // number of the warp's key group in the block; number of the warp among the kGroupWarps of its role that share the group
        const int key_group = warp % 4 / kGroupWarps, group_warp = warp % kGroupWarps;
        const int first_key = blocks.template key_block<S::kRows>(p, grid) * S::kRows;
        // first key of the warp's gradient, and first key and query of its scores, in the block and the step
        const int gradient_key = 32 * key_group;
        const int score_key0 = gradient_key + (kScoreKeyTiles == 1 ? 16 * group_warp : 0);
        const int score_query0 = kScoreQueryTiles * 16 < S::kStep ? 16 * group_warp : 0;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        // rows of K in the tensor, at least seqlen_k(); those from seqlen_k() on get gradients of 0
        if (!kFused && first_key >= sequence.seqlen_k_allocated()) return;
        const Queries range(mask_of(p.problem, sequence), first_key, kFused);

        load_own<S>(p, p.k, p.v, grid.head(p), shared, sequence.k_offset(), first_key, sequence.seqlen_k(), grid);
        const int keys_left = keep_in_register(sequence.seqlen_k() - first_key - score_key0 - score_own(lane, 0, 0));
        if (first_key + S::kRows > sequence.seqlen_k()) clear_shared<2 * S::kScoreTile, S::kThreads>(shared + S::kScores);

        // The lane's shared addresses, which depend on the role: its first product is K Q^T or V dO^T, its second P^T dO or dS^T Q.
        // Pairs: own and step rows of the first; operand A of the second, and where the lane packs P^T and dS^T; operands of dQ;
        // operand B of the second, from panel group_warp on, and where the thread stores the next tiles of Q and dO.
        const u32 scores = shared + S::kScores, own_scores = scores + role * S::kScoreTile;
        const AddressPair score_operands(own_operand<S>(shared + (role ? S::kOwnDp : S::kOwnS), lane, score_key0),
                                         step_operand<S>(shared + (role ? S::kStepDp : S::kStepS), lane, score_query0));
        const AddressPair packed_addresses(score_operand(own_scores, lane, gradient_key),
                                           packed_address(scores, lane, score_key0, score_query0 / 8));
        const AddressPair dq_operands(Dq::a_operand(scores + S::kScoreTile, lane), Dq::b_operand(shared + S::kOwnS, lane, warp));
        const AddressPair query_addresses(column_operand<S>(shared + (role ? S::kStepS : S::kStepDp), lane, group_warp),
                                          shared + S::kStepS + StepTiles<S>::offset());
        const int stats_lane = lane_stats_offset(lane) + score_query0 * RowStats::kRowFloats;
        const int dq_lane = Dq::output_offset(lane, warp);

        Gradient<2, kPanels> gradient = {};  // dV or dK

        const int query_heads = p.problem.nheads / p.problem.nheads_k;  // of a KV head
#pragma unroll 1
        for (int head = grid.head(p) * query_heads; head < (grid.head(p) + 1) * query_heads; head++) {
            const BlockSeqlenInfo head_sequence(p.problem, p.lengths, blockIdx.z);  // `sequence` again: holds none of its registers
            auto queries = blocks.template steps<S::kStep>(p, head, first_key, 0, range.end, p.problem.seqlen_q);
            int first, end;  // `end`: of the queries that this block takes of a stream-K split
            if constexpr (Blocks::kListed) {
                if (!queries.exists()) continue;
                first = existing_row(p, queries.first());
            } else {
                first = kFused ? 0 : Queries::first(mask_of(p.problem, head_sequence), grid.number(p));
                if (first >= range.end) break;
                if constexpr (kStreamK) {
                    end = grid.template clip<S::kStep>(p, head, first, range.end);
                    if (first >= end) continue;
                }
            }
            const auto row_after = [&](int row) {
                if (!Blocks::kListed) return row + S::kStep;
                queries.advance(blocks);
                return existing_row(p, queries.first());
            };
            // Returns the number of rows of Q and dO that loads may touch.
            const auto rows = [&] { return Blocks::kListed ? p.problem.seqlen_q : range.rows(p); };
            const long long head_row = rounded_row(p, head_sequence, grid.batch(p), head);
            float* stats = keep_in_register(p.row_stats + head_row * RowStats::kRowFloats +
                                            (role ? RowStats::kNegDeltaAt : RowStats::kNegLseAt) + stats_lane);
            float* dq = keep_in_register(grid.dq_accum(p) + head_row * S::kHeaddim + dq_lane);

            StepTiles<S> tiles(p, p.q, p.dout, head, head_sequence.q_offset() + (Blocks::kListed ? queries.first() : first), grid);
            Accumulator s[kScoreKeyTiles][kScoreQueryTiles];  // S^T, then P^T; or dP^T, then dS^T
            tiles.load(p.q, p.dout, rows() - (Blocks::kListed ? queries.first() : first));
            if (kFused) {
                write_row_statistics<S::kHeaddim, S::kThreads>(p, head_sequence, head);
                __syncthreads();
            }
            ExponentAddends<KeysLayout, kScoreQueryTiles> addends;
            begin(s, addends, role, stats + first * RowStats::kRowFloats);
            __syncthreads();  // no warp reads the tiles of the head before
            tiles.store(query_addresses.second());
            __syncthreads();

#pragma unroll 1
            for (int row = first; Blocks::kListed ? queries.exists() : row < (kStreamK ? end : range.end); row = row_after(row)) {
                {
                    const u32 a = score_operands.first(), b = score_operands.second();
                    const u32 chunks = kSameHeaddims || !role ? S::kChunks : kChunksV;
#pragma unroll kScoreUnroll
                    for (u32 chunk = 0; chunk < chunks; chunk++) {
                        const Fragments<S, kScoreKeyTiles, kScoreQueryTiles> f(chunk_after<S::kChunks>(a, chunk),
                                                                               chunk_after<S::kChunks>(b, chunk));
                        f.multiply_low(s);
                        f.multiply_high(s);
                    }
                }
                const u32 packed = packed_addresses.second();
                // The first role. A vote, although all lanes agree: it tells the compiler that no warp diverges at the barriers.
                if (__any_sync(~0u, role == 0)) {
                    const bool masked = !range.unmasked.contains(row);
                    Bits bits;
                    bits.load(blocks, queries, first_key + score_key0, score_query0, p.problem.seqlen_q);
                    if (kHasScoreFeatures) {
                        generic_probabilities(s, p, head, first_key + score_key0, row + score_query0, range.end,
                                              stats + row * RowStats::kRowFloats, masked, bits, packed, keys_left);
                    } else {
                        if (masked) apply_mask<KeysLayout>(s, p, Lane(), row + score_query0, first_key + score_key0);
                        if (bits.any())
#pragma unroll
                            for (int m = 0; m < kScoreKeyTiles; m++) bits.hide(s[m], m);
                        addends.scale(p.problem.scale_log2, kExponentShift);
                        exponentials(s, p.problem.scale_log2, addends);
#pragma unroll
                        for (int m = 0; m < kScoreKeyTiles; m++)
#pragma unroll
                            for (int n = 0; n < kScoreQueryTiles; n++) {
                                PackedTile with_signs;
                                store_packed(packed, m, n, pack_probability_tile(s[m][n], with_signs), keys_left);
                                store_packed(packed + S::kScoreTile, m, n, with_signs, keys_left);
                            }
                    }
                    named_sync(kProbabilitiesReady + key_group, 64 * kGroupWarps);
                } else if (kHasScoreFeatures) {
                    named_sync(kProbabilitiesReady + key_group, 64 * kGroupWarps);
                    generic_score_gradients(s, p, head, first_key + score_key0, row + score_query0,
                                            stats + row * RowStats::kRowFloats, packed, keys_left);
                } else {
                    // s is dP - delta here. It is divided by kProbabilityUnit, 2^12, the factor of P (probabilities.cuh).
                    unrolled<kScoreKeyTiles, kScoreQueryTiles, 8>(
                        [&](int m, int n, int v) { s[m][n][v] *= 1.f / kProbabilityUnit; });
                    named_sync(kProbabilitiesReady + key_group, 64 * kGroupWarps);
#pragma unroll
                    for (int m = 0; m < kScoreKeyTiles; m++)
#pragma unroll
                        for (int n = 0; n < kScoreQueryTiles; n++) {
                            const PackedTile probabilities = load_packed(packed + S::kScoreTile, m, n);
                            multiply_by_probabilities(s[m][n], probabilities, true);  // has_residuals
                            // Only keys that exist: for others the tile keeps the 0 that the next step reads as P.
                            store_packed(packed + S::kScoreTile, m, n, pack_tile(s[m][n]), keys_left);
                        }
                }
                if (kGroupWarps == 1)
                    __syncwarp();
                else
                    named_sync(kRoleReady + 2 * role + key_group, 64);

                // Loads of the next tile are in flight from here on. Past the last row nothing is loaded.
                if constexpr (Blocks::kListed) {
                    tiles.skip(p.q, p.dout, queries.after(1) - S::kStep - queries.first());
                    tiles.load(p.q, p.dout, rows() - queries.after(1));
                } else {
                    tiles.load(p.q, p.dout, rows() - S::kStep - row);
                }
                accumulate<S, kGroupWarps, kCompact>(gradient, packed_addresses.first(), query_addresses.first(),
                                                     kSameHeaddims || role ? kPanels : kPanelsV);
                __syncthreads();  // dS^T of all warps is stored, Q and dO are read

                tiles.store(query_addresses.second());
                const int next = Blocks::kListed ? existing_row(p, queries.after(1)) : range.next_step(p, row);
                begin(s, addends, role, stats + next * RowStats::kRowFloats);
                if (kWithDq) {
                    Dq product;
                    product.multiply(dq_operands.first(), dq_operands.second());
                    if constexpr (kFused)
                        product.store(p, head, row, range.end);
                    else
                        product.add_to(dq + row * static_cast<long long>(S::kHeaddim));
                }
                __syncthreads();  // the next tiles are stored, P^T and dS^T are read
            }
        }

        if (!grid.template combine_splits<S::kThreads>(gradient)) return;
        // Keys that no query sees get 0. Q's signs are as given (load_own flips K's under a negative softmax_scale), so dK's factor
        // is signed. P^T has the factor kProbabilityUnit, 2^12, with which small P fit fp16.
        float dv_factor = 1.f / kProbabilityUnit;
        if (uses_dropout(p.score_options)) dv_factor *= p.score_options.dropout_scale;
        const float factor = role ? p.signed_scale : dv_factor;
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, blockIdx.z);
        if (gradients_are_fp32(p)) {
            to_fp32_output<kGroupWarps>(gradient, factor, gradient_key, group_warp, p, role ? p.dk : p.dv, grid.head(p),
                                        end_sequence.k_offset(), first_key, end_sequence.seqlen_k_allocated(),
                                        role ? p.problem.headdim : p.problem.headdim_v, grid);
            return;
        }
        // K and V are no longer needed: their tiles stage dK and dV for the store.
        __syncthreads();
        to_shared<S, kGroupWarps>(gradient, factor, shared + (role ? S::kOwnS : S::kOwnDp), gradient_key, group_warp);
        __syncthreads();
        shared_to_output<S>(p, p.dk, grid.head(p), shared + S::kOwnS, end_sequence.k_offset(), first_key,
                            end_sequence.seqlen_k_allocated(), p.problem.headdim, grid);
        shared_to_output<S>(p, p.dv, grid.head(p), shared + S::kOwnDp, end_sequence.k_offset(), first_key,
                            end_sequence.seqlen_k_allocated(), p.problem.headdim_v, grid);
    }
};

}  // namespace volta
