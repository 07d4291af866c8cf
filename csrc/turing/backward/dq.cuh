// dQ kernel of the turing backward pass, up to headdim 128 (dq_warp_specialized.cuh: above): for calls whose main kernel computes
// dK and dV only, without atomics (DqMode::kSeparate). A block owns queries and visits the keys that they see, a step at a time:
//
//   S = Q K^T      P = exp(scale * S - lse)      dP = dO V^T      dS = P * (dP - delta)      dQ += dS K
//
// scale is |softmax_scale|, lse softmax_lse, delta rowsum(dO * O). Inputs are fp16, dq fp16 or fp32. Both kernels compute S and dP,
// and dQ is a sum in a fixed order: deterministic. A warp has Q, dO and dQ of its queries in registers. Accumulators of S have the
// layout of operand A, so dS needs no shared memory, which has two tiles of K and of V. csrc/entry.cu calls run().
//
//   S:: (Shape)       sizes (shape.cuh), not scores: kStep step rows (keys), kChunks chunks of eight columns, kRowBytes of a row,
//                     kSlotBytes of a slot (K, and kStepTile after it V); slot(key): that of the step at `key`, 0 or 1
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
//                     has_bits() whether bits hide some of its scores, number_modulo<2>() the step's number modulo 2
//   bits              those bits (block_mask.cuh): load(..., n) loads those of the step n later; combine() adds the other masks;
//                     hide<N>(m, column, tile) sets hidden scores of N tiles to -inf, from `column` of the step on
//   remat_*()         reads special registers again, to hold no register in between (ptx.cuh)
//   kVarlen, kHasScoreFeatures  what this kernel is compiled for (features.cuh); parameters choose among the score features
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/dense_blocks.cuh"  // DenseBlocks: all keys of a range
#include "backward/modifiers.cuh"  // score features: add_position_terms(), draw_kept_tile(); mask_tile(): -inf where masked
#include "backward/probabilities.cuh"
#include "turing/backward/products.cuh"  // products, mask_scores(): -inf where masked
#include "turing/backward/shape.cuh"  // Shape; KeyRange; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "turing/backward/step_loads.cuh"  // StepTileLoader: a step's K and V, load() to registers, store() to shared memory

namespace turing {

// The kernel. BlockRows: queries of a block. Step: keys of a step. Blocks: DenseBlocks, or ListedBlocks under a block-sparse mask.
// With kListed, lists name the keys that a block of queries visits, and their bits say which scores exist.
template <int Headdim, int BlockRows, int Step, int Threads, class Blocks = DenseBlocks>
struct BackwardDq {
    // 0: no own rows lie in shared memory; 2 slots of K and V; 0: no tiles of P^T, because dS stays in registers.
    using S = Shape<Headdim, 0, Step, Threads, 2, 0>;
    static_assert(S::kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static constexpr int kWarpRows = BlockRows / S::kWarps, kRowTiles = kWarpRows / 16, kColumnTiles = S::kStep / 8;
    static_assert(kWarpRows % 16 == 0, "a warp has whole tiles of 16 rows");
    static constexpr int kPairs = S::kChunks / 2;  // of chunks, or of column tiles of dQ: 16 columns
    using Layout = QueriesLayout;
    using Scores = Accumulator[kColumnTiles][kRowTiles];
    using PackedScores = OperandA[kColumnTiles][kRowTiles];
    using LaneRows = float[kRowTiles][Layout::kRows];  // a number for each of the lane's queries
    using Bits = typename Blocks::template Bits<Layout, kWarpRows>;

    // Under a causal mask the last queries see the most keys, so they start first.
    static __device__ __forceinline__ int block_row() { return (gridDim.x - 1 - remat_block_x()) * BlockRows; }
    // First row of the warp. Listed blocks pass their own first row, which takes loads to find.
    static __device__ __forceinline__ int remat_warp_row(int first_row) {
        return (Blocks::kListed ? first_row : block_row()) + remat_thread() / 32 * kWarpRows;
    }

    // Returns x, which all lanes agree on. Lists come from memory, so only a vote (kVotes) tells the compiler that the loop is
    // uniform. Without it addresses are not in uniform registers: at headdim 64 that took 9% longer. Kernels with larger headdims
    // or with score features gain nothing.
    static constexpr bool kVotes = !kHasScoreFeatures && Headdim <= 64;
    static __device__ __forceinline__ bool agreed(bool x) { return kVotes ? __any_sync(~0u, x) : x; }
    // Number (0 or 1) of the slot of the step that comes `steps` after the one at `key`.
    template <class Steps>
    static __device__ __forceinline__ u32 slot_after(const Steps& keys, int key, int steps) {
        if constexpr (Blocks::kListed)
            return (keys.template number_modulo<2>() + steps) % 2;
        else
            return S::slot(key + steps * S::kStep);
    }

    // Generic kernels (features chosen by parameters): computes dS from S and dP, in a rolled loop over tiles: unrolled code would
    // not fit the instruction cache. `row`: the warp's first query; `key`: the step's first. neg_lse: log2 units. `masked`: some
    // scores may be hidden.
    static __device__ __forceinline__ void generic_score_gradients(PackedScores& ds, Scores& s, Scores& dp, const BwdParams& p,
                                                                   int row, int key, const LaneRows& neg_lse,
                                                                   const LaneRows& neg_delta, bool masked, const Bits& bits) {
        const ScoreOptions& options = p.score_options;
        const Lane lane = remat_lane();
        // Registers cannot be indexed dynamically. So each iteration works on tile 0, and next_tile moves the others down by one.
        // append_tile does the same for the results, and puts the new one last.
#pragma unroll 1
        for (int tile = 0; tile < kRowTiles * kColumnTiles; tile++) {
            const int n = tile / kRowTiles, m = tile % kRowTiles;
            const ScoreCoord<Layout> coord(lane, row + 16 * m, key + 8 * n);
            const auto of_row = [&](const LaneRows& x, int v) {
                const int r = Layout::row_of(v);
                return m ? x[kRowTiles - 1][r] : x[0][r];  // kRowTiles is 1 or 2: a choice of two needs no index
            };
            Accumulator &x = s[0][0], &dx = dp[0][0];
            // The score function (softcap; parameter 0: none) maps a product to a state, from which score and derivative follow.
            // score(state, y) is the score, in log2 units, less constant(), plus y.
            if (ScoreFunction::parameter(options) > 0.f) {
                const ScoreFunction function(p.problem, options);
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    const float state = function.state(x[v]);
                    x[v] = function.score(state, function.constant() + of_row(neg_lse, v));
                    // Applied to dP - delta. No problem has both a score function and dropout.
                    dx[v] = (dx[v] + of_row(neg_delta, v)) * ScoreFunction::derivative(state);
                }
            } else {
#pragma unroll
                for (int v = 0; v < 4; v++) x[v] = fmaf(x[v], p.problem.scale_log2, of_row(neg_lse, v));
                if (options.rng_state) {  // dropout; kept: a bit for each element that it keeps
                    const u32 kept = draw_kept_tile<Layout>(philox_of(p, remat_block_y()), DropoutRule(options), coord);
#pragma unroll
                    for (int v = 0; v < 4; v++) dx[v] = is_kept<Layout>(kept, v) ? dx[v] * options.dropout_scale : 0.f;
                }
#pragma unroll
                for (int v = 0; v < 4; v++) dx[v] += of_row(neg_delta, v);
            }
            add_position_terms(x, p, remat_block_y(), p.problem.seqlen_q, coord);
            if (masked) {
                if constexpr (Blocks::kListed)
                    bits.template hide<1>(m, 8 * n, [&](int) -> Accumulator& { return x; });
                else
                    mask_tile(x, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch())), coord);
            }
#pragma unroll
            for (int v = 0; v < 4; v++) dx[v] *= exp2_approx(x[v]);
            const OperandA packed = {to_half2(dx[0], dx[1]), to_half2(dx[2], dx[3])};
            append_tile(ds, packed);
            next_tile(s);
            next_tile(dp);
        }
    }

    static __device__ __forceinline__ void run(const BwdParams& p, const Blocks& blocks = Blocks()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        int first_row;  // of the block's queries; lists have a launch order, longest first
        if constexpr (Blocks::kListed)
            first_row = keep_in_register(blocks.template first_row<BlockRows>(p));
        else
            first_row = block_row();
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        if (kVarlen && first_row >= sequence.seqlen_q()) return;
        const KeyRange<BlockRows, S::kStep> range(mask_of(p.problem, sequence), first_row);
        const int key_head = blockIdx.y / (p.problem.nheads / p.problem.nheads_k);
        // first row of the sequence in k and v: only packed sequences begin after row 0, and they have no block mask
        const int key_origin = kVarlen && !Blocks::kListed ? keep_in_register(sequence.k_offset()) : 0,
                  seqlen_k = sequence.seqlen_k();

        // Loads the warp's queries as operand A; query_of_lane() says which rows a lane has (fragments.cuh). A negative
        // softmax_scale flips the signs of Q (sign_flip), not of dO (0).
        OperandA q[kRowTiles][S::kChunks], dout[kRowTiles][S::kChunks];
        load_own_fragments(q, p.q, rows_of(p.q, blockIdx.z, blockIdx.y, sequence.q_offset()), remat_warp_row(first_row),
                           sequence.seqlen_q(), p.problem.headdim, p.problem.sign_flip, query_of_lane);
        load_own_fragments(dout, p.dout, rows_of(p.dout, blockIdx.z, blockIdx.y, sequence.q_offset()), remat_warp_row(first_row),
                           sequence.seqlen_q(), p.problem.headdim_v, 0, query_of_lane);

        // Row statistics. Memory has -lse / scale; times scale_log2 that is -lse in log2 units. Rows past rounded_rows() are like
        // rows past seqlen_q: P = exp(-inf) = 0.
        LaneRows neg_lse, neg_delta;
#pragma unroll
        for (int m = 0; m < kRowTiles; m++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                const int row = remat_warp_row(first_row) + 16 * m + Layout::first_query(remat_lane()) + Layout::row_slot(r);
                const long long head_row = rounded_row(p, sequence, blockIdx.z, blockIdx.y);
                const float* stats = p.row_stats + head_row * RowStats::kRowFloats + RowStats::offset(row);
                const bool exists = row < rounded_rows(p, sequence);
                neg_lse[m][r] = exists ? stats[RowStats::kNegLseAt] * p.problem.scale_log2 : negative_infinity();
                neg_delta[m][r] = exists ? stats[RowStats::kNegDeltaAt] : 0.f;
            }

        Accumulator dq[kRowTiles][S::kChunks];
        clear_tiles(dq);

        StepTileLoader<S> tiles;
        // of the list that has first_row; without lists unused
        auto keys = blocks.template steps<S::kStep>(p, blockIdx.y, first_row, range.first, range.end, seqlen_k);
        Bits bits;
        if constexpr (Blocks::kListed) {
            tiles.load(p, p.k, p.v, key_head, keys.first(), seqlen_k - keys.first());
            bits.load(blocks, keys, remat_warp_row(first_row), 0);
            tiles.store(shared);
            tiles.load(p, p.k, p.v, key_head, keys.after(1), seqlen_k - keys.after(1));
        } else {
            tiles.load(p, p.k, p.v, key_head, key_origin + range.first, seqlen_k - range.first);
            tiles.store(shared + S::slot(range.first) * S::kSlotBytes);
            tiles.load(p, p.k, p.v, key_head, key_origin + range.first + S::kStep, seqlen_k - range.first - S::kStep);
        }

#pragma unroll 1
        for (int next = range.first; Blocks::kListed ? agreed(keys.exists()) : next < range.end;
             next += S::kStep, keys.advance(blocks)) {
            const int key = Blocks::kListed ? keys.first() : next;
            __syncthreads();  // this step's tiles are stored, the other slot is free
            tiles.store(shared + slot_after(keys, key, 1) * S::kSlotBytes);
            const u32 tile = shared + slot_after(keys, key, 0) * S::kSlotBytes;
            Scores s, dp;
            clear_tiles(s);
            clear_tiles(dp);
            {
                // the lane's address of K as operand B of Q K^T; V as that of dO V^T lies kStepTile after it
                const u32 step = keys_by_chunks<S>(tile, remat_thread() % 32);
#pragma unroll
                for (int c = 0; c < kPairs; c++) {
                    OperandA a[kRowTiles][2], b[kRowTiles][2];
#pragma unroll
                    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            a[m][i / 2][i % 2] = q[m][2 * c + i / 2][i % 2], b[m][i / 2][i % 2] = dout[m][2 * c + i / 2][i % 2];
                    multiply_pair<S>(s, a, pair_after<S>(step, c));
                    multiply_pair<S>(dp, b, pair_after<S>(step, c) + S::kStepTile);
                }
            }
            bool masked = !range.unmasked.contains(key);
            if constexpr (Blocks::kListed) {
                masked = agreed(masked | keys.has_bits());
                const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
                if (masked) bits.combine(keys, mask_of(p.problem, sequence), remat_warp_row(first_row));
            }
            PackedScores ds;
            if (kHasScoreFeatures) {
                generic_score_gradients(ds, s, dp, p, remat_warp_row(first_row), key, neg_lse, neg_delta, masked, bits);
            } else {
                if (masked) {
                    if constexpr (Blocks::kListed)
#pragma unroll
                        for (int m = 0; m < kRowTiles; m++)
                            bits.template hide<kColumnTiles>(m, 0, [&](int n) -> Accumulator& { return s[n][m]; });
                    else
                        mask_scores(s, p, remat_warp_row(first_row), key);
                }
#pragma unroll
                for (int m = 0; m < kRowTiles; m++)
#pragma unroll
                    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            const auto gradient = [&](int v) {
                                return exp2_approx(fmaf(s[n][m][v], p.problem.scale_log2, neg_lse[m][r])) *
                                       (dp[n][m][v] + neg_delta[m][r]);
                            };
                            // fp32 until here: dP - delta may be far beyond fp16 where P is small.
                            ds[n][m][r] = to_half2(gradient(2 * r), gradient(2 * r + 1));
                        }
            }
            // Loads of the tile after the next are in flight from here on. Past the last key nothing is loaded.
            if constexpr (Blocks::kListed) {
                tiles.load(p, p.k, p.v, key_head, keys.after(2), seqlen_k - keys.after(2));
                bits.load(blocks, keys, remat_warp_row(first_row), 1);
            } else {
                tiles.load(p, p.k, p.v, key_head, key_origin + key + 2 * S::kStep, seqlen_k - key - 2 * S::kStep);
            }
            {
                const u32 step = keys_by_rows<S>(tile, remat_thread() % 32);
#pragma unroll
                for (int c = 0; c < kPairs; c++) {
                    accumulate_pair<S>(dq, ds, pair_after<S>(step, c), c);
                }
            }
        }

        // Queries that see no key get 0. A negative softmax_scale flipped the signs of Q but not of K, so the factor has its sign.
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
        write_gradient(dq, p, p.dq, rows_of(p.dq, remat_block_batch(), remat_block_y(), end_sequence.q_offset()), p.signed_scale,
                       remat_warp_row(first_row), end_sequence.seqlen_q(), p.problem.headdim, query_of_lane);
    }
};

}  // namespace turing
