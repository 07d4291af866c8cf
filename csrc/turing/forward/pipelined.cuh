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
    static constexpr bool kEverySecond = Slots == 8;  // step has a barrier
    static constexpr int kAhead = kEverySecond ? 3 : 2;
    static_assert(Slots == 4 || Slots == 8, "see above");
    static_assert(kSlotBytes % 128 == 0, "at_group");

    using StreamK = RowStream<kChunks, kStep, kThreads>;
    using StreamV = RowStream<kChunksV, kStep, kThreads>;
    static constexpr int kPasses = StreamK::kPasses > StreamV::kPasses ? StreamK::kPasses : StreamV::kPasses;
    // Where registers are shortest, K and V take turns in those that they pass through.
    static constexpr bool kTakeTurns = kRagged && RowTiles * (2 * kChunks + 4 * kChunksV) >= 192 && kPasses == 2;
    // So many times in a step, evenly spread, a thread stores what it has loaded and loads what comes next.
    static constexpr int kMoves = kTakeTurns ? 2 * kPasses : kPasses;
    static_assert(kPasses <= 2 && (!kTakeTurns || StreamK::kPasses == StreamV::kPasses), "a move is of K, of V or of both");
    using Block = ForwardBlock<kBlockRows>;
    using Tile = Scores<ForwardLayout, RowTiles, 1>;
    using Softmax = SoftmaxRows<ForwardLayout, RowTiles>;
    using Probabilities = OperandA[RowTiles];  // of the 8 keys of a tile
    using Output = Accumulator[RowTiles][kChunksV];

    // Where registers are short, a group of fragments is loaded when it is used.
    static constexpr bool kFragmentsAhead = RowTiles == 1 || RowTiles * (2 * kChunks + 4 * kChunksV) < 192;

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

    __device__ __forceinline__ static int warp_row_here() { return Block::row_here() + thread_index_here() / 32 * kWarpRows; }
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
        int key = mask.key_first(block.row);
        if (kGeneral) key &= ~3;  // bias and random numbers come in groups of 4 keys
        const int key_end = mask.key_end(block.row, kBlockRows);

        Softmax softmax;
        Output o;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kChunksV; j++)
#pragma unroll
                for (int w = 0; w < ForwardLayout::kElements; w++) o[mt][j][w] = 0.f;
        if (key < key_end) {
            OperandA q[RowTiles][kChunks];
            load_queries(q, p.q, rows_of(p.q, block.batch, block.head, sequence.first_q()), row, sequence.seqlen_q(), problem.headdim,
                         problem.sign_flip);

            const unsigned k_stride = p.k.row_stride, v_stride = p.v.row_stride;
            // Where not all threads take part, the first do for K, the last for V.
            const int thread_v = StreamV::kAllTakePart ? thread : kThreads - 32 - (thread & ~31) + lane;
            const StreamK k(thread, rows_of(p.k, block.batch, block.head_k, sequence.first_k()), problem.headdim);
            const StreamV v(thread_v, rows_of(p.v, block.batch, block.head_k, sequence.first_k()), problem.headdim_v);
            // Columns of K beyond the matrix are never loaded and stay zero, in these registers or in shared memory.
            uint4 k_data = zero_chunk(), v_data_ = zero_chunk();
            uint4& v_data = kTakeTurns ? k_data : v_data_;
            const u32 k_store = pinned(ring + StreamK::offset(thread));
            const u32 v_store = kChunks == kChunksV && StreamV::kAllTakePart ? k_store + kOffsetV
                                                                             : pinned(ring + kOffsetV + StreamV::offset(thread_v));
            const u32 k_fragment = pinned(ring + swizzled<kChunks>(lane % 8, lane / 8));
            const u32 v_fragment =
                kChunks == kChunksV ? k_fragment + kOffsetV : pinned(ring + kOffsetV + swizzled<kChunksV>(lane % 8, lane / 8));
            const int k_row = pinned(StreamK::row_of(thread));
            const int v_row = kChunks == kChunksV && StreamV::kAllTakePart ? k_row : pinned(StreamV::row_of(thread_v));
            const auto pass_of = [](int move) { return kTakeTurns ? move / 2 : move; };
            const auto moves_k = [&](int move) { return pass_of(move) < StreamK::kPasses && !(kTakeTurns && move % 2 == 1); };
            const auto moves_v = [&](int move) { return pass_of(move) < StreamV::kPasses && !(kTakeTurns && move % 2 == 0); };
            const auto load = [&](int move, int first_key) {
                if (moves_k(move)) k.template load<true>(k_data, pass_of(move), k_stride, first_key + k_row, key_end - 1);
                if (moves_v(move)) v.template load<false>(v_data, pass_of(move), v_stride, first_key + v_row, key_end - 1);
            };
            const auto store = [&](int move, u32 slot) {
                if (moves_k(move)) k.template store<kTakeTurns>(k_data, pass_of(move), k_store + slot);
                if (moves_v(move)) v.template store<false>(v_data, pass_of(move), v_store + slot);
            };

            // Modified scores are in units of log2 already.
            const float scale = kGeneral ? 1.f : problem.scale_log2;
            Probabilities probabilities[2] = {};

#pragma unroll
            for (int pass = 0; pass < StreamV::kPasses; pass++)
                v.template store<false>(v_data, pass, v_store + slot_after(0, -1));  // 0 * NaN would not be 0
            if (kTakeTurns && !k.inside)
#pragma unroll
                for (int i = 0; i < Slots * StreamK::kPasses; i++)
                    k.template store<false>(k_data, i % StreamK::kPasses, k_store + i / StreamK::kPasses * kSlotBytes);
#pragma unroll
            for (int i = 0; i < kAhead * kMoves; i++) {
                load(i % kMoves, key + i / kMoves * kStep);
                store(i % kMoves, i / kMoves * kSlotBytes);
            }
            load(0, key + kAhead * kStep);
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

            u32 slot = 0;  // of this step
            // At the end of a quarter of a step.
            const auto move = [&](int quarter) {
                if ((quarter + 1) * kMoves % 4 != 0) return;
                const int next = (quarter + 1) * kMoves / 4;
                store(next - 1, slot_after(slot, kAhead));
                load(next % kMoves, key + (kAhead + next / kMoves) * kStep);
            };

            // One tile: its scores s become probabilities p_this, beside the scores of the next tile, s_next, and the output of the
            // last, p_last times its V. K of the next and V of the last tile lie at k_address and v_address; those that the next call
            // begins with, at k_ahead and v_ahead. `half`: whether it is a step's first or second tile.
            const auto tile = [&](bool may_mask, const Mask& mask, Tile& s, Tile& s_next, Probabilities& p_last,
                                  Probabilities& p_this, u32 k_address, u32 v_address, u32 k_ahead, u32 v_ahead, int first_key,
                                  int half) {
                KeptProbabilities<ForwardLayout, RowTiles> kept;
                if (kGeneral) {
                    s.modify(p, mask, warp_row_here(), first_key);
                    if (p.score_options.bias) {
                        ScoreBias<ForwardLayout, RowTiles, 1> bias;
                        bias.load(p, warp_row_here(), first_key);
                        bias.add_to(s, p.score_options);
                    }
                    if (p.score_options.rng_state) kept.draw(p, warp_row_here(), first_key);
                }
                if (may_mask) s.apply(mask, warp_row_here(), first_key);
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
                                    if (kGeneral && !kept(mt, 2 * r + w)) x[w] = 0.f;
                                }
                                p_this[mt][r] = pack_probabilities(x[0], x[1]);
                            }
                    }
                    if (c == kMostGroups / 2 - 1) move(2 * half);
                }
                move(2 * half + 1);
            };

            if (kFragmentsAhead) {
                fragments.load_k(k_fragment + kTileBytes, 0);
                fragments.load_v(v_fragment + slot_after(0, -1) + kTileBytesV, 0);
            }
            // The steps that begin before `until`.
            const auto steps = [&](bool may_mask, int until) {
                const Mask mask = mask_here(p);
#pragma unroll 1
                for (; key < until; key += kStep) {
                    if (!kEverySecond || slot % (2 * kSlotBytes) == 0) barrier();
                    const u32 next = slot_after(slot, 1);
                    const u32 k_this = k_fragment + slot, v_this = v_fragment + slot;
                    const u32 k_next = k_fragment + next, v_last = v_fragment + slot_after(slot, -1);
                    tile(may_mask, mask, scores[0], scores[1], probabilities[1], probabilities[0], k_this + kTileBytes,
                         v_last + kTileBytesV, k_next, v_this, key, 0);
                    tile(may_mask, mask, scores[1], scores[0], probabilities[0], probabilities[1], k_next, v_this,
                         k_next + kTileBytes, v_this + kTileBytesV, key + kTileKeys, 1);
                    slot = next;
                }
            };
            // Masked steps, unmasked ones, masked ones. What these loops need is derived again between them: registers are short.
            for (;;) {
                // (The shuffle tells ptxas that a warp is of one mind.)
                const UnmaskedKeys<kStep> unmasked(mask_here(p), __shfl_sync(~0u, warp_row_here(), 0), kWarpRows);
                const int last = unmasked.first + static_cast<int>(unmasked.span);
                steps(true, key > last ? key_end : min(unmasked.first, key_end));
                if (key >= key_end) break;
                steps(false, min(last, key_end - 1) + 1);
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
        write_output(p, block_batch_here(), block_head_here(), warp_row_here(), softmax, o);
    }

private:
    // One barrier for the warps of a block, which may be at different steps' code: hence not __syncthreads().
    __device__ __forceinline__ static void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
    __device__ __forceinline__ static void multiply_halves(u32& x, float factor) {
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(to_half2(factor, factor)));
    }
};

}  // namespace turing
