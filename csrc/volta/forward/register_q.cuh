// Forward kernel of the volta family with Q in registers, for headdims 32 and 64: from fp16 q, k and v to out (fp16 or fp32) and
// softmax_lse. It is plain, or requires score features (softcap, ALiBi, bias, dropout), which it then always applies. csrc/entry.cu
// calls run(). shared_q.cuh is for larger headdims, and for generic kernels, which test parameters for each feature.
//
// A step is 16 keys. K and V of a step lie in one of four slots of shared memory (a ring). Iteration i of the main loop:
//
//   store step i + 2, load i + 3 from global memory  |  mask, S of i + 1 beside the softmax of i  |  barrier  |  O += P V of i
//
// Slow warps may still read V of step i - 1 while others store i + 2: hence four slots. The softmax runs exp2 on the XU pipe while
// tensor cores compute S = Q K^T. Row maxima are lazy: they move, and the output is rescaled, only if a score exceeds a limit
// (softmax.cuh). The test runs beside O += P V.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, where quad is lane % 4 and half is lane / 16. A quad-pair is in
// row qm (bit 2 of the lane) and column qn (bit 3) of the warp's 2x2 (volta/mma.cuh).
//
//   mt, c, j          one of the warp's two row tiles of 16; a chunk (eight columns, 16 bytes) of Q and K; a panel, four chunks of
//                     V: output tile 2j has the first half of each of the panel's chunks, tile 2j + 1 the second half
//   v, u              a lane's element (0 to 7) of a tile of scores; elements 4u to 4u + 3, and their keys in O += P V: u is 0 for
//                     the even four of eight keys, 1 for the odd
//   w                 in O += P V: 0 for the eight keys of the lane's quad-pair column, 1 for the other eight
//   sequence          lengths of the block's sequence, and its first rows in the tensors (q_offset(), k_offset())
//   keys              iterator over the block's steps: first() is the step's first key, after(n) that of the step n later
//   bits              under a block mask, which single scores exist; else calls compile to nothing
//   features.*()      what the kernel's required score features need at that point (score_feature.cuh)
//   remat_*()         reads a special register again, to hold none in between; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kPaged, kRequiresBias  what this kernel is compiled for (features.cuh); kBatchInvariant: bits independent of the batch
//   problem.scale_log2, sign_flip  |softmax_scale| * log2(e); 0x80008000 (signs of two fp16) if softmax_scale is negative, else 0
//   BLOCK_ROWS, STEP, SHARED_BYTES  query rows, keys of a step and shared memory of a block: the kernel's row in src/kernels
#pragma once

#include "conditional.cuh"  // Conditional<B, X, Y>::Type: X if B, else Y
#include "forward/block.cuh"  // a block's rows, head and batch entry
#include "forward/pages.cuh"  // KvTiles; has_pages(): whether the KV cache has all pages of the sequence
#include "volta/forward/required_features.cuh"  // Features; LaneScratch: see `memory` in run(); Probabilities (of P V), grids

namespace volta {

// The kernel. A warp has 32 query rows. Grid: DataParallelGrid, StreamKGrid or BlockMaskGrid tells a block its rows and keys.
template <int Headdim, int HeaddimV, int Warps, class Grid = DataParallelGrid>
struct ForwardRegisterQ {
    static constexpr int kRowTiles = 2, kStep = 16, kSlots = 4;
    static constexpr int kThreads = 32 * Warps, kWarpRows = 16 * kRowTiles, kBlockRows = Warps * kWarpRows;
    static constexpr int kChunks = Headdim / kChunk, kChunksV = HeaddimV / kChunk, kOutputTiles = HeaddimV / 16;
    // One chunk of padding makes the pitch odd in chunks. Rows that differ in bits 1 and 2 (layout.cuh) then fall into
    // different 16-byte bank groups, and chunks have immediate offsets.
    static constexpr int kPitch = (kChunks + 1) * kChunkBytes, kPitchV = (kChunksV + 1) * kChunkBytes;
    static constexpr int kOffsetV = kStep * kPitch;  // of V in a slot, bytes
    static constexpr int kSlotBytes = kStep * (kPitch + kPitchV), kRingBytes = kSlots * kSlotBytes;
    using KernelFeature = Features<kRowTiles, 1, Grid>;
    static constexpr int kSharedBytes = kRingBytes + KernelFeature::kLaneScratchChunks * kStep * kPitch;
    static_assert(kBlockRows == BLOCK_ROWS && kStep == STEP && kSharedBytes == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");

    // Three blocks an SM leave varlen kernels of headdim 32 no registers for the mask: masked tiles compute it again.
    static constexpr bool kMaskKept = !(kVarlen && Headdim == 32);

    // Chunks of K or V that are loaded from shared memory ahead of the products that use them.
    static constexpr int kAhead = kVarlen && Headdim == 32 ? 1 : 2;

    static constexpr int kThreadsK = kStep * kChunks;  // threads that load a step's K, one chunk each
    static_assert(kThreadsK == kStep * kChunksV && (kThreadsK == kThreads || 2 * kThreadsK == kThreads),
                  "a thread loads one chunk of K and one of V, or one of either");
    static constexpr bool kSplitLoads = kThreadsK < kThreads;  // half of the threads load K, the others V

    using Block = typename Grid::template Block<kBlockRows>;

    // A thread's chunks of K and V of a step, in flight from global memory to the ring. [1][1]: TileStream (tile.cuh), the loader,
    // takes [pass][chunk of a row].
    struct KeyChunks {
        uint4 k[1][1] = {}, v[1][1] = {};  // columns past the matrix are never loaded and stay zero
    };
    // Loads K and V of a step and stores them to the ring. first_row: the sequence's in k and v. Its keys: `key` to key_end - 1.
    struct KeyLoader {
        using Stream = typename Grid::template Stream<kChunks, kStep, kThreadsK>;
        static_assert(Stream::kPasses == 1 && Stream::kChunksPerRow == 1, "a thread loads one chunk of a row");
        Stream k, v;  // with kSplitLoads, k is the thread's own (of K or V) and v is unused
        unsigned k_stride, v_stride;  // elements between rows
        u32 k_store, v_store;  // where the thread's chunk lies in slot 0

        __device__ __forceinline__ KeyLoader(const FwdParams& p, const Block& block, int first_row, int key, int key_end, u32 ring)
            : k(stream(p, block, first_row, key, key_end, loads_v())), v(stream(p, block, first_row, key, key_end, true)),
              k_stride(loads_v() ? p.v.row_stride : p.k.row_stride), v_stride(p.v.row_stride) {
            const int row = Stream::row_of(thread()), chunk = Stream::chunk_of(thread());
            k_store = ring + row * kPitch + chunk * kChunkBytes + (loads_v() ? kOffsetV : 0);
            v_store = ring + row * kPitchV + chunk * kChunkBytes + kOffsetV;
        }

        // Number of the chunk that this thread loads. With four chunks a row, eight threads that store together cover two rows:
        // bits 2 and 4 of the number trade places, so that these are four apart. At a pitch of five chunks such rows fall into
        // different bank groups; neighbors do not.
        __device__ __forceinline__ static int thread() {
            const int i = threadIdx.x % kThreadsK;
            return kChunks == 4 ? (i & ~20) | (i & 4) << 2 | (i & 16) >> 2 : i;
        }
        // Whether this thread loads V through k. The vote tells ptxas that it is uniform in a warp.
        __device__ __forceinline__ static bool loads_v() { return kSplitLoads && __any_sync(~0u, threadIdx.x >= kThreadsK); }
        __device__ __forceinline__ static Stream stream(const FwdParams& p, const Block& block, int first_row, int key, int key_end,
                                                        bool is_v) {
            const Operand& x = is_v ? p.v : p.k;
            return Stream(thread(), rows_of(x, block.batch, block.head_k, first_row), x.row_stride,
                          is_v ? p.problem.headdim_v : p.problem.headdim, key, key_end);
        }
        // Loads the step whose first key is `key`. clear_beyond() clears V past the last key: P = 0 times NaN would be NaN.
        __device__ __forceinline__ void load(KeyChunks& tile, int key) {
            if (kSplitLoads) k.clear_beyond(tile.k, key);
            k.load(tile.k, k_stride, key);
            if (!kSplitLoads) {
                v.clear_beyond(tile.v, key);
                v.load(tile.v, v_stride, key);
            }
        }
        __device__ __forceinline__ void store(const KeyChunks& tile, u32 slot) const {  // slot: number times kSlotBytes
            // false: also chunks past the last column, which are zeros
            k.store(tile.k, k_store + slot, kPitch, false);
            if (!kSplitLoads) v.store(tile.v, v_store + slot, kPitchV, false);
        }
    };

    // The same for a KV cache, through its block table: KvTiles<true, ...> (forward/pages.cuh).
    struct PagedKeyLoader {
        const FwdParams& p;
        KvTiles<true, kChunks, kChunksV, kStep, kThreadsK> tiles;
        u32 k_store, v_store;

        __device__ __forceinline__ PagedKeyLoader(const FwdParams& params, const Block& block, int first_row, int key, int key_end,
                                                  u32 ring)
            : p(params), tiles(threadIdx.x, params, block, first_row, key, key_end) {
            // Paged kernels have headdim 64, where each thread loads a chunk of K and one of V.
            static_assert(!kSplitLoads && kChunks % 8 == 0, "KeyLoader covers the other cases");
            const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
            k_store = ring + row * kPitch + chunk * kChunkBytes;
            v_store = ring + row * kPitchV + chunk * kChunkBytes + kOffsetV;
        }
        __device__ __forceinline__ void load(KeyChunks& tile, int key) {
            tiles.load_k(tile.k, p, key);
            tiles.v.clear_beyond(tile.v, key);
            tiles.load_v(tile.v, p, key);
        }
        __device__ __forceinline__ void store(const KeyChunks& tile, u32 slot) const {
            tiles.k.store(tile.k, k_store + slot, kPitch, false);
            tiles.v.store(tile.v, v_store + slot, kPitchV, false);
        }
    };

    using Tile = Scores<ForwardLayout, kRowTiles, 1>;

    __device__ __forceinline__ static void run(const FwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 ring = shared_address(shared);
        const Problem& problem = p.problem;
        const ForwardLane lane;
        const Block block(problem, grid);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(problem, sequence);
        const int row = block.row + threadIdx.x / 32 * kWarpRows;

        const unsigned short* q_base = rows_of(p.q, block.batch, block.head, sequence.q_offset());
        uint4 q[kRowTiles][kChunks];
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++) {
            const int i = row + 16 * mt + lane.q_row();
            const unsigned short* q_row = q_base + i * p.q.row_stride;
#pragma unroll
            for (int c = 0; c < kChunks; c++) {
                q[mt][c] = zero_chunk();
                const bool inside = i < sequence.seqlen_q() && c * kChunk < problem.headdim;
                if (!kPaged) load_global_if(inside, q[mt][c], q_row + c * kChunk);
                if (kPaged && inside) q[mt][c] = flipped(load_global(q_row + c * kChunk), problem.sign_flip);
            }
        }
        // The block's first key. Batch-invariant kernels, and those with pages (groups of 16 keys), bias or dropout (groups of 4:
        // kRoundedKeys) round it down to a multiple of 16. Others begin at any key.
        int key = first_step<kStep>(block.template key_first<kStep>(mask));
        if (kRoundedKeys) key &= ~15;
        const int key_end = keep_in_register(block.template key_end<kStep>(mask));
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;  // out stays NaN, with which the library filled it
        }
        typename Grid::template Steps<kStep> keys(grid, block, key, key_end);
        using Bits = typename Grid::template Bits<kWarpRows, kStep>;
        Bits bits;
        typename Conditional<kPaged, PagedKeyLoader, KeyLoader>::Type loader(p, block, sequence.k_offset(), key, key_end, ring);
        const u32 k_lane = ring + lane.k_row() * kPitch;
        const u32 v_lane = ring + kOffsetV + lane.v_row() * kPitchV + lane.v_chunk() * kChunkBytes;
        const int v_other = (lane.qn ? -8 : 8) * kPitchV;  // from the rows of the lane's own keys to the other eight
        UnmaskedKeys<kStep> unmasked(mask, row, kWarpRows);  // steps that begin at keys first to first + span need no mask
        // Shared memory after the ring, for what bias and dropout have no registers for: 16-byte chunks of each thread. The first
        // chunks of all threads lie as their chunks of K do in slot 0, and so do the second ones, kStep * kPitch bytes later.
        const LaneScratch memory{loader.k_store + kRingBytes, kStep * kPitch};
        KernelFeature features(p, grid, mask, unmasked, memory, row, key);
        unmasked.first = keep_in_register(unmasked.first);
        unmasked.span = keep_in_register(unmasked.span);
        const float scale = features.scale(p), inverse_scale = 1.f / scale;  // `scale` turns what the softmax takes to log2 units

        SoftmaxState<kRowTiles> softmax;
        features.init_row_max(softmax, p, mask, q_base, rows_of(p.k, block.batch, block.head_k, sequence.k_offset()), row);
        Accumulator o[kRowTiles][kOutputTiles];
        clear_tiles(o);

        KeyChunks first[2], tile;
#pragma unroll
        for (int i = 0; i < 2; i++) loader.load(first[i], keys.after(i));
#pragma unroll
        for (int i = 0; i < 2; i++) loader.store(first[i], i * kSlotBytes);
        loader.load(tile, keys.after(2));
        if (!kPaged && problem.sign_flip) {
            unrolled<kRowTiles, kChunks>([&](int mt, int c) { q[mt][c] = flipped(q[mt][c], problem.sign_flip); });
        }
        __syncthreads();

        // S of the first step. In the loop, each step computes S of the next one.
        Tile s;
        features.load(p, row, keys.first());
        features.init_accumulators(p, s, row, keys.first());
        features.load(p, row, keys.after(1));
        bits.load(grid, keys, 0);  // 0: of the first step; in the loop 1: of the next
        [[maybe_unused]] Tile first_odd;  // as `odd` in the loop: a step's sums must not depend on where the block begins
        if constexpr (kBatchInvariant) first_odd.clear();
#pragma unroll
        for (int c = 0; c < kChunks; c++) {
            const uint4 k = load_shared(k_lane + c * kChunkBytes);
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) {
                mma_row_col(s.tile[mt][0], q[mt][c].x, q[mt][c].y, k.x, k.y);
                if constexpr (kBatchInvariant)
                    mma_row_col(first_odd.tile[mt][0], q[mt][c].z, q[mt][c].w, k.z, k.w);
                else
                    mma_row_col(s.tile[mt][0], q[mt][c].z, q[mt][c].w, k.z, k.w);
            }
        }
        if constexpr (kBatchInvariant) s.each([&](float& x, int mt, int nt, int v) { x += first_odd.tile[mt][nt][v]; });
        features.add_to(p, s);
        uint4 k_ahead[kAhead];
#pragma unroll
        for (int c = 0; c < kAhead; c++) k_ahead[c] = load_shared(k_lane + kSlotBytes + c * kChunkBytes);

        // is_masked(n): under BlockMaskGrid, whether the step n later has scores to hide. The loop asks a step ahead, beside
        // products, and keeps it in listed_masked. kHidesAll marks this grid: its bits hide what lengths, causal masks and windows
        // hide too. Votes, although all lanes agree: they tell the compiler that no warp diverges.
        const auto exists = [&] { return Bits::kHidesAll ? __any_sync(~0u, keys.exists()) : keys.exists(); };
        const auto is_masked = [&](int steps) {
            if constexpr (Bits::kHidesAll)
                return __any_sync(~0u, !unmasked.contains(keys.after(steps)) || keys.has_bits_after(steps));
            else
                return 0;
        };
        bool listed_masked = is_masked(0);
        bool exceeds = true;  // a score may be above its row's limit
        u32 slot = 0;  // of this step: its number in the ring times kSlotBytes
        const auto slot_after = [&](int steps) {
            const u32 x = slot + steps * kSlotBytes;
            return x >= kRingBytes ? x - kRingBytes : x;
        };
#pragma unroll 1
        for (; exists(); keys.advance(grid)) {
            const int key = keys.first();
            loader.store(tile, slot_after(2));
            loader.load(tile, keys.after(3));
            const bool masked = Bits::kHidesAll ? listed_masked : !unmasked.contains(key);
            if (masked) {
                // ALiBi's terms were added as before the diagonal: past it their sign changes, which may raise scores.
                features.correct_masked_tile(s, softmax, unmasked, p, mask, row, key);
                if constexpr (Bits::kHidesAll) {
                    bits.combine(keys, mask, row, !unmasked.contains(key));
                    bits.apply_to(s);
                } else if constexpr (kMaskKept)
                    s.apply_mask(mask, row, key);
                else
                    s.apply_mask(mask_of(problem, BlockSeqlenInfo(p, remat_block_batch())),
                                 Block::remat_row(problem) + remat_thread_index() / 32 * kWarpRows, key);
                if constexpr (decltype(features)::kCorrectionRaises)
                    if (features.correction_raises(p)) exceeds = s.needs_rescale(softmax);
            }
            if (exceeds) features.update_row_max(s, softmax, scale, inverse_scale, rescale_output<ForwardLayout>(o));
            features.set_masked(masked, s);

            // S of the next step, beside the softmax of this one. The first four columns of each chunk add to `even`, the last four
            // to `odd`: four short dependency chains instead of two long ones.
            const u32 k_next = k_lane + slot_after(1);
            Tile even, odd;
            Probabilities<kRowTiles> probabilities;
            uint4 k[kChunks];
            features.init_accumulators(p, even, row, keys.after(1));
            odd.clear();
            typename KernelFeature::Numbers numbers;
            features.draw(numbers, p, row, key);
#pragma unroll
            for (int c = 0; c < kAhead; c++) k[c] = k_ahead[c];
            constexpr int kPairs = 8 * kRowTiles / 2;  // a lane's scores, by twos; a chunk's products run beside some
            constexpr int kPairsPerChunk = kPairs / kChunks;
#pragma unroll
            for (int c = 0; c < kChunks; c++) {
                if (c + kAhead < kChunks) k[c + kAhead] = load_shared(k_next + (c + kAhead) * kChunkBytes);
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(even.tile[mt][0], q[mt][c].x, q[mt][c].y, k[c].x, k[c].y);
#pragma unroll
                for (int pair = c * kPairsPerChunk; pair < (c + 1) * kPairsPerChunk; pair++) {
                    const int u = pair / 4, mt = pair / 2 % 2, begin = 4 * u + 2 * (pair % 2);
#pragma unroll
                    for (int v = begin; v < begin + 2; v++)
                        s.tile[mt][0][v] =
                            softmax.row[mt][ForwardLayout::row_of(v)].probability(features.score(s.tile[mt][0][v]), scale);
                }
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(odd.tile[mt][0], q[mt][c].z, q[mt][c].w, k[c].z, k[c].w);
#pragma unroll
                for (int pair = c * kPairsPerChunk; pair < (c + 1) * kPairsPerChunk; pair++)
                    if (pair % 2) {
                        const int u = pair / 4, mt = pair / 2 % 2;
                        probabilities.pack_own(lane, mt, u, s.tile[mt][0],
                                               [&](u32& x, u32& y) { features.drop(x, y, numbers, p, mt, u); });
                    }
            }
            if (kRequiresBias) {  // after the product, before the barrier; ptxas would move it
                __syncwarp();
                features.load(p, row, keys.after(2));
                __syncwarp();
            }

            // O += P V
            const u32 v_address = v_lane + slot;
            constexpr int kPanels = kChunksV / 4, kLoads = 4 * kPanels;  // load number i is (w, u, j), j fastest
            const auto load_v = [&](int i) {
                const int w = i / (2 * kPanels), u = i / kPanels % 2, j = i % kPanels;
                return load_shared(v_address + (w ? v_other : 0) + u * kPitchV + j * 4 * kChunkBytes);
            };
            uint4 v_chunks[kLoads];
#pragma unroll
            for (int i = 0; i < kAhead; i++) v_chunks[i] = load_v(i);
            bits.load(grid, keys, 1);
            listed_masked = is_masked(1);
            slot = slot_after(1);
            const u32 k_after_next = k_lane + slot_after(1);
            __syncthreads();
            unrolled<kRowTiles, 8>([&](int mt, int v) { s.tile[mt][0][v] = even.tile[mt][0][v] + odd.tile[mt][0][v]; });
            features.add_to(p, s);
            probabilities.exchange();  // a lane gets the other eight keys' probabilities (w = 1) from lane ^ 8
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                const int w = i / (2 * kPanels), u = i / kPanels % 2, j = i % kPanels;
                if (i + kAhead < kLoads) v_chunks[i + kAhead] = load_v(i + kAhead);
                if (i >= kLoads - kAhead)
                    k_ahead[i - kLoads + kAhead] = load_shared(k_after_next + (i - kLoads + kAhead) * kChunkBytes);
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++)
                    mma_row_row(o[mt][2 * j], probabilities.pairs[mt][w][u].lo, probabilities.pairs[mt][w][u].hi, v_chunks[i].x,
                                v_chunks[i].y);
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++)
                    mma_row_row(o[mt][2 * j + 1], probabilities.pairs[mt][w][u].lo, probabilities.pairs[mt][w][u].hi, v_chunks[i].z,
                                v_chunks[i].w);
                // Tested without the mask, which is applied when the step begins: at worst a row maximum moves early.
                if (i == kLoads / 2 - 1) exceeds = s.needs_rescale(softmax);
            }
        }
        features.finish(softmax, scale);
        if (!grid.template combine_splits<kThreads>(softmax, o)) return;  // another block writes out
        write_output<kRowTiles, kOutputTiles>(p, lane, grid.remat_batch(problem), grid.remat_head(problem), row, softmax, o);
    }
};

}  // namespace volta
