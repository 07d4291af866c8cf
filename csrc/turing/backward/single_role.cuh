// Main kernel of the turing backward pass for headdim up to 64: dK and dV of a block of 128 keys, fp16 or fp32, from fp16 inputs. 4
// warps with one role, two thread blocks an SM. The grid has blocks of keys (x), KV heads (y) and batch entries (z). A thread block
// visits, for each query head of its KV head, the queries that see its keys, in steps of 16 (headdim 64) or 32 (headdim 32).
//
// A warp has dV and dK of its own 32 keys, and computes both S^T = K Q^T and dP^T = V dO^T, with V in registers and K from shared
// memory. Then P^T = exp(scale * S^T - lse), dS^T = P^T * (dP^T - delta), dV += P^T dO and dK += dS^T Q; delta is rowsum(dO * O).
//
// DqMode says what becomes of dQ += dS K: another kernel computes it (kSeparate), atomics add it, or the block, which then has all
// keys, stores it (kStore, "fused"). Registers leave room for one score feature at most (one_feature.cuh). Plain and varlen kernels
// of headdim 64 with atomics would spill here: they are in single_role_halves.cuh.
//
// A step, after the barrier at which its tiles of Q and dO and the previous step's dS are in shared memory:
//   1. stores the next step's tiles; dQ of the previous step
//   2. S^T, dP^T; loads of the tiles after the next begin
//   3. P^T and dS^T, packed in registers; dS^T to shared memory too
//   4. dV, dK
//
//   S (Shape)         sizes (shape.cuh): kRows own rows (keys), kStep step rows (queries), kChunks chunks of eight columns,
//                     kRowBytes of a row; offsets in shared memory: kOwn (K), kStepTiles (slots of Q and dO, kSlotBytes
//                     each, dO kStepTile after Q), kScores (slots of dS^T); kStepTile, kScoreTile: bytes of one; slot(row): 0 or 1
//   m, n, h, c        16 keys of the warp; 8 queries, a column tile; one of a lane's two keys in tile m; a pair of chunks
//   x, y              numbers of a lane's two queries in tile n, for the same key
//   Accumulator, OperandA  a lane's part of C, 16 rows by 8 columns, as fp32; and of A, 16 rows by 8, as fp16 (turing/mma.cuh)
//   by_rows(), by_chunks()  give lanes' addresses for ldmatrix; pair_after(x, n): the address 2 * n chunks after x (fragments.cuh)
//   score_offset(), score_chunk()  place dS^T: rows are keys, in chunks of eight queries
//   multiply_pair(), accumulate_pair()  add the products of 16 columns to S or dP; add to 16 columns of dV or dK (products.cuh)
//   DqProduct         dQ += dS K of a step. Each warp computes 16 queries by a pair of column tiles (16 columns), over all keys of
//                     the block; add(): to the accumulator, by atomics; store(): as dq (dq_product.cuh)
//   VisitedQueries    first() to `end`: query rows that see the block's keys (fused: all); `unmasked`: steps that need no mask;
//                     rows(): rows that loads may read; next_step(): the next step's row, at the end one that has statistics
//   HeadRows          one query head; origin(): the sequence's first row in the tensors; scratch_offset(): an offset, in floats, of
//                     the head's rows in scratch memory (row statistics, accumulator of dQ)
//   StepStats         -lse/scale and -delta of a step's queries; scale(): -lse in log2 units plus 12, and -delta / 2^12. So P has
//                     the factor 2^12 (kProbabilityUnit), with which small P fit fp16, and dS has none (step_loads.cuh)
//   apply_mask()      sets scores that the mask or the sequence's lengths hide to -inf (backward/score_coord.cuh)
//   InitialScores     what S^T begins with, terms of ALiBi or of a bias (one_feature.cuh)
//   TileDropoutMask   of_key[i]: of the lane's key i of four, 0xffff for each of its two queries that dropout keeps
//   remat_*()         reads special registers again, to hold no register; keep_in_register(x) computes x once (ptx.cuh)
//   kVarlen, kHas..., kGeneric  what this kernel is compiled for (features.cuh); kGeneric: parameters choose the score features
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/probabilities.cuh"
#include "backward/scratch.cuh"  // RowStats; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/tiles.cuh"  // clear_shared(): zeros
#include "turing/backward/one_feature.cuh"
#include "turing/backward/products.cuh"  // products; pack_units(): P to fp16; score_gradient(): dS from P and dP
#include "turing/backward/shape.cuh"  // Shape, HeadRows, load_own_keys(); DqMode: what becomes of dQ
#include "turing/backward/step_loads.cuh"  // StepStats; StepTileLoader: load() of a step's Q and dO, store() to shared memory

namespace turing {

// The kernel; csrc/entry.cu calls run(). BlockRows: keys of a block. Step: queries of a step.
template <int Headdim, int BlockRows, int Step, int Threads, DqMode Mode>
struct BackwardSingleRole {
    // Two slots of Q, dO and dS; no tiles of P^T between warps.
    using S = Shape<Headdim, BlockRows, Step, Threads, 2, 0>;
    static_assert(S::kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static constexpr bool kWithDq = Mode != DqMode::kSeparate, kFused = Mode == DqMode::kStore;
    static_assert(RowStats::kRowRounding % S::kStep == 0, "each step finds statistics of all its queries");
    static_assert(S::kRows == 32 * S::kWarps, "a warp has 32 keys");
    static_assert(!kGeneric, "registers leave room for one feature of scores");
    static constexpr int kPairs = S::kChunks / 2, kColumnTiles = S::kStep / 8;  // numbers of c and n
    using Layout = KeysLayout<2>;  // of 32 keys by 8 queries a lane has four keys, key_of_lane(lane, m, h), of two queries
    using Dq = DqProduct<S>;
    static_assert(Dq::kPairs == 1, "compute_dq has one pair of tiles");

    static __device__ __forceinline__ void run(const BwdParams& p) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int warp = threadIdx.x / 32;
        const int first_key = blockIdx.x * S::kRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        // In k and v the sequence has seqlen_k_allocated() rows, from k_offset() on. Those past seqlen_k() get gradients of 0.
        if (kVarlen && !kFused && first_key >= sequence.seqlen_k_allocated()) return;
        const VisitedQueries<S> range(mask_of(p.problem, sequence), first_key, kFused);

        load_own_keys<S, Layout>(p, shared, sequence.k_offset(), first_key, sequence.seqlen_k());
        OperandA v[2][S::kChunks];
        // 0: a negative softmax_scale flips the signs of K (load_own_keys), not of V
        load_own_fragments(v, p.v, rows_of(p.v, blockIdx.z, blockIdx.y, sequence.k_offset()), first_key + 32 * warp,
                           sequence.seqlen_k(), p.problem.headdim_v, 0, Layout::key_of_lane);

        Accumulator dk[2][S::kChunks] = {}, dv[2][S::kChunks] = {};

        const int group = p.problem.nheads / p.problem.nheads_k;  // query heads that share this block's KV head
        if (kFused) write_all_statistics<S>(p, sequence);
        if (kFused) __syncthreads();  // the statistics are written
#pragma unroll 1
        for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
            const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);  // again: it holds no registers in between
            const int first = kFused ? 0 : VisitedQueries<S>::first(mask_of(p.problem, sequence));
            if (first >= range.end) break;
            const HeadRows rows(p, sequence, head);
            // Computes the warp's part of dQ of the step at `row`, from the dS in this slot. `pair`: 0, its one pair.
            const auto compute_dq = [&](int row, u32 slot, int pair) {
                const u32 thread = remat_thread(), lane = thread % 32, warp = thread / 32;
                if (!Dq::has_pair(warp)) return;
                Accumulator c[1][2];
                Dq::multiply(c, Dq::a_operand(shared + S::kScores + slot * S::kScoreTile, lane, warp),
                             Dq::b_operand(shared + S::kOwn, lane, warp), pair);
                if constexpr (kFused)
                    Dq::store(c, p, rows.head, row, range.end, warp, pair);
                else
                    Dq::add(c, p.dq_accum + rows.scratch_offset(row, S::kHeaddim) + Dq::output_offset(lane, warp), pair);
            };

            StepTileLoader<S> tiles;
            tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + first, range.rows(p) - first);
            StepStats<S> stats;
            stats.load(p, rows, first);
            InitialScores<Layout, kColumnTiles> initial;
            const auto load_bias = [&](int row) {
                if (kHasBias)
                    initial.load_bias(p, rows.head, row, range.end, remat_block_x() * S::kRows + remat_thread() / 32 * 32);
            };
            load_bias(first);
            __syncthreads();  // the previous head's tiles are free
            tiles.store(shared + S::kStepTiles + S::slot(first) * S::kSlotBytes);
            tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + first + S::kStep, range.rows(p) - S::kStep - first);
            // dS of the step before the first: zeros. They add nothing, and dq that kStore stores of them is overwritten later.
            if (kWithDq) clear_shared<S::kScoreTile, S::kThreads>(shared + S::kScores + (S::slot(first) ^ 1) * S::kScoreTile);

#pragma unroll 1
            for (int row = first; row < range.end; row += S::kStep) {
                const u32 slot = S::slot(row);
                __syncthreads();  // this step's tiles and the previous step's dS are stored
                // Here, not at the end of the previous step: ptxas would move the stores up to where the loads are not done.
                tiles.store(shared + S::kStepTiles + S::slot(row + S::kStep) * S::kSlotBytes);
                if (kWithDq) compute_dq(max(row - S::kStep, first), slot ^ 1, 0);
                const u32 tile = slot * S::kSlotBytes;
                Accumulator s[kColumnTiles][2], dp[kColumnTiles][2] = {};
                if (kHasAlibi)
                    initial.alibi(s, p, rows.head, row, remat_block_x() * S::kRows + remat_thread() / 32 * 32);
                else if (kHasBias)
                    initial.bias(s, p);
                else
                    clear_tiles(s);
                {
                    const u32 thread = remat_thread(), lane = thread % 32;
                    // the lane's addresses of K as operand A, and of Q as operand B; dO lies kStepTile after Q
                    const u32 own = by_rows<S>(shared + S::kOwn, lane) + thread / 32 * 32 * S::kRowBytes;
                    const u32 step = by_chunks<S>(shared + S::kStepTiles + tile, lane);
#pragma unroll
                    for (int c = 0; c < kPairs; c++) {
                        OperandA k[2][2], values[2][2];
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            u32 x[4];
                            load_matrices(x, pair_after<S>(own, c) + m * 16 * S::kRowBytes);
#pragma unroll
                            for (int i = 0; i < 4; i++)
                                k[m][i / 2][i % 2] = x[i], values[m][i / 2][i % 2] = v[m][2 * c + i / 2][i % 2];
                        }
                        multiply_pair<S>(s, k, pair_after<S>(step, c));
                        multiply_pair<S>(dp, values, pair_after<S>(step, c) + S::kStepTile);
                    }
                }
                // Begins the loads of the tiles after the next. Past the last row nothing is loaded.
                tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + row + 2 * S::kStep, range.rows(p) - 2 * S::kStep - row);
                if (uses_fp32_bias(p.score_options))
                    initial.add_fp32_bias(s, p, rows.head, row, range.end, remat_block_x() * S::kRows + remat_thread() / 32 * 32);
                if (!range.unmasked.contains(row)) {
                    // Rare: everything is computed again, so that none of it holds a register in the loop.
                    const u32 thread = remat_thread();
                    apply_mask<Layout>(reinterpret_cast<Layout::Tile(&)[1][kColumnTiles]>(s), p, Lane(thread % 32), row,
                                       remat_block_x() * S::kRows + thread / 32 * 32);
                }

                OperandA probabilities[kColumnTiles][2], ds[kColumnTiles][2];
                {
                    const u32 thread = remat_thread(), lane = thread % 32;
                    const Lane layout_lane(lane);
                    // the lane's address in dS^T: row lane / 4 of a tile of keys, word lane % 4 (of two queries) of a chunk
                    const u32 to = shared + S::kScores + slot * S::kScoreTile +
                                   score_offset<S::kScoreChunks>(thread / 32 * 32 + lane / 4, 0) + lane % 4 * 4;
                    stats.scale(p.problem.scale_log2);
                    const ScoreFunction function(p.problem, p.score_options);
#pragma unroll
                    for (int n = 0; n < kColumnTiles; n++) {
                        const float2 neg_lse = stats.neg_lse_of(n, layout_lane), neg_delta = stats.neg_delta_of(n, layout_lane);
                        // Returns P = 2^(score + neg_lse); sets `slope` to the score function's derivative. The function (softcap)
                        // maps a product to a state, from which score and derivative follow.
                        const auto probability = [&](float s, float neg_lse, float& slope) {
                            if (!kHasScoreFunction) return exp2_approx(fmaf(s, p.problem.scale_log2, neg_lse));
                            const float state = function.state(s);
                            slope = ScoreFunction::derivative(state);
                            const float x = exp2_approx(function.score(state, function.constant() + neg_lse));
                            return s == negative_infinity() ? 0.f : x;
                        };
                        TileDropoutMask kept;
                        if constexpr (kHasDropout) {
                            const int key = remat_block_x() * S::kRows + thread / 32 * 32;
                            kept.draw(Layout(), p, philox_of(p, rows.head), row + 8 * n, key);
                        }
#pragma unroll
                        for (int m = 0; m < 2; m++)
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                float x_slope = 1.f, y_slope = 1.f;
                                const float x = probability(s[n][m][2 * h], neg_lse.x, x_slope);
                                const float y = probability(s[n][m][2 * h + 1], neg_lse.y, y_slope);
                                probabilities[n][m][h] = pack_units(x, y);
                                float &x_dp = dp[n][m][2 * h], &y_dp = dp[n][m][2 * h + 1];
                                if (kHasDropout) {
                                    const u32 halves = kept.of_key[2 * m + h];
                                    probabilities[n][m][h] &= halves;
                                    x_dp = halves & 0xffff ? x_dp * p.score_options.dropout_scale : 0.f;
                                    y_dp = halves >> 16 ? y_dp * p.score_options.dropout_scale : 0.f;
                                }
                                ds[n][m][h] = to_half2(score_gradient(x, x_dp, neg_delta.x) * x_slope,
                                                       score_gradient(y, y_dp, neg_delta.y) * y_slope);
                                if (kWithDq) store_shared1(score_chunk(to, n) + (16 * m + 8 * h) * S::kScoreRowBytes, ds[n][m][h]);
                            }
                    }
                }
                if (kHasBias && p.dbias) {
#pragma unroll
                    for (int n = 0; n < kColumnTiles; n++) {
                        Layout::Tile gradient;
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float2 both = to_float2(ds[n][i / 2][i % 2]);
                            gradient[2 * i] = both.x, gradient[2 * i + 1] = both.y;
                        }
                        const u32 thread = remat_thread();
                        add_bias_gradient(
                            gradient, p, rows.head,
                            ScoreCoord<Layout>(Lane(thread % 32), row + 8 * n, remat_block_x() * S::kRows + thread / 32 * 32));
                    }
                }
                stats.load(p, rows, range.next_step(p, row));
                {
                    const u32 step = by_rows<S>(shared + S::kStepTiles + tile, remat_thread() % 32);
#pragma unroll
                    for (int c = 0; c < kPairs; c++) {
                        // the next step's; not before this loop, where too many registers are in use
                        if (c == 1) load_bias(range.next_step(p, row));
                        accumulate_pair<S>(dv, probabilities, pair_after<S>(step, c) + S::kStepTile, c);
                        accumulate_pair<S>(dk, ds, pair_after<S>(step, c), c);
                    }
                }
            }
            if (kWithDq) {
                __syncthreads();
                const int last = keep_in_register(range.end) - 1;
                compute_dq(last & -S::kStep, S::slot(last), 0);  // of the last step, from its first row on
            }
        }

        // Keys that no query sees get 0. A negative softmax_scale flipped the signs of K but not of Q, so the factor has its sign.
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
        const int key = remat_block_x() * S::kRows + remat_thread() / 32 * 32;
        write_gradient(dk, p, p.dk, rows_of(p.dk, remat_block_batch(), remat_block_y(), end_sequence.k_offset()), p.signed_scale,
                       key, end_sequence.seqlen_k_allocated(), p.problem.headdim, Layout::key_of_lane);
        // P^T has the factor kProbabilityUnit
        const float dv_factor = (kHasDropout ? p.score_options.dropout_scale : 1.f) / kProbabilityUnit;
        write_gradient(dv, p, p.dv, rows_of(p.dv, remat_block_batch(), remat_block_y(), end_sequence.k_offset()), dv_factor, key,
                       end_sequence.seqlen_k_allocated(), p.problem.headdim_v, Layout::key_of_lane);
    }
};

}  // namespace turing
