// Main kernel of the turing backward pass for headdim 64 without score features: dK and dV of a block of 128 keys, fp16 or fp32,
// and dQ by fp32 atomics, from fp16 inputs. The algorithm is that of single_role.cuh, with steps of 32 queries, not 16. The grid
// has blocks of keys (x), KV heads (y) and batch entries (z). A block visits the queries of its KV head's heads that see its keys.
//
// A warp has 32 keys: S^T = K Q^T, P^T = exp(scale * S^T - lse), dP^T = V dO^T, dS^T = P^T * (dP^T - delta), dV += P^T dO, dK +=
// dS^T Q, where delta is rowsum(dO * O). All warps compute dQ += dS K of the step before. A fragment of K serves 32 queries of S,
// and a fragment of dS two pairs of column tiles (8 columns each) of dQ: a fifth fewer loads from shared memory, which bound the
// kernel with 16 queries. P, dP and dS of 32 queries would take too many registers. So each half of a step, 16 queries, goes from
// dP through dV and dK alone. Shared memory has K, and one tile of Q, dO and dS: 32 KB, so two blocks fit an SM. V is in registers.
//
// A step has two barriers, because there is one tile of each:
//   1. barrier; stores its Q and dO; dQ of the step before, from that step's dS; barrier; S^T
//   2. each half: dP^T; P^T, dS^T in registers, dS^T to shared memory too; dV, dK. The second half begins the next step's loads
//
//   S (Shape)         sizes (shape.cuh): kRows own rows (keys), kStep step rows (queries), kChunks chunks of eight columns,
//                     kRowBytes of a row; offsets in shared memory: kOwn (K), kStepTiles (Q, and dO kStepTile after it),
//                     kScores (dS^T); kStepTile, kScoreTile: bytes of a tile
//   m, n, h, c        16 keys of the warp; 8 queries, a column tile; one of a lane's two keys in tile m; a pair of chunks
//   Accumulator, OperandA  a lane's part of C, 16 rows by 8 columns, as fp32; and of A, 16 rows by 8, as fp16 (turing/mma.cuh)
//   by_rows(), by_chunks()  give lanes' addresses for ldmatrix; pair_after(x, n): the address 2 * n chunks after x (fragments.cuh)
//   score_offset(), score_chunk()  place dS^T: rows are keys, in chunks of eight queries
//   multiply_pair(), accumulate_pair()  add the products of 16 columns to S or dP; add to 16 columns of dV or dK (products.cuh)
//   DqProduct         dQ += dS K of a step: a warp has 16 queries by Dq::kPairs (2) pairs of column tiles; add(): by atomics
//   VisitedQueries    first() to `end`: query rows that see the block's keys; `unmasked`: steps that need no mask; rows(): rows
//                     that loads may read; next_step(): the next step's row, at the end one that has statistics
//   HeadRows          one query head; origin(): the sequence's first row in the tensors; scratch_offset(): an offset, in floats, of
//                     the head's rows in scratch memory (row statistics, accumulator of dQ)
//   StepStats         -lse/scale and -delta of a step's queries; scale(): -lse in log2 units plus 12, and -delta / 2^12. So P has
//                     the factor 2^12 (kProbabilityUnit), with which small P fit fp16, and dS has none (step_loads.cuh)
//   remat_*()         reads special registers again, to hold no register; keep_in_register(x) computes x once (ptx.cuh)
//   kVarlen           this kernel reads sequence lengths from memory (features.cuh)
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/probabilities.cuh"
#include "backward/scratch.cuh"  // RowStats (kRowRounding: 32, to which their rows are rounded up); BlockSeqlenInfo: lengths
#include "backward/tiles.cuh"  // clear_shared(): zeros
#include "turing/backward/products.cuh"  // products; pack_units(), score_gradient(): P to fp16; dS from P and dP
#include "turing/backward/shape.cuh"  // Shape, HeadRows, load_own_keys()
#include "turing/backward/step_loads.cuh"  // StepStats; StepTileLoader: load() of a step's Q and dO, store() to shared memory

namespace turing {

// The kernel; csrc/entry.cu calls run(). BlockRows: keys of a block. Step: queries of a step.
template <int Headdim, int BlockRows, int Step, int Threads>
struct BackwardSingleRoleHalves {
    // One slot of Q, dO and dS; no tiles of P^T between warps.
    using S = Shape<Headdim, BlockRows, Step, Threads, 1, 0>;
    static_assert(S::kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static_assert(RowStats::kRowRounding % S::kStep == 0, "each step finds statistics of all its queries");
    static_assert(S::kRows == 32 * S::kWarps && S::kStep == 32, "a warp has 32 keys, a half 16 queries");
    static_assert(!kHasScoreFeatures, "registers leave no room for features of scores");
    // pairs of chunks; column tiles of a step, and of a half
    static constexpr int kPairs = S::kChunks / 2, kColumnTiles = S::kStep / 8, kHalfTiles = kColumnTiles / 2;
    using Layout = KeysLayout<2>;  // of 32 keys by 8 queries a lane has four keys, key_of_lane(lane, m, h), of two queries
    using Dq = DqProduct<S>;
    // kAllPairs: of dQ's rows; kColumnWarps: warps that share them
    static_assert(Dq::kAllPairs % Dq::kColumnWarps == 0, "each warp has Dq::kPairs pairs");

    static __device__ __forceinline__ void run(const BwdParams& p) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const int warp = threadIdx.x / 32;
        const int first_key = blockIdx.x * S::kRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        // In k and v the sequence has seqlen_k_allocated() rows, from k_offset() on. Those past seqlen_k() get gradients of 0.
        if (kVarlen && first_key >= sequence.seqlen_k_allocated()) return;
        const VisitedQueries<S> range(mask_of(p.problem, sequence), first_key);

        load_own_keys<S, Layout>(p, shared, sequence.k_offset(), first_key, sequence.seqlen_k());
        OperandA v[2][S::kChunks];
        // 0: a negative softmax_scale flips the signs of K (load_own_keys), not of V
        load_own_fragments(v, p.v, rows_of(p.v, blockIdx.z, blockIdx.y, sequence.k_offset()), first_key + 32 * warp,
                           sequence.seqlen_k(), p.problem.headdim_v, 0, Layout::key_of_lane);

        Accumulator dk[2][S::kChunks] = {}, dv[2][S::kChunks] = {};

        const int group = p.problem.nheads / p.problem.nheads_k;  // query heads that share this block's KV head
#pragma unroll 1
        for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
            const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);  // again: it holds no registers in between
            const int first = VisitedQueries<S>::first(mask_of(p.problem, sequence));
            if (first >= range.end) break;
            const HeadRows rows(p, sequence, head);
            // Adds dQ of the step at `row`, from the dS in shared memory: all of the warp's pairs, from pair 0 on.
            const auto add_dq = [&](int row) {
                const u32 thread = remat_thread(), lane = thread % 32, warp = thread / 32;
                Accumulator c[Dq::kPairs][2];
                Dq::multiply(c, Dq::a_operand(shared + S::kScores, lane, warp), Dq::b_operand(shared + S::kOwn, lane, warp), 0);
                Dq::add(c, p.dq_accum + rows.scratch_offset(row, S::kHeaddim) + Dq::output_offset(lane, warp), 0);
            };

            StepTileLoader<S> tiles;
            tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + first, range.rows(p) - first);
            StepStats<S> stats;
            stats.load(p, rows, first);
            // dS of the step before the first: zeros, which add nothing.
            clear_shared<S::kScoreTile, S::kThreads>(shared + S::kScores);

#pragma unroll 1
            for (int row = first; row < range.end; row += S::kStep) {
                __syncthreads();  // the previous step's dS is stored, and its tiles are free
                tiles.store(shared + S::kStepTiles);
                add_dq(max(row - S::kStep, first));
                __syncthreads();  // this step's tiles are stored, and dS is free
                Accumulator s[kColumnTiles][2] = {};
                {
                    const u32 thread = remat_thread(), lane = thread % 32;
                    // the lane's addresses of K as operand A, and of Q as operand B
                    const u32 own = by_rows<S>(shared + S::kOwn, lane) + thread / 32 * 32 * S::kRowBytes;
                    const u32 step = by_chunks<S>(shared + S::kStepTiles, lane);
#pragma unroll
                    for (int c = 0; c < kPairs; c++) {
                        OperandA k[2][2];
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            u32 x[4];
                            load_matrices(x, pair_after<S>(own, c) + m * 16 * S::kRowBytes);
#pragma unroll
                            for (int i = 0; i < 4; i++) k[m][i / 2][i % 2] = x[i];
                        }
                        multiply_pair<S>(s, k, pair_after<S>(step, c));
                    }
                }
                if (!range.unmasked.contains(row)) {
                    // Rare: hidden scores become -inf. All is computed again, so that none of it holds a register in the loop.
                    const u32 thread = remat_thread();
                    apply_mask<Layout>(reinterpret_cast<Layout::Tile(&)[1][kColumnTiles]>(s), p, Lane(thread % 32), row,
                                       remat_block_x() * S::kRows + thread / 32 * 32);
                }
                stats.scale(p.problem.scale_log2);

#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 tile = shared + S::kStepTiles + half * 16 * S::kRowBytes;
                    Accumulator dp[kHalfTiles][2] = {};
                    {
                        const u32 step = by_chunks<S>(tile + S::kStepTile, remat_thread() % 32);
#pragma unroll
                        for (int c = 0; c < kPairs; c++) {
                            OperandA values[2][2];
#pragma unroll
                            for (int m = 0; m < 2; m++)
#pragma unroll
                                for (int i = 0; i < 4; i++) values[m][i / 2][i % 2] = v[m][2 * c + i / 2][i % 2];
                            multiply_pair<S>(dp, values, pair_after<S>(step, c));
                        }
                    }
                    OperandA probabilities[kHalfTiles][2], ds[kHalfTiles][2];
                    {
                        const u32 thread = remat_thread(), lane = thread % 32;
                        // the lane's address in dS^T: row lane / 4 of a tile of keys, word lane % 4 (of two queries) of a chunk
                        const u32 to =
                            shared + S::kScores + score_offset<S::kScoreChunks>(thread / 32 * 32 + lane / 4, 0) + lane % 4 * 4;
#pragma unroll
                        for (int j = 0; j < kHalfTiles; j++) {
                            const int n = half * kHalfTiles + j;
                            const float2 neg_lse = stats.neg_lse_of(n, Lane(lane)), neg_delta = stats.neg_delta_of(n, Lane(lane));
#pragma unroll
                            for (int m = 0; m < 2; m++)  // tile of 16 keys
#pragma unroll
                                for (int h = 0; h < 2; h++) {  // key of the lane in it
                                    // x, y: P times kProbabilityUnit, of the lane's two queries in column tile n
                                    const float x = exp2_approx(fmaf(s[n][m][2 * h], p.problem.scale_log2, neg_lse.x));
                                    const float y = exp2_approx(fmaf(s[n][m][2 * h + 1], p.problem.scale_log2, neg_lse.y));
                                    probabilities[j][m][h] = pack_units(x, y);
                                    ds[j][m][h] = to_half2(score_gradient(x, dp[j][m][2 * h], neg_delta.x),
                                                           score_gradient(y, dp[j][m][2 * h + 1], neg_delta.y));
                                    store_shared1(score_chunk(to, n) + (16 * m + 8 * h) * S::kScoreRowBytes, ds[j][m][h]);
                                }
                        }
                    }
                    if (half == 1) {
                        // Begins the next step's loads here, where S is dead and registers are free. Past the last row nothing is
                        // loaded. Reading the batch entry again stops ptxas from keeping addresses, which it would spill.
                        tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + row + S::kStep, range.rows(p) - S::kStep - row,
                                   remat_block_batch());
                        stats.load(p, rows, range.next_step(p, row));
                    }
                    const u32 step = by_rows<S>(tile, remat_thread() % 32);
                    // The varlen kernel computes all of dV, then all of dK: with both in one loop it spills a register.
#pragma unroll
                    for (int c = 0; c < kPairs; c++) {
                        accumulate_pair<S>(dv, probabilities, pair_after<S>(step, c) + S::kStepTile, c);
                        if (!kVarlen) accumulate_pair<S>(dk, ds, pair_after<S>(step, c), c);
                    }
#pragma unroll
                    for (int c = 0; kVarlen && c < kPairs; c++) accumulate_pair<S>(dk, ds, pair_after<S>(step, c), c);
                }
            }
            __syncthreads();
            const int last = keep_in_register(range.end) - 1;
            add_dq(last & -S::kStep);  // of the last step, from its first row on
            __syncthreads();  // the next head clears dS
        }

        // Keys that no query sees get 0. A negative softmax_scale flipped the signs of K but not of Q, so the factor has its sign.
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
        const int key = remat_block_x() * S::kRows + remat_thread() / 32 * 32;
        write_gradient(dk, p, p.dk, rows_of(p.dk, remat_block_batch(), remat_block_y(), end_sequence.k_offset()), p.signed_scale,
                       key, end_sequence.seqlen_k_allocated(), p.problem.headdim, Layout::key_of_lane);
        // dV has the factor of P^T
        write_gradient(dv, p, p.dv, rows_of(p.dv, remat_block_batch(), remat_block_y(), end_sequence.k_offset()),
                       1.f / kProbabilityUnit, key, end_sequence.seqlen_k_allocated(), p.problem.headdim_v, Layout::key_of_lane);
    }
};

}  // namespace turing
