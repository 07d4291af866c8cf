// dQ kernel of the turing backward pass for headdims above 128, where Q and dO of a warp's rows do not both fit its registers
// (dq.cuh: up to 128). It follows a main kernel that computes dK and dV only, without atomics. A block owns queries and visits the
// keys that they see, a step of 16 at a time: S = Q K^T, P = exp(scale * S - lse), dP = dO V^T, dS = P * (dP - delta), dQ += dS K.
// scale is |softmax_scale|, lse softmax_lse, delta rowsum(dO * O). Inputs are fp16, dq fp16 or fp32.
//
// 8 warps in two roles of four. Two partner warps have the same queries. One computes S and P, the other dP and dS; each computes
// half of dQ's columns. P goes to the partner, and dS back, lane by lane through shared memory. dS is used one step later.
// csrc/entry.cu calls run().
//
//   S:: (Shape)       sizes (shape.cuh), not scores: kStep step rows (keys), kChunks chunks of eight columns, kRowBytes of a row,
//                     kSlotBytes of a slot (K, and kStepTile after it V)
//   m, n, h, c        16 queries of the warp; 8 keys; one of a lane's two queries in tile m; a pair of chunks, 16 columns
//   QueriesLayout     of 16 queries by 8 keys a lane has kRows (2) queries r, row_slot(r) after its first_query(), each with two
//                     keys. Element v (0 to 3) is of query row_of(v) (fragments.cuh)
//   Accumulator, OperandA  a lane's part of C, 16 rows by 8 columns, as fp32; and of A, 16 rows by 8, as fp16 (turing/mma.cuh)
//   keys_by_rows(), keys_by_chunks()  give lanes' addresses for ldmatrix; pair_after(x, n): the address 2 * n chunks after x
//   multiply_pair(), accumulate_pair()  add the products of 16 columns to S or dP; add to 16 columns of dQ (products.cuh)
//   RowStats          layout of -lse/scale (at kNegLseAt) and -delta (at kNegDeltaAt) in global memory: kRowFloats a query;
//                     rounded_row(): the sequence's first row there, of all heads; rounded_rows(): the sequence's rows there
//   range             keys that the block's rows see: first (of a step) to `end`; steps in range.unmasked need no mask
//   keys              under a block mask, iterator over listed steps: first() is the step's first key, after(n) that n steps later,
//                     has_bits() whether bits hide some of its scores
//   bits              those bits (block_mask.cuh): load(..., n) loads those of the step n later; combine() adds the other masks;
//                     hide<N>(m, column, tile) sets hidden scores of N tiles to -inf, from `column` of the step on
//   remat_*()         reads special registers again, to hold no register in between (ptx.cuh)
//   kVarlen, kHasScoreFeatures  what this kernel is compiled for (features.cuh); parameters choose among the score features
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/dense_blocks.cuh"  // DenseBlocks: all keys of a range
#include "backward/modifiers.cuh"  // score features: add_position_terms(), draw_kept_tile(); mask_tile(): -inf where masked
#include "backward/residual_signs.cuh"  // with_residual_signs(), from_residual_sign(): which way P was rounded, in its sign
#include "backward/tiles.cuh"  // clear_shared(): zeros
#include "turing/backward/products.cuh"  // products; pack_units(): P to fp16; score_gradient(): dS from P and dP
#include "turing/backward/shape.cuh"  // Shape; KeyRange; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "turing/backward/step_loads.cuh"  // StepTileLoader: a step's K and V, load() to registers, store() to shared memory

namespace turing {

// The kernel. BlockRows: queries of a block. Step: keys of a step. Blocks: DenseBlocks, or ListedBlocks under a block-sparse mask.
// With kListed, lists name the keys that a block of queries visits, and their bits say which scores exist.
template <int Headdim, int BlockRows, int Step, int Threads, class Blocks = DenseBlocks>
struct BackwardDqWarpSpecialized {
    // 0: no own rows lie in shared memory; 3 slots: K and V of the last step (for dQ), this one and the next; 0: Shape has no room
    // for tiles between warps, since the regions below follow its end.
    using S = Shape<Headdim, 0, Step, Threads, 3, 0>;
    static_assert(S::kStep == 16, "a lane exchanges 16 bytes");
    static constexpr int kPartners = S::kWarps / 2;
    static constexpr int kWarpRows = BlockRows / kPartners, kRowTiles = kWarpRows / 16, kColumnTiles = S::kStep / 8;
    static_assert(kWarpRows % 16 == 0, "a warp has whole tiles of 16 rows");
    static constexpr int kPairs = S::kChunks / 2, kOwnPairs = kPairs / 2;  // of chunks: 16 columns
    static_assert(kOwnPairs * 2 == kPairs, "each role has every second pair of column tiles");
    using Layout = QueriesLayout;
    using Scores = Accumulator[kColumnTiles][kRowTiles];
    using PackedScores = OperandA[kColumnTiles][kRowTiles];
    using Bits = typename Blocks::template Bits<Layout, kWarpRows>;

    // Exchange between partners: 16 bytes of each lane and row tile. Three regions of shared memory: P, dS, softcap's derivative.
    static constexpr int kExchangeBytes = 32 * 16, kPartnerBytes = kPartners * kRowTiles * kExchangeBytes;
    static constexpr int kProbabilities = S::kSharedBytes, kGradients = kProbabilities + kPartnerBytes;
    static constexpr int kSlopes = kGradients + kPartnerBytes, kSharedBytes = kSlopes + kPartnerBytes;
    static_assert(kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");

    // Without lists the last rows come first, because they see the most keys under a causal mask. With lists thread blocks take
    // their rows in ascending order.
    static __device__ __forceinline__ int block_row() {
        return (Blocks::kListed ? remat_block_x() : gridDim.x - 1 - remat_block_x()) * BlockRows;
    }
    // Number of the warp in its role; partners have the same.
    static __device__ __forceinline__ int remat_pair() { return remat_thread() / 32 % kPartners; }
    static __device__ __forceinline__ int remat_warp_row() { return block_row() + remat_pair() * kWarpRows; }
    static __device__ __forceinline__ bool is_first_role() { return remat_thread() < S::kThreads / 2; }
    // A barrier of the two partners, 64 threads. (Barrier 0 is __syncthreads().)
    static __device__ __forceinline__ void wait_partner() { named_sync(1 + remat_pair(), 64); }
    // Address of the lane's part of a region.
    static __device__ __forceinline__ u32 exchange(u32 region) {
        return region + remat_pair() * kRowTiles * kExchangeBytes + remat_thread() % 32 * 16;
    }
    static __device__ __forceinline__ void send(u32 to, const PackedScores& x) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++)
            store_shared(to + m * kExchangeBytes, make_uint4(x[0][m][0], x[0][m][1], x[1][m][0], x[1][m][1]));
    }
    static __device__ __forceinline__ void receive(u32 from, PackedScores& x) {
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
            const uint4 r = load_shared(from + m * kExchangeBytes);
            x[0][m][0] = r.x, x[0][m][1] = r.y, x[1][m][0] = r.z, x[1][m][1] = r.w;
        }
    }

    // P is kept times kProbabilityUnit, 2^kProbabilityBits = 2^12, with which small P fit fp16. The second role divides dP - delta
    // by it. LaneRows: a number for each of the lane's rows: in the first role -lse in log2 units plus kProbabilityBits, in the
    // second -delta / kProbabilityUnit.
    using LaneRows = float[kRowTiles][Layout::kRows];
    static __device__ __forceinline__ float of_row(const LaneRows& x, int m, int v) {
        const int r = Layout::row_of(v);
        // A rolled loop's m is no constant: as an index it would put x in local memory. A warp has one or two row tiles.
        return m ? x[kRowTiles - 1][r] : x[0][r];
    }

    // Generic kernels (features chosen by parameters): computes P in a rolled loop, because unrolled code would not fit the
    // instruction cache. Registers have no index, so each iteration takes tile s[0][0] and appends its P to x; next_tile() moves
    // the other scores down by one. P's sign bit, else free, says that P was rounded down, by which the second role corrects it
    // (residual_signs.cuh); with dropout, that P is dropped. The score function's derivative goes to the partner at `slopes`.
    // Position terms are ALiBi and the bias. `row`: the warp's first query. `key`: the step's first. `masked`: it needs the mask.
    static __device__ __forceinline__ void generic_probabilities(PackedScores& x, Scores& s, const LaneRows& neg_lse,
                                                                 const BwdParams& p, int row, int key, bool masked,
                                                                 const Bits& bits, u32 slopes) {
        const ScoreOptions& options = p.score_options;
        const Lane lane = remat_lane();
#pragma unroll 1
        for (int tile = 0; tile < kRowTiles * kColumnTiles; tile++) {
            const int n = tile / kRowTiles, m = tile % kRowTiles;
            const ScoreCoord<Layout> coord(lane, row + 16 * m, key + 8 * n);
            Accumulator& score = s[0][0];
            // The score function (softcap; parameter 0: none) maps a product to a state, from which score and derivative follow.
            // score(state, y) is the score, in log2 units, less constant(), plus y.
            if (ScoreFunction::parameter(options) > 0.f) {
                const ScoreFunction function(p.problem, options);
                float slope[4];
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    const float state = function.state(score[v]);
                    slope[v] = ScoreFunction::derivative(state);
                    score[v] = function.score(state, function.constant() + of_row(neg_lse, m, v));
                }
                store_shared2(slopes + m * kExchangeBytes + n * 8, to_half2(slope[0], slope[1]), to_half2(slope[2], slope[3]));
            } else {
#pragma unroll
                for (int v = 0; v < 4; v++) score[v] = fmaf(score[v], p.problem.scale_log2, of_row(neg_lse, m, v));
            }
            add_position_terms(score, p, remat_block_y(), p.problem.seqlen_q, coord);
            if (masked) {
                if constexpr (Blocks::kListed)
                    bits.template hide<1>(m, 8 * n, [&](int) -> Accumulator& { return score; });
                else
                    mask_tile(score, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch())), coord);
            }
#pragma unroll
            for (int v = 0; v < 4; v++) score[v] = exp2_approx(score[v]);
            OperandA probabilities = {pack_units(score[0], score[1]), pack_units(score[2], score[3])};
            if (options.rng_state) {  // dropout; kept: a bit for each element that it keeps
                const u32 kept = draw_kept_tile<Layout>(philox_of(p, remat_block_y()), DropoutRule(options), coord);
#pragma unroll
                for (int h = 0; h < 2; h++)
                    probabilities[h] |=
                        (is_kept<Layout>(kept, 2 * h) ? 0 : 0x8000) | (is_kept<Layout>(kept, 2 * h + 1) ? 0 : 0x80000000);
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++)
                    probabilities[h] = with_residual_signs(probabilities[h], score[2 * h], score[2 * h + 1]);
            }
            append_tile(x, probabilities);
            next_tile(s);
        }
    }

    // Replaces x, the partner's P, by dS. neg_delta: -delta / kProbabilityUnit. slopes_address: of the score function's
    // derivatives, which the partner stored.
    static __device__ __forceinline__ void score_gradients(PackedScores& x, const Scores& dp, const LaneRows& neg_delta,
                                                           const BwdParams& p, u32 slopes_address) {
        const ScoreOptions& options = p.score_options;
        PackedScores slopes;
        const bool has_slopes = kHasScoreFeatures && ScoreFunction::parameter(options) > 0.f;
        if (has_slopes) receive(slopes_address, slopes);
#pragma unroll
        for (int m = 0; m < kRowTiles; m++)
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float2 probability = to_float2(x[n][m][h]);
                    const auto gradient = [&](float dp, float probability) {
                        const bool drops = kHasScoreFeatures && options.rng_state;
                        if (drops) dp = __float_as_int(probability) < 0 ? 0.f : dp * options.dropout_scale;
                        return score_gradient(from_residual_sign(probability, !drops), dp, neg_delta[m][h]);
                    };
                    float first = gradient(dp[n][m][2 * h], probability.x), second = gradient(dp[n][m][2 * h + 1], probability.y);
                    if (has_slopes) {
                        const float2 slope = to_float2(slopes[n][m][h]);
                        first *= slope.x, second *= slope.y;
                    }
                    x[n][m][h] = to_half2(first, second);
                }
    }

    static __device__ __forceinline__ void run(const BwdParams& p, const Blocks& blocks = Blocks()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int first_row = block_row();
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        if (kVarlen && first_row >= sequence.seqlen_q()) return;
        const KeyRange<BlockRows, S::kStep> range(mask_of(p.problem, sequence), first_row);
        const int key_head = blockIdx.y / (p.problem.nheads / p.problem.nheads_k);
        // first row of the sequence in k and v: only packed sequences begin after row 0, and they have no block mask
        const int key_origin = kVarlen && !Blocks::kListed ? keep_in_register(sequence.k_offset()) : 0,
                  seqlen_k = sequence.seqlen_k();

        OperandA own[kRowTiles][S::kChunks];  // of Q or of dO; query_of_lane() says which rows a lane has (fragments.cuh)
        {
            const Operand& from = is_first_role() ? p.q : p.dout;
            load_own_fragments(own, from, rows_of(from, blockIdx.z, blockIdx.y, sequence.q_offset()), remat_warp_row(),
                               sequence.seqlen_q(), is_first_role() ? p.problem.headdim : p.problem.headdim_v,
                               is_first_role() ? p.problem.sign_flip : 0, query_of_lane);
        }
        // Rows past rounded_rows() are like rows past seqlen_q: P = exp(-inf) = 0.
        LaneRows stats;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                const int row = remat_warp_row() + 16 * m + Layout::first_query(remat_lane()) + Layout::row_slot(r);
                const long long head_row = rounded_row(p, sequence, blockIdx.z, blockIdx.y);
                const float* from = p.row_stats + head_row * RowStats::kRowFloats + RowStats::offset(row);
                const bool exists = row < rounded_rows(p, sequence);
                const float neg_lse = exists ? from[RowStats::kNegLseAt] : negative_infinity();
                const float neg_delta = exists ? from[RowStats::kNegDeltaAt] : 0.f;
                stats[m][r] =
                    is_first_role() ? fmaf(neg_lse, p.problem.scale_log2, kProbabilityBits) : neg_delta * (1.f / kProbabilityUnit);
            }

        Accumulator dq[kRowTiles][2 * kOwnPairs] = {};

        StepTileLoader<S> tiles;
        // of the list that has first_row; without lists unused
        auto keys = blocks.template steps<S::kStep>(p, blockIdx.y, first_row, range.first, range.end, seqlen_k);
        Bits bits;
        if constexpr (Blocks::kListed) {
            tiles.load(p, p.k, p.v, key_head, keys.first(), seqlen_k - keys.first());
            if (is_first_role()) bits.load(blocks, keys, remat_warp_row(), 0);
        } else {
            tiles.load(p, p.k, p.v, key_head, key_origin + range.first, seqlen_k - range.first);
        }
        tiles.store(shared);
        // The first step adds dQ of a step before it: its dS and K are zeros, which add nothing.
        clear_shared<S::kStepTile, S::kThreads>(shared + 2 * S::kSlotBytes);
        clear_shared<kPartnerBytes, S::kThreads>(shared + kGradients);

        u32 this_slot = shared, next_slot = shared + S::kSlotBytes, last_slot = shared + 2 * S::kSlotBytes;
        PackedScores ds;
        const auto add_dq = [&](u32 slot) {
            receive(exchange(shared + kGradients), ds);
            const u32 step = pair_after<S>(keys_by_rows<S>(slot, remat_thread() % 32), is_first_role() ? 0 : 1);
#pragma unroll
            for (int c = 0; c < kOwnPairs; c++) accumulate_pair<S>(dq, ds, pair_after<S>(step, 2 * c), c);
        };
#pragma unroll 1
        for (int next = range.first; Blocks::kListed ? keys.exists() : next < range.end; next += S::kStep, keys.advance(blocks)) {
            const int key = Blocks::kListed ? keys.first() : next;
            __syncthreads();  // this step's tiles and the last step's dS are stored
            add_dq(last_slot);
            Scores s = {};  // S or dP
            {
                const u32 step = keys_by_chunks<S>(this_slot + (is_first_role() ? 0 : S::kStepTile), remat_thread() % 32);
#pragma unroll
                for (int c = 0; c < kPairs; c++) {
                    OperandA a[kRowTiles][2];
#pragma unroll
                    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
                        for (int i = 0; i < 4; i++) a[m][i / 2][i % 2] = own[m][2 * c + i / 2][i % 2];
                    multiply_pair<S>(s, a, pair_after<S>(step, c));
                }
            }
            // Begins the loads of the next tile; each role calls it before it waits for the other. Past the last key nothing is
            // loaded.
            const auto load_next = [&] {
                if constexpr (Blocks::kListed)
                    tiles.load(p, p.k, p.v, key_head, keys.after(1), seqlen_k - keys.after(1));
                else
                    tiles.load(p, p.k, p.v, key_head, key_origin + key + S::kStep, seqlen_k - key - S::kStep);
            };
            PackedScores packed;  // P; in the second role then dS
            // A vote, although all lanes agree: it tells the compiler that no warp diverges at the barriers.
            if (__any_sync(~0u, is_first_role())) {
                bool masked = !range.unmasked.contains(key);
                if constexpr (Blocks::kListed) {
                    masked |= keys.has_bits();
                    const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
                    if (masked) bits.combine(keys, mask_of(p.problem, sequence), remat_warp_row());
                }
                if (kHasScoreFeatures) {
                    generic_probabilities(packed, s, stats, p, remat_warp_row(), key, masked, bits, exchange(shared + kSlopes));
                } else {
                    if (masked) {
                        if constexpr (Blocks::kListed)
#pragma unroll
                            for (int m = 0; m < kRowTiles; m++)
                                bits.template hide<kColumnTiles>(m, 0, [&](int n) -> Accumulator& { return s[n][m]; });
                        else
                            mask_scores(s, p, remat_warp_row(), key);
                    }
#pragma unroll
                    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
                        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                const auto probability_of = [&](int v) {
                                    return exp2_approx(fmaf(s[n][m][v], p.problem.scale_log2, stats[m][h]));
                                };
                                const float x = probability_of(2 * h), y = probability_of(2 * h + 1);
                                packed[n][m][h] = with_residual_signs(pack_units(x, y), x, y);
                            }
                }
                send(exchange(shared + kProbabilities), packed);
                if constexpr (Blocks::kListed) bits.load(blocks, keys, remat_warp_row(), 1);
                load_next();
                wait_partner();
            } else {
                load_next();
                wait_partner();
                receive(exchange(shared + kProbabilities), packed);
                score_gradients(packed, s, stats, p, exchange(shared + kSlopes));
                send(exchange(shared + kGradients), packed);
            }
            tiles.store(next_slot);
            const u32 free_slot = last_slot;
            last_slot = this_slot, this_slot = next_slot, next_slot = free_slot;
        }
        __syncthreads();
        add_dq(last_slot);

        // Queries that see no key get 0. A negative softmax_scale flipped the signs of Q but not of K, so the factor has its sign.
        // <2>: a warp has every second pair of column tiles, from pair 0 or 1 on.
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
        write_gradient<2>(dq, p, p.dq, rows_of(p.dq, remat_block_batch(), remat_block_y(), end_sequence.q_offset()), p.signed_scale,
                          remat_warp_row(), end_sequence.seqlen_q(), p.problem.headdim, query_of_lane, is_first_role() ? 0 : 1);
    }
};

}  // namespace turing
