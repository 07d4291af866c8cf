// Forward kernel of the turing family: Q, scores, probabilities and output in registers.
//
// m16n8k8 takes 8 keys, so a warp works on tiles of 8 keys, on three of them at once, each in another stage:
//
//   tile i + 1: S = Q K^T        tile i: softmax        tile i - 1: O += P V
//
// so that there are always products and arithmetic that do not wait for each other. A step is two tiles. K and V move through a
// ring of slots in shared memory. Step j reads K of steps j and j + 1 and V of j - 1 and j, stores what is kAhead steps ahead and
// loads from global memory what is one step further. With eight slots and kAhead = 3, what a warp reads and writes in two steps
// does not meet what another does there, so every second step needs a barrier; with four and kAhead = 2, every step does.
//
// Most steps need no mask. They have a loop of their own: the test alone costs 3 to 6%.
#pragma once

#include "forward/block.cuh"
#include "turing/forward/carried_alibi.cuh"
#include "turing/forward/layout.cuh"
#include "turing/forward/stream.cuh"

namespace turing {

template <int Headdim, int HeaddimV, int Warps, int RowTiles, int Slots>
struct ForwardPipelined {
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * RowTiles;
    static constexpr int kBlockRows = Warps * kWarpRows;
    static constexpr int kTileKeys = ForwardLayout::kTileKeys;
    static constexpr int kStep = 2 * kTileKeys;
    static constexpr int kChunks = Headdim / kChunk, kChunksV = HeaddimV / kChunk;
    static constexpr int kGroups = kChunks / 4, kGroupsV = kChunksV / 4;  // of four chunks, which one instruction loads
    static constexpr int kMostGroups = kGroups > kGroupsV ? kGroups : kGroupsV;
    static constexpr int kPitch = kChunks * kChunkBytes, kPitchV = kChunksV * kChunkBytes;
    static constexpr u32 kTileBytes = kTileKeys * kPitch, kTileBytesV = kTileKeys * kPitchV;
    static constexpr u32 kOffsetV = kStep * kPitch, kSlotBytes = kStep * (kPitch + kPitchV);
    static constexpr u32 kSharedBytes = Slots * kSlotBytes;
    // Kernels of one feature carry along the keys what belongs to it: of ALiBi a
    // distance, of a bias what the same half of the next step needs, of dropout what the numbers of a head have in common.
    static constexpr bool kCarriedAlibi = kOneFeature && kHasAlibi;
    static constexpr bool kCarriedBias = kOneFeature && kHasBias;
    static constexpr bool kCarriedDropout = kOneFeature && kHasDropout;
    // With ALiBi scores mostly rise towards the last key, and references with them: so the last keys come first.
    static constexpr bool kBackwards = kCarriedAlibi;
    static constexpr int kWalk = kBackwards ? -kStep : kStep;
    static constexpr bool kEverySecond = Slots == 8;  // step has a barrier
    static constexpr int kAhead = kEverySecond ? 3 : 2;
    static_assert(Slots == 4 || Slots == 8, "see above");
    static_assert(kSlotBytes % 128 == 0, "at_group");

    using StreamK = RowStream<kChunks, kStep, kThreads>;
    using StreamV = RowStream<kChunksV, kStep, kThreads>;
    // A thread moves one chunk of K and of V in each of these, the first in the middle of a step and the second at its end.
    static constexpr int kPasses = StreamK::kPasses > StreamV::kPasses ? StreamK::kPasses : StreamV::kPasses;
    static_assert(kPasses <= 2, "a step has two halves");
    using Block = ForwardBlock<kBlockRows, ForwardLayout::kEitherOrder>;
    using Tile = Scores<ForwardLayout, RowTiles, 1>;
    using Softmax = SoftmaxRows<ForwardLayout, RowTiles>;
    using Probabilities = OperandA[RowTiles];  // of the 8 keys of a tile
    using Output = Accumulator[RowTiles][kChunksV];

    // What a lane holds of Q and of the output. Near the limit of 255 registers ptxas has to be helped: each of these was found by
    // trying until nothing spilled.
    static constexpr int kHeld = RowTiles * (2 * kChunks + 4 * kChunksV);
    static constexpr bool kFull = kHeld >= 192;
    static constexpr bool kFragmentsAhead = !kFull || (RowTiles == 1 && !kGeneral);  // else a group is loaded when it is used
    static constexpr bool kPlacesKept =
        !(kFull && RowTiles == 1 && kRagged && !kGeneral);  // else a thread's chunks are derived each time
    static constexpr bool kMaskKept = !(kFull && RowTiles == 1 && kRagged);  // else it is derived in each masked tile
    static constexpr bool kUnmaskedLoop = !(kFull && kGeneral);  // else every step is masked

    // From the address of a chunk of group 0 to that of group c in the same row.
    template <int Chunks>
    __device__ __forceinline__ static u32 at_group(u32 address, int c) {
        if (Chunks % 8 != 0) return address + c * 4 * kChunkBytes;
        return (address ^ c % 2 * 4 * kChunkBytes) + c / 2 * 8 * kChunkBytes;
    }
    // The slot `steps` further, as its bytes from slot 0.
    __device__ __forceinline__ static u32 slot_after(u32 slot, int steps) {
        if ((kSharedBytes & (kSharedBytes - 1)) == 0) return slot + steps * kSlotBytes & kSharedBytes - 1;
        const u32 after = slot + (steps + Slots) % Slots * kSlotBytes;
        return after >= kSharedBytes ? after - kSharedBytes : after;
    }

    // What the products of one tile need of K and V, one group of chunks ahead of them.
    struct Fragments {
        u32 k[4], v[4];
        __device__ __forceinline__ void load_k(u32 address, int c) { load_matrices(k, at_group<kChunks>(address, c)); }
        __device__ __forceinline__ void load_v(u32 address, int c) { load_matrices_transposed(v, at_group<kChunksV>(address, c)); }
    };

    __device__ __forceinline__ static int warp_row_here(const FwdParams& p) {
        return Block::row_here(p.problem) + thread_index_here() / 32 * kWarpRows;
    }
    __device__ __forceinline__ static Mask mask_here(const FwdParams& p) {
        return mask_of(p.problem, BlockSequence(p.problem, p.lengths, block_batch_here()));
    }

    __device__ __forceinline__ static void move_references(const Tile& s, Softmax& softmax, float scale, Output& o,
                                                           Probabilities& p_last) {
        // 1 / scale again, so that it holds no register in between
        const float inverse_scale = kGeneral ? 1.f : __fdividef(1.f, __int_as_float(pinned(__float_as_int(scale))));
        const auto rescale = rescale_output<ForwardLayout>(o);
        s.template move_references<MovedRows::kExceeding>(softmax, scale, inverse_scale, [&](int mt, int r, float factor) {
            rescale(mt, r, factor);
            multiply_halves(p_last[mt][r], factor);
        });
    }

    __device__ __forceinline__ static void run(const FwdParams& p) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 ring = shared_address(shared);
        const Problem& problem = p.problem;
        const Block block(problem);
        const BlockSequence sequence(problem, p.lengths, block.batch);
        if (kRagged && block.row >= sequence.seqlen_q()) return;
        const Mask mask = mask_of(problem, sequence);
        const int thread = threadIdx.x, lane = thread & 31;
        const int row = block.row + thread / 32 * kWarpRows;
        int key_first = mask.key_first(block.row);
        if (kGeneral) key_first &= ~3;  // bias and random numbers come in groups of 4 keys
        const int key_end = mask.key_end(block.row, kBlockRows);
        int key = kBackwards ? key_first + (key_end - 1 - key_first) / kStep * kStep : key_first;

        Softmax softmax;
        Output o;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kChunksV; j++)
#pragma unroll
                for (int w = 0; w < ForwardLayout::kElements; w++) o[mt][j][w] = 0.f;
        if (key_first < key_end) {
            OperandA q[RowTiles][kChunks];
            load_queries(q, p.q, rows_of(p.q, block.batch, block.head, sequence.first_q()), row, sequence.seqlen_q(),
                         problem.headdim, problem.sign_flip);

            const unsigned k_stride = p.k.row_stride, v_stride = p.v.row_stride;
            // Where not all threads take part, the first do for K, the last for V.
            const int thread_v = StreamV::kAllTakePart ? thread : kThreads - 32 - (thread & ~31) + lane;
            const StreamK k(thread, rows_of(p.k, block.batch, block.head_k, sequence.first_k()), problem.headdim);
            const StreamV v(thread_v, rows_of(p.v, block.batch, block.head_k, sequence.first_k()), problem.headdim_v);
            uint4 k_data = zero_chunk(), v_data = zero_chunk();  // columns of K beyond the matrix are never loaded and stay zero
            const u32 k_store = pinned(ring + StreamK::offset(thread));
            const u32 v_store = kChunks == kChunksV && StreamV::kAllTakePart ? k_store + kOffsetV
                                                                             : pinned(ring + kOffsetV + StreamV::offset(thread_v));
            const u32 k_fragment = pinned(ring + swizzled<kChunks>(lane % 8, lane / 8));
            const u32 v_fragment =
                kChunks == kChunksV ? k_fragment + kOffsetV : pinned(ring + kOffsetV + swizzled<kChunksV>(lane % 8, lane / 8));
            const int k_row = pinned(StreamK::row_of(thread));
            const int v_row = kChunks == kChunksV && StreamV::kAllTakePart ? k_row : pinned(StreamV::row_of(thread_v));
            // (Backwards, what is loaded ahead may lie before the first row.)
            const auto bounded = [](int first_key) { return kBackwards ? max(first_key, 0) : first_key; };
            const auto load = [&](int pass, int first_key) {
                if (pass < StreamK::kPasses)
                    k.template load<true>(k_data, pass, k_stride,
                                          bounded(first_key) + (kPlacesKept ? k_row : StreamK::row_of(thread_index_here())),
                                          key_end - 1);
                if (pass < StreamV::kPasses)
                    v.template load<false>(v_data, pass, v_stride,
                                           bounded(first_key) + (kPlacesKept ? v_row : StreamV::row_of(thread_index_here())),
                                           key_end - 1);
            };
            const auto store = [&](int pass, u32 slot) {
                const u32 k_to = kPlacesKept ? k_store : ring + StreamK::offset(thread_index_here());
                if (pass < StreamK::kPasses) k.store(k_data, pass, k_to + slot);
                const u32 v_to = kPlacesKept ? v_store : ring + kOffsetV + StreamV::offset(thread_index_here());
                if (pass < StreamV::kPasses) v.store(v_data, pass, v_to + slot);
            };

            // Modified scores are in units of log2 already.
            const float scale = kGeneral ? 1.f : problem.scale_log2;
            Probabilities probabilities[2] = {};
            CarriedAlibi<RowTiles> alibi;
            if (kCarriedAlibi) alibi.start(p, mask, row, key);
            ScoreBias<ForwardLayout, RowTiles, 1> bias[2];
            const Bias bias_source = bias[0].source(p);
            if (kCarriedBias) {
                bias[0].load(p, bias_source, row, key);
                bias[1].load(p, bias_source, row, key + kTileKeys);
            }
            const Philox philox = kCarriedDropout ? KeptProbabilities<ForwardLayout, RowTiles>::numbers_of(p) : Philox();

#pragma unroll
            for (int pass = 0; pass < StreamV::kPasses; pass++)
                v.store(v_data, pass, v_store + slot_after(0, -1));  // 0 * NaN would not be 0
#pragma unroll
            for (int i = 0; i < kAhead * kPasses; i++) {
                load(i % kPasses, key + i / kPasses * kWalk);
                store(i % kPasses, i / kPasses * kSlotBytes);
            }
            load(0, key + kAhead * kWalk);
            __syncthreads();

            // Scores of even and of odd tiles.
            Tile scores[2];
            scores[0].clear();
            Fragments fragments;
#pragma unroll
            for (int c = 0; c < kGroups; c++) {
                fragments.load_k(k_fragment, c);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma(scores[0].tile[mt][0], q[mt][4 * c + i], fragments.k[i]);
            }

            // One tile: its scores s become probabilities p_this, beside the scores of the next tile, s_next, and the output of the
            // last, p_last times its V. K of the next and V of the last tile lie at k_address and v_address; those that the next
            // call begins with, at k_ahead and v_ahead. `half`: the step's first or second.
            const auto tile = [&](bool may_mask, const Mask& mask, Tile& s, Tile& s_next, Probabilities& p_last,
                                  Probabilities& p_this, u32 k_address, u32 v_address, u32 k_ahead, u32 v_ahead, int first_key,
                                  int half) {
                KeptProbabilities<ForwardLayout, RowTiles> kept;
                if (kCarriedAlibi) {
                    alibi.add_to(s, problem.scale_log2);
                } else if (kGeneral) {
                    s.modify(p, mask, warp_row_here(p), first_key);
                    if (kHasBias && p.score_options.bias) {
                        if (!kCarriedBias) bias[half].load(p, warp_row_here(p), first_key);
                        bias[half].add_to(s, p.score_options);
                        if (kCarriedBias) bias[half].load(p, bias_source, warp_row_here(p), first_key + kStep);
                    }
                    if (kCarriedDropout)
                        kept.draw(p, philox, warp_row_here(p), first_key);
                    else if (kHasDropout && p.score_options.rng_state)
                        kept.draw(p, warp_row_here(p), first_key);
                }
                if (may_mask) s.apply(kMaskKept ? mask : mask_here(p), warp_row_here(p), first_key);
                if (s.exceed_limit(softmax)) move_references(s, softmax, scale, o, p_last);
                s_next.clear();
#pragma unroll
                for (int c = 0; c < kMostGroups; c++) {
                    if (!kFragmentsAhead) {
                        if (c < kGroups) fragments.load_k(k_address, c);
                        if (c < kGroupsV) fragments.load_v(v_address, c);
                    }
                    const Fragments now = fragments;
                    if (kFragmentsAhead) {
                        if (c + 1 < kGroups) fragments.load_k(k_address, c + 1);
                        if (c + 1 == kMostGroups) fragments.load_k(k_ahead, 0);
                        if (c + 1 < kGroupsV) fragments.load_v(v_address, c + 1);
                        if (c + 1 == kMostGroups) fragments.load_v(v_ahead, 0);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int chunk = 4 * c + i;
                        if (c < kGroups)
#pragma unroll
                            for (int mt = 0; mt < RowTiles; mt++) mma(s_next.tile[mt][0], q[mt][chunk], now.k[i]);
                        if (c < kGroupsV)
#pragma unroll
                            for (int mt = 0; mt < RowTiles; mt++) mma(o[mt][chunk], p_last[mt], now.v[i]);
                        // The rows of the softmax, spread over the products.
                        constexpr int kParts = RowTiles * ForwardLayout::kRows;
#pragma unroll
                        for (int part = 0; part < kParts; part++)
                            if (part * 4 * kMostGroups / kParts == chunk) {
                                const int mt = part / ForwardLayout::kRows, r = part % ForwardLayout::kRows;
                                float x[2];
#pragma unroll
                                for (int w = 0; w < 2; w++) {
                                    x[w] = softmax.row[mt][r].probability(s.tile[mt][0][2 * r + w], scale);
                                    if (kHasDropout && !kept(mt, 2 * r + w)) x[w] = 0.f;
                                }
                                p_this[mt][r] = pack_probabilities(x[0], x[1]);
                            }
                    }
                }
            };

            if (kFragmentsAhead) {
                fragments.load_k(k_fragment + kTileBytes, 0);
                fragments.load_v(v_fragment + slot_after(0, -1) + kTileBytesV, 0);
            }
            u32 slot = 0;  // of this step
            // The steps that begin before `until`.
            const auto steps = [&](bool may_mask, int until) {
                const Mask mask = mask_here(p);
#pragma unroll 1
                for (; kBackwards ? key >= until : key < until; key += kWalk) {
                    if (!kEverySecond || slot % (2 * kSlotBytes) == 0) barrier();
                    const u32 next = slot_after(slot, 1);
                    const u32 k_this = k_fragment + slot, v_this = v_fragment + slot;
                    const u32 k_next = k_fragment + next, v_last = v_fragment + slot_after(slot, -1);
                    tile(may_mask, mask, scores[0], scores[1], probabilities[1], probabilities[0], k_this + kTileBytes,
                         v_last + kTileBytesV, k_next, v_this, key, 0);
                    if (kCarriedAlibi) alibi.go(-kTileKeys);
                    store(0, slot_after(slot, kAhead));
                    load(kPasses - 1, key + (kAhead + 2 - kPasses) * kWalk);
                    tile(may_mask, mask, scores[1], scores[0], probabilities[0], probabilities[1], k_next, v_this,
                         k_next + kTileBytes, v_this + kTileBytesV, key + kTileKeys, 1);
                    if (kPasses == 2) {
                        store(1, slot_after(slot, kAhead));
                        load(0, key + (kAhead + 1) * kWalk);
                    }
                    slot = next;
                    if (kCarriedAlibi) alibi.go(kTileKeys - kWalk);
                }
            };
            // Masked steps, unmasked ones, masked ones; what these need is derived again between them.
            for (;;) {
                // (The shuffle tells ptxas that a warp is of one mind.)
                const UnmaskedKeys<kStep> unmasked(mask_here(p), __shfl_sync(~0u, warp_row_here(p), 0), kWarpRows);
                const int last = unmasked.first + static_cast<int>(unmasked.span);
                if (kBackwards) {
                    const int none = key + 1;
                    steps(true, key > last ? max(last + 1, key_first) : key < unmasked.first ? key_first : none);
                    if (key < key_first) break;
                    if (key >= unmasked.first && key <= last) steps(false, max(unmasked.first, key_first));
                } else {
                    steps(true, !kUnmaskedLoop || key > last ? key_end : min(unmasked.first, key_end));
                    if (key >= key_end) break;
                    if (kUnmaskedLoop) steps(false, min(last, key_end - 1) + 1);
                }
            }
            // The last tile's output.
            const u32 v_last = v_fragment + slot_after(slot, -1) + kTileBytesV;
#pragma unroll
            for (int c = 0; c < kGroupsV; c++) {
                if (c > 0 || !kFragmentsAhead) fragments.load_v(v_last, c);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma(o[mt][4 * c + i], probabilities[1][mt], fragments.v[i]);
            }
        }
        write_output(p, block_batch_here(), head_here<ForwardLayout::kEitherOrder>(problem), warp_row_here(p), softmax, o);
    }

private:
    // One barrier for the warps of a block, which may be at different steps' code: hence not __syncthreads().
    __device__ __forceinline__ static void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
    __device__ __forceinline__ static void multiply_halves(u32& x, float factor) {
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(to_half2(factor, factor)));
    }
};

}  // namespace turing
