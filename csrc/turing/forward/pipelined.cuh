// Forward kernel of the turing family: Q, scores, probabilities and output in registers; headdim 64.
//
// m16n8k8 takes 8 keys, so a warp works on tiles of 8 keys, on three of them at once, each in another stage:
//
//   tile i + 1: S = Q K^T        tile i: softmax        tile i - 1: O += P V
//
// so that there are always products and arithmetic that do not wait for each other. A step is two tiles. K and V move through a
// ring of eight slots in shared memory: step j stores what step j + 3 multiplies and loads from global memory what step j + 4
// does. What a warp reads and writes between two barriers may then be two steps apart from what another does, so
// every second step needs one.
#pragma once

#include "forward/block.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

template <int Headdim, int Warps, int RowTiles>
struct ForwardPipelined {
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * RowTiles;
    static constexpr int kBlockRows = Warps * kWarpRows;
    static constexpr int kTileKeys = ForwardLayout::kTileKeys;
    static constexpr int kStep = 2 * kTileKeys;
    static constexpr int kChunks = Headdim / kChunk;
    static constexpr int kGroups = kChunks / 4;  // of four chunks, which one instruction loads
    static constexpr int kPitch = kChunks * kChunkBytes;
    static constexpr int kTileBytes = kTileKeys * kPitch;
    static constexpr u32 kSlots = 8, kSlotBytes = kStep * kPitch;
    static constexpr u32 kOffsetV = kSlots * kSlotBytes;
    static constexpr int kSharedBytes = 2 * kOffsetV;
    static_assert(kChunks % 8 == 0, "the swizzle XORs chunk numbers below 8");

    using Stream = TileStream<kChunks, kStep, kThreads>;
    static_assert(Stream::kPasses == 1 && Stream::kChunksPerRow == 1, "a thread loads one chunk of K and one of V");

    using Block = ForwardBlock<kBlockRows>;
    using Tile = Scores<ForwardLayout, RowTiles, 1>;
    using Softmax = SoftmaxRows<ForwardLayout, RowTiles>;
    using Probabilities = OperandA[RowTiles];  // of the 8 keys of a tile

    // From the address of a chunk of group 0 to that of group c in the same row.
    __device__ __forceinline__ static u32 at_group(u32 address, int c) { return chunk_after<kChunks>(address, 4 * c); }
    // The slot `steps` further, as its bytes from slot 0.
    __device__ __forceinline__ static u32 slot_after(u32 slot, int steps) { return slot + steps * kSlotBytes & kOffsetV - 1; }

    // What the products of one tile need of K and V, one group of chunks ahead of them.
    struct Fragments {
        u32 k[4], v[4];
        __device__ __forceinline__ void load(u32 k_address, u32 v_address) {
            load_matrices(k, k_address);
            load_matrices_transposed(v, v_address);
        }
    };

    __device__ __forceinline__ static int warp_row_here() { return Block::row_here() + thread_index_here() / 32 * kWarpRows; }

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

        OperandA q[RowTiles][kChunks];
        load_queries(q, p.q, rows_of(p.q, block.batch, block.head, sequence.first_q()), row, sequence.seqlen_q(), problem.headdim,
                     problem.sign_flip);

        int key = mask.key_first(block.row);
        if (kGeneral) key &= ~3;  // bias and random numbers come in groups of 4 keys
        const int key_end = pinned(mask.key_end(block.row, kBlockRows));
        UnmaskedKeys<kTileKeys> unmasked(mask, row, kWarpRows);
        unmasked.first = pinned(unmasked.first);
        unmasked.span = pinned(unmasked.span);

        const unsigned k_stride = p.k.row_stride, v_stride = p.v.row_stride;
        Stream k(thread, rows_of(p.k, block.batch, block.head_k, sequence.first_k()), p.k.row_stride, problem.headdim, key,
                 key_end);
        Stream v(thread, rows_of(p.v, block.batch, block.head_k, sequence.first_k()), p.v.row_stride, problem.headdim_v, key,
                 key_end);
        uint4 k_data[1][1] = {}, v_data[1][1] = {};  // columns beyond the matrix are never loaded and stay zero
        const u32 store_address = pinned(ring + swizzled<kChunks>(Stream::row_of(thread), Stream::chunk_of(thread)));
        const u32 fragment_address = pinned(ring + swizzled<kChunks>(lane % 8, lane / 8));
        const auto load = [&](int first_key) {
            k.load(k_data, k_stride, first_key);
            v.clear_beyond(v_data, first_key);
            v.load(v_data, v_stride, first_key);
        };
        const auto store = [&](u32 slot) {
            k.store(k_data, store_address + slot, kPitch, false);
            v.store(v_data, store_address + slot + kOffsetV, kPitch, false);
        };

        // Modified scores are in units of log2 already.
        const float scale = kGeneral ? 1.f : problem.scale_log2, inverse_scale = 1.f / scale;
        Softmax softmax;
        Accumulator o[RowTiles][kChunks];
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kChunks; j++)
#pragma unroll
                for (int w = 0; w < ForwardLayout::kElements; w++) o[mt][j][w] = 0.f;
        Probabilities probabilities[2] = {};

        v.store(v_data, store_address + slot_after(0, -1) + kOffsetV, kPitch, false);  // 0 * NaN would not be 0
#pragma unroll
        for (int i = 0; i < 3; i++) {
            load(key + i * kStep);
            store(i * kSlotBytes);
        }
        load(key + 3 * kStep);
        __syncthreads();

        // Scores of even and of odd tiles.
        Tile scores[2];
        scores[0].clear();
        Fragments fragments;
#pragma unroll
        for (int c = 0; c < kGroups; c++) {
            load_matrices(fragments.k, at_group(fragment_address, c));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) mma(scores[0].tile[mt][0], q[mt][4 * c + i], fragments.k[i]);
        }

        // One tile: its scores s become probabilities p_this, beside the scores of the next tile, s_next, and the output of the
        // last, p_last times its V. K of the next and V of the last tile lie at k_address and v_address; those that the next call
        // begins with, at k_ahead and v_ahead.
        const auto tile = [&](Tile& s, Tile& s_next, Probabilities& p_last, Probabilities& p_this, u32 k_address, u32 v_address,
                              u32 k_ahead, u32 v_ahead, int first_key) {
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
            // One branch for all that is rare: each parts the products before it from those behind it, and a second one costs 2 to
            // 5%.
            const bool masked = !unmasked.contain(first_key);
            if (s.exceed_limit(softmax, masked)) {
                if (masked) s.apply(mask, warp_row_here(), first_key);
                const auto rescale = rescale_output<ForwardLayout>(o);
                s.template move_references<MovedRows::kExceeding>(softmax, scale, inverse_scale, [&](int mt, int r, float factor) {
                    rescale(mt, r, factor);
                    multiply_halves(p_last[mt][r], factor);
                });
            }
            s_next.clear();
#pragma unroll
            for (int c = 0; c < kGroups; c++) {
                const Fragments now = fragments;
                if (c + 1 < kGroups)
                    fragments.load(at_group(k_address, c + 1), at_group(v_address, c + 1));
                else
                    fragments.load(k_ahead, v_ahead);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int chunk = 4 * c + i;
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma(s_next.tile[mt][0], q[mt][chunk], now.k[i]);
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma(o[mt][chunk], p_last[mt], now.v[i]);
                    // The rows of the softmax, spread over the products.
                    constexpr int kParts = RowTiles * ForwardLayout::kRows;
#pragma unroll
                    for (int part = 0; part < kParts; part++)
                        if (part * kChunks / kParts == chunk) {
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
            }
        };

        fragments.load(fragment_address + kTileBytes, fragment_address + kOffsetV + slot_after(0, -1) + kTileBytes);
        u32 slot = 0;  // of this step
#pragma unroll 1
        for (; key < key_end; key += kStep) {
            if (slot % (2 * kSlotBytes) == 0) __syncthreads();
            const u32 k_this = fragment_address + slot, v_this = k_this + kOffsetV;
            const u32 k_next = fragment_address + slot_after(slot, 1), v_last = fragment_address + kOffsetV + slot_after(slot, -1);
            tile(scores[0], scores[1], probabilities[1], probabilities[0], k_this + kTileBytes, v_last + kTileBytes, k_next, v_this,
                 key);
            store(slot_after(slot, 3));
            load(key + 4 * kStep);
            tile(scores[1], scores[0], probabilities[0], probabilities[1], k_next, v_this, k_next + kTileBytes, v_this + kTileBytes,
                 key + kTileKeys);
            slot = slot_after(slot, 1);
        }
        // The last tile's output.
        const u32 v_last = fragment_address + kOffsetV + slot_after(slot, -1) + kTileBytes;
#pragma unroll
        for (int c = 0; c < kGroups; c++) {
            if (c > 0) load_matrices_transposed(fragments.v, at_group(v_last, c));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) mma(o[mt][4 * c + i], probabilities[1][mt], fragments.v[i]);
        }
        write_output(p, block_batch_here(), block_head_here(), warp_row_here(), softmax, o);
    }

private:
    __device__ __forceinline__ static void multiply_halves(u32& x, float factor) {
        asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(to_half2(factor, factor)));
    }
};

}  // namespace turing
