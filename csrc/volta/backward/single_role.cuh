// Main kernel of the volta backward pass for headdim up to 64. A thread block (4 warps with one role, two blocks an SM) owns 128
// keys and visits the queries that see them, 32 a step: S^T = K Q^T, P = exp(scale * S - lse), dV += P^T dO, dP^T = V dO^T - delta,
// dS = P * dP, dK += dS^T Q, dQ += dS K. It adds dQ, unscaled, to an fp32 accumulator by atomics, or leaves it to dq.cuh, whose
// blocks own queries (Mode, gradient_output.cuh). csrc/entry.cu calls run().
//
// A warp has dV and dK of its own 32 keys. It computes both S^T and dP^T of its keys, so P and dS meet in registers, and use
// one tile of shared memory one after the other. Kernels with score features (softcap, ALiBi, bias, dropout) require exactly one of
// them (joint_scores.cuh). Registers leave no room for generic kernels, which have code for all and test parameters for each.
//
// A step, whose tiles of Q and dO are in shared memory (K and V stay there):
//   1. S^T, dP^T; P^T to shared memory, dS^T packed in registers
//   2. loads of the next tiles from global memory to registers begin; dV
//   3. dS^T to P^T's place; dK; block barrier
//   4. stores the next tiles to shared memory; dQ, by all warps together; block barrier
//
//   S (Shape)         sizes (shape.cuh): kRows own rows (keys), kStep step rows (queries), kChunks chunks of eight columns,
//                     kRowBytes of a row; offsets in shared memory: kOwnS and kOwnDp (K and V), kStepS and kStepDp (Q and dO),
//                     kScores (P^T, then dS^T); kOwnTile, kStepTile, kScoreTile: bytes of a tile
//   m, n, v           a tile of 16 keys of the warp; of 16 queries; a lane's element (0 to 7) of a 16x16 tile
//   KeysLayout        of a tile a lane has four queries of two keys; score_own(lane, m, v): key of element v of tile m, from the
//                     warp's first (fragments.cuh)
//   RowStats          layout of -lse/scale (at kNegLseAt) and -delta (at kNegDeltaAt; delta = rowsum(dO * O)) in global memory:
//                     kRowFloats a query; rounded_row(): the sequence's first row there, of all heads; lengths are rounded up to 32
//   Queries           first() to `end`: query rows that see the block's keys; unmasked: those whose steps need no mask; rows():
//                     rows that loads may read (backward/iteration_range.cuh)
//   chunk_after(x, n) the address n chunks after x in a swizzled row (tile.cuh); AddressPair: two shared addresses in one register
//   remat_*()         computes a value again at its use; keep_in_register(x) computes x once (ptx.cuh)
//   kHas..., kGeneric score features that this kernel is compiled for; whether parameters choose among them (features.cuh)
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/probabilities.cuh"  // exponentials(), ExponentAddends: P = 2^(score - lse); kExponentShift
#include "backward/scratch.cuh"  // RowStats; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/score_coord.cuh"  // apply_mask(): -inf where masked
#include "backward/tiles.cuh"  // load_own(), StepTiles: rows from global to shared memory; shared_to_output(): back
#include "backward/iteration_range.cuh"  // QueryRange
#include "backward/gradient_output.cuh"  // DqMode; gradients_are_fp32(): whether dk and dv are fp32, else fp16
#include "volta/backward/key_block.cuh"  // KeyBlock
#include "volta/backward/dq_product.cuh"
#include "volta/backward/joint_scores.cuh"
#include "volta/backward/products.cuh"  // Fragments, accumulate(): products; to_shared(), to_fp32_output(): dK and dV at the end

namespace volta {

// The kernel. BlockRows: keys of a block. Step: queries of a step. Mode: what becomes of dQ. Grid: which keys (number()), KV head
// and batch entry a block has. KeyBlock: all steps of its keys. StreamKKeyBlock: a split, some of these steps (clip()); the last
// block of the same keys adds up all splits (combine_splits()).
template <int Headdim, int BlockRows, int Step, int Threads, DqMode Mode, class Grid = KeyBlock>
struct BackwardSingleRole {
    using S = Shape<Headdim, BlockRows, Step, Threads, 1>;  // one tile of scores: P^T, then dS^T
    static_assert(S::kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static constexpr bool kWithDq = Mode == DqMode::kAtomicAdd, kStreamK = Grid::kStreamK;
    static_assert(Mode != DqMode::kStore, "storing dQ needs more registers than a thread has");
    static_assert(RowStats::kRowRounding % S::kStep == 0, "each step finds statistics of all its queries");
    static_assert(S::kRows == 32 * S::kWarps && S::kStep == 32, "a warp has 32 keys x 32 queries of the scores");
    static constexpr int kPanels = S::kHeaddim / 32;  // panels of 32 columns of dK, dV; a warp has all: PanelStep <1> in calls
    using Queries = QueryRange<S::kRows, S::kStep>;
    using Dq = DqProduct<S>;  // dQ += dS K of a step: multiply(), then add_to() the accumulator (dq_product.cuh)
    using Joint = JointScores<S>;  // begin(): initial accumulators; run(): score features (joint_scores.cuh)
    static_assert(!kGeneric, "kernels of several features have two roles");

    static __device__ __forceinline__ void run(const BwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        const Lane lane;
        const int warp = threadIdx.x / 32;
        const int first_key = grid.number(p) * S::kRows, warp_key = 32 * warp;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        // seqlen_k_allocated(): rows of K in the tensor, at least seqlen_k(). Those from seqlen_k() on get gradients of 0.
        if (first_key >= sequence.seqlen_k_allocated()) return;
        const Queries range(mask_of(p.problem, sequence), first_key);

        load_own<S>(p, p.k, p.v, grid.head(p), shared, sequence.k_offset(), first_key, sequence.seqlen_k(), grid);
        // Keys that exist from the lane's first on: P^T and dS^T of others stay 0, cleared here.
        const int keys_left = keep_in_register(sequence.seqlen_k() - first_key - warp_key - score_own(lane, 0, 0));
        if (first_key + S::kRows > sequence.seqlen_k()) clear_shared<S::kScoreTile, S::kThreads>(shared + S::kScores);

        // Shared addresses of the lane. Pairs: operands of S^T, own and step rows (those of dP^T are a tile further); operand A of
        // dV and dK, and where the lane packs P^T and dS^T; operands of dQ; operand B of dK (that of dV is a tile further), and
        // where the thread stores the next tiles of Q and dO.
        const AddressPair score_operands(own_operand<S>(shared + S::kOwnS, lane, warp_key),
                                         step_operand<S>(shared + S::kStepS, lane, 0));
        const AddressPair packed_addresses(score_operand(shared + S::kScores, lane, warp_key),
                                           packed_address(shared + S::kScores, lane, warp_key, 0));
        const AddressPair dq_operands(Dq::a_operand(shared + S::kScores, lane), Dq::b_operand(shared + S::kOwnS, lane, warp));
        const AddressPair query_addresses(column_operand<S>(shared + S::kStepS, lane, 0),
                                          shared + S::kStepS + StepTiles<S>::offset());
        // the lane's offsets, in floats, in a step's statistics and in the accumulator of dQ
        const int stats_lane = lane_stats_offset(lane), dq_lane = Dq::output_offset(lane, warp);
        // ALiBi's distance of the lane's first score in a step at query 0
        const int distance = Joint::first_distance(sequence, lane, first_key + warp_key);
        Gradient<2, kPanels> dk = {}, dv = {};

        // Query heads of a KV head. Kernels with a score feature have no register for it across the loop: nheads is hidden from the
        // compiler at each call, so each divides again.
        const auto query_heads = [&] {
            return (kHasScoreFeatures ? keep_in_register(p.problem.nheads) : p.problem.nheads) / p.problem.nheads_k;
        };
#pragma unroll 1
        for (int head = grid.head(p) * query_heads(); head < (grid.head(p) + 1) * query_heads(); head++) {
            const BlockSeqlenInfo head_sequence(p.problem, p.lengths, blockIdx.z);  // `sequence` again: holds none of its registers
            int first = Queries::first(mask_of(p.problem, head_sequence), grid.number(p));
            if (first >= range.end) break;
            int end;  // of the queries that this block takes of a stream-K split
            if constexpr (kStreamK) {
                end = grid.template clip<S::kStep>(p, head, first, range.end);
                if (first >= end) continue;
            }
            const long long head_row = rounded_row(p, head_sequence, grid.batch(p), head);
            float* stats = keep_in_register(p.row_stats + head_row * RowStats::kRowFloats + stats_lane);
            float* dq = keep_in_register(grid.dq_accum(p) + head_row * S::kHeaddim + dq_lane);

            StepTiles<S> tiles(p, p.q, p.dout, head, head_sequence.q_offset() + first, grid);
            Accumulator s[2][2], dp[2][2];
            tiles.load(p.q, p.dout, range.rows(p) - first);
            Joint::begin(s, dp, stats + first * RowStats::kRowFloats);
            __syncthreads();  // no warp reads the tiles of the head before
            tiles.store(query_addresses.second());
            __syncthreads();

#pragma unroll 1
            for (int row = first; row < (kStreamK ? end : range.end); row += S::kStep) {
                // S^T and dP^T (begin() has set -delta), one chunk of headdim after the other. Rolled, for the instruction cache.
                // multiply_low() takes columns 0 to 3 of each chunk of eight, multiply_high() 4 to 7.
                {
                    const u32 a = score_operands.first(), b = score_operands.second();
#pragma unroll 1
                    for (u32 chunk = 0; chunk < S::kChunks; chunk++) {
                        const u32 a_chunk = chunk_after<S::kChunks>(a, chunk), b_chunk = chunk_after<S::kChunks>(b, chunk);
                        const Fragments<S, 2, 2> kq(a_chunk, b_chunk), vo(a_chunk + S::kOwnTile, b_chunk + S::kStepTile);
                        kq.multiply_low(s);
                        vo.multiply_low(dp);
                        kq.multiply_high(s);
                        vo.multiply_high(dp);
                    }
                }
                const u32 packed = packed_addresses.second();
                PackedTile ds[2][2];
                const bool masked = !range.unmasked.contains(row);
                if (kHasScoreFeatures) {
                    Joint::run(s, dp, p, head, row, range.end, stats + row * RowStats::kRowFloats, masked, packed, keys_left,
                               distance);
                    unrolled<2, 2>([&](int m, int n) { ds[m][n] = Joint::gradients(dp[m][n]); });
                } else {
                    if (masked) {
                        // Rare: everything is computed again, so that none of it holds a register in the loop.
                        const int thread = remat_thread_index();
                        apply_mask<KeysLayout>(s, p, Lane(thread % 32), row, grid.number(p) * S::kRows + thread / 32 * 32);
                    }

                    typename Joint::Addends addends;
                    load_rows(addends.of_row, stats + RowStats::kNegLseAt + row * RowStats::kRowFloats);
                    addends.scale(p.problem.scale_log2, kExponentShift);
                    exponentials(s, p.problem.scale_log2, addends);
                    unrolled<2, 2>([&](int m, int n) {
                        // s is P * 2^-100 (kExponentShift): packing multiplies by 2^112, because it shifts fp32 bits to
                        // fp16 (softmax.cuh), and leaves P * 2^12. kExponentUnit (2^100) restores P.
                        store_packed(packed, m, n, pack_probability_tile(s[m][n]), keys_left);
#pragma unroll
                        for (int v = 0; v < 8; v++) dp[m][n][v] *= s[m][n][v] * kExponentUnit;
                        ds[m][n] = pack_tile(dp[m][n]);
                    });
                }
                __syncwarp();  // P^T of the warp's keys is stored

                // Loads of the next tile are in flight from here on. Past the last row nothing is loaded.
                tiles.load(p.q, p.dout, range.rows(p) - S::kStep - row);
                accumulate<S, 1>(dv, packed_addresses.first(), query_addresses.first() + S::kStepTile);
                __syncwarp();  // P^T is read
                unrolled<2, 2>([&](int m, int n) { store_packed(packed, m, n, ds[m][n], keys_left); });
                __syncwarp();  // dS^T is stored
                accumulate<S, 1>(dk, packed_addresses.first(), query_addresses.first());
                __syncthreads();  // dS^T of all warps is stored, Q and dO are read

                tiles.store(query_addresses.second());
                Dq product;
                if (kWithDq) product.multiply(dq_operands.first(), dq_operands.second());
                const int next = range.next_step(p, row);
                Joint::begin(s, dp, stats + next * RowStats::kRowFloats);
                if (kWithDq) product.add_to(dq + row * static_cast<long long>(S::kHeaddim));
                __syncthreads();  // the next tiles are stored, dS^T is read
            }
        }

        if (!grid.template combine_splits<S::kThreads>(dk, dv)) return;
        // Keys that no query sees get 0. first_key and warp_key are computed again, because they held no registers.
        const int end_key = grid.number(p) * S::kRows, end_warp_key = remat_thread_index() / 32 * 32;
        // Q's signs are as given (load_own flips K's under a negative softmax_scale), so dK's factor is signed. P^T has the factor
        // kProbabilityUnit, 2^12, with which small P fit fp16. A warp has all panels: every one (<1>) from number 0 on.
        float dv_factor = 1.f / kProbabilityUnit;
        if (uses_dropout(p.score_options)) dv_factor *= p.score_options.dropout_scale;
        if (gradients_are_fp32(p)) {
            const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
            to_fp32_output<1>(dk, p.signed_scale, end_warp_key, 0, p, p.dk, grid.head(p), end_sequence.k_offset(), end_key,
                              end_sequence.seqlen_k_allocated(), p.problem.headdim, grid);
            __syncwarp();
            to_fp32_output<1>(dv, dv_factor, end_warp_key, 0, p, p.dv, grid.head(p), end_sequence.k_offset(), end_key,
                              end_sequence.seqlen_k_allocated(), p.problem.headdim_v, grid);
            return;
        }
        // K and V are no longer needed: their tiles stage dK and dV for the store.
        __syncthreads();
        to_shared<S, 1>(dk, p.signed_scale, shared + S::kOwnS, end_warp_key, 0);
        to_shared<S, 1>(dv, dv_factor, shared + S::kOwnDp, end_warp_key, 0);
        __syncthreads();
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, blockIdx.z);
        shared_to_output<S>(p, p.dk, grid.head(p), shared + S::kOwnS, end_sequence.k_offset(), end_key,
                            end_sequence.seqlen_k_allocated(), p.problem.headdim, grid);
        shared_to_output<S>(p, p.dv, grid.head(p), shared + S::kOwnDp, end_sequence.k_offset(), end_key,
                            end_sequence.seqlen_k_allocated(), p.problem.headdim_v, grid);
    }
};

}  // namespace volta
