// Forward kernel of the volta family with Q in shared memory: from fp16 q, k and v to out (fp16 or fp32) and softmax_lse. It is for
// headdims above 64 to 256, whose Q and output do not both fit registers. At 64 it is for generic kernels and blocks of 64 rows,
// and register_q.cuh for the others. csrc/entry.cu calls run() of SharedQ or ForwardSharedQ. Shared memory has the block's rows of
// Q, then a step's K, then its V. Schedule of a step (as in TurboMind, LMDeploy's engine: a global load is in flight during one
// product, and its registers are free for the other operand in the next):
//
//   S = Q K^T, mask  |  store V, load next K  |  barrier  |  softmax, O += P V  |  store next K, load next V  |  barrier
//
// The first product is a rolled loop over chunks (eight fp16 columns, 16 bytes) of headdim, the second a rolled loop over tiles of
// 16 keys: the step has to fit the 12 KiB instruction cache.
//
// Score features are softcap, ALiBi, bias and dropout. A kernel with required features always applies them: features.*() do what
// they need at that point (score_feature.cuh). A generic kernel (kGeneric) has all (no bias under a block mask), and tests its
// parameters for each one.
//
//   mt, nt, v         a row tile of 16 of the warp; a tile of 16 keys; a lane's element (0 to 7) of a 16x16 tile
//   w, u              in O += P V: w is 0 for the eight keys of the lane's quad-pair column (bit 3 of the lane), 1 for the other
//                     eight; u is 0 for the even four of these, 1 for the odd: a lane's elements 4u to 4u + 3
//   key group         warps that share rows with other key groups, but have other keys of each step
//   sequence          lengths of the block's sequence, and its first rows in the tensors (q_offset(), k_offset())
//   keys              iterator over the block's steps: first() is the step's first key, after(n) that of the step n later
//   bits              under a block mask, which single scores exist; else calls compile to nothing
//   swizzled()        permutes a row's chunks against bank conflicts (tile.cuh)
//   remat_*()         compute a value again at its use, so that it holds no register; keep_in_register() forbids that (ptx.cuh)
//   kVarlen, kPaged, kHas..., kRequires...  what this kernel is compiled for (features.cuh); kRequiresTwo: two of the features
//   problem.scale_log2, sign_flip  |softmax_scale| * log2(e); 0x80008000 (signs of two fp16) if softmax_scale is negative, else 0
//   HEADDIM, HEADDIM_V, BLOCK_ROWS, STEP, THREADS, BLOCKS_PER_SM, SHARED_BYTES  the kernel's row in src/kernels: columns of Q and
//                     K, and of V; a block's query rows (of a head), keys of a step (of all key groups), threads, shared memory;
//                     and blocks that an SM has room for
#pragma once

#include "forward/block.cuh"  // kBlockHeads: query heads of a block, more than 1 under HeadGroupGrid alone
#include "forward/pages.cuh"  // KvTiles: loads K and V, from tensors or a KV cache's pages; has_pages(): whether it has all pages
#include "volta/forward/required_features.cuh"  // Features; from layout.cuh Probabilities (of P V), grid policies
#include "volta/forward/output_product.cuh"  // accumulate_columns()

namespace volta {

__device__ constexpr int larger_of(int a, int b) { return a > b ? a : b; }

// Each of Warps warps owns 16 * RowTiles rows. Grid: a block's rows, its steps of keys and how it loads them (layout.cuh).
//
// KeyGroups > 1 (split-KV inside a block) is for grids that leave SMs idle. The block's warps form that many key groups with the
// same rows. Each takes its Step keys of a step of Step * KeyGroups (kTileKeys). Partial results are combined after the last step.
template <int Headdim, int HeaddimV, int Warps, int RowTiles, int Step, int KeyGroups, int BlocksPerSm,
          class Grid = DataParallelGrid>
struct ForwardSharedQ {
    static constexpr int kThreads = 32 * Warps, kWarpRows = 16 * RowTiles;
    static constexpr int kGroupWarps = Warps / KeyGroups, kBlockRows = kGroupWarps * kWarpRows, kTileKeys = Step * KeyGroups;
    static constexpr int kHeads = kBlockHeads<Grid>, kHeadRows = kBlockRows / kHeads;  // heads of a block, rows of each
    static constexpr int kChunks = Headdim / kChunk, kChunksV = HeaddimV / kChunk;
    static constexpr int kPitch = kChunks * kChunkBytes, kPitchV = kChunksV * kChunkBytes;
    static constexpr int kKeyTiles = Step / 16, kOutputTiles = HeaddimV / 16;
    static constexpr int kOffsetK = kBlockRows * kPitch, kOffsetV = kOffsetK + kTileKeys * kPitch;  // of K and V after Q, bytes
    static constexpr int kChunkUnroll = 2;  // chunks of headdim in one iteration of the first product
    static constexpr int kSharedBytes = kOffsetV + kTileKeys * kPitchV;
    static_assert(kHeads == 1 || kHeadRows == kWarpRows, "a warp has rows of one head");
    static_assert(kHeadRows == BLOCK_ROWS && kTileKeys == STEP && kSharedBytes == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");
    // Whether the keys come from the lists of a block-sparse mask (BlockMaskGrid), whose bits hide all masked scores.
    static constexpr bool kListed = Grid::template Bits<kWarpRows, kTileKeys>::kHidesAll;
    // Rolls the second product over the lane's own keys and the others: with a bias, with two features or with bits of a block mask
    // the step would not fit the instruction cache.
    static constexpr bool kColumnsRolled = kRequiresBias || kRequiresTwo || (kListed && !kHasScoreFeatures);
    // Generic kernels load the bias ahead if one block an SM leaves registers for it; two blocks hide the latency by themselves.
    static constexpr bool kBiasAhead = kGeneric && kHasBias && BlocksPerSm == 1;

    // The swizzle XORs the low bits of a chunk's number. So a lane's chunk c is at (address of chunk 0) ^ (low bits of c) +
    // (the rest of c), in bytes. kSwizzleMask: these low bits, which number chunks in a group of eight or four.
    static constexpr int kSwizzleMask = (kPitch & (kPitch - 1)) == 0 ? kPitch - 1  // all of a power of two may be XORed
                                        : kChunks % 8 == 0           ? 8 * kChunkBytes - 1
                                                                     : 4 * kChunkBytes - 1;
    __device__ __forceinline__ static u32 at_chunk(u32 address, int chunk_bytes) {
        if (kSwizzleMask == kPitch - 1) return address ^ chunk_bytes;
        return (address ^ (chunk_bytes & kSwizzleMask)) + (chunk_bytes & ~kSwizzleMask);
    }

    using Tile = Scores<ForwardLayout, RowTiles, kKeyTiles>;
    using Accumulators = Accumulator[RowTiles][kOutputTiles];

    // S += Q K^T for the warp's rows and the Step keys in shared memory. q and k: the lane's addresses.
    __device__ __forceinline__ static void add_scores(Tile& s, u32 q, u32 k) {
#pragma unroll 1
        for (int chunk = 0; chunk < kPitch; chunk += kChunkUnroll * kChunkBytes) {
            const u32 q_base = at_chunk(q, chunk), k_base = at_chunk(k, chunk);
#pragma unroll
            for (int c = 0; c < kChunkUnroll; c++) {
                uint4 a[RowTiles], b[kKeyTiles];
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) a[mt] = load_shared((q_base ^ (c * kChunkBytes)) + mt * 16 * kPitch);
#pragma unroll
                for (int nt = 0; nt < kKeyTiles; nt++) b[nt] = load_shared((k_base ^ (c * kChunkBytes)) + nt * 16 * kPitch);
#pragma unroll
                for (int nt = 0; nt < kKeyTiles; nt++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma_row_col(s.tile[mt][nt], a[mt].x, a[mt].y, b[nt].x, b[nt].y);
#pragma unroll
                for (int nt = 0; nt < kKeyTiles; nt++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) mma_row_col(s.tile[mt][nt], a[mt].z, a[mt].w, b[nt].z, b[nt].w);
            }
        }
    }

    // O += P V for eight keys of each of Columns quad-pair columns (output_product.cuh).
    template <int Columns, class Pair, class Address>
    __device__ __forceinline__ static void accumulate_columns(Accumulators& o, Pair pair, Address address) {
        volta::accumulate_columns<Columns, kPitchV>(o, pair, address);
    }

    // O += P V for 16 keys. P has only the eight keys of the lane's own quad-pair column so far; exchange() gets the other eight.
    // v_own and v_other: the lane's addresses of V for the keys of either column.
    __device__ __forceinline__ static void accumulate(Accumulators& o, Probabilities<RowTiles>& p, u32 v_own, u32 v_other) {
        if (!kColumnsRolled) {
            p.exchange();
            accumulate_columns<2>(
                o, [&](int mt, int w, int u) { return p.pairs[mt][w][u]; }, [&](int w) { return w ? v_other : v_own; });
            return;
        }
        u32 v = v_own;
#pragma unroll 1
        for (int w = 0; w < 2; w++, v = v_other) {
            accumulate_columns<1>(o, [&](int mt, int, int u) { return p.pairs[mt][0][u]; }, [&](int) { return v; });
            // Replaces its own P by the other column's. The second exchange has no reader: kernels with lists skip it.
            if (!kListed || w == 0) p.exchange(0);
        }
    }

    // Combines the key groups' partial results in the first group, through shared memory, whose tiles have no more readers. Returns
    // whether this warp is in the first group. `base`: of the block's shared memory. `group`: the warp's key group.
    __device__ __forceinline__ static bool combine_key_groups(u32 base, int thread, int group, SoftmaxState<RowTiles>& softmax,
                                                              Accumulators& o) {
        // Chunk i of all threads, then i + 1: no bank conflicts.
        constexpr int kGroupThreads = 32 * kGroupWarps, kBetween = kGroupThreads * kChunkBytes;
        static_assert(KeyGroups == 1 || kPartialChunks<RowTiles, kOutputTiles> * kBetween <= kSharedBytes,
                      "one group's results at a time");
        const u32 first = base + thread % kGroupThreads * kChunkBytes;
#pragma unroll 1
        for (int from = 1; from < KeyGroups; from++) {
            if (group == from) store_partial(softmax, o, [&](int chunk, uint4 x) { store_shared(first + chunk * kBetween, x); });
            __syncthreads();
            if (group == 0) combine_partial(softmax, o, [&](int chunk) { return load_shared(first + chunk * kBetween); });
            __syncthreads();
        }
        return group == 0;
    }

    __device__ __forceinline__ static void run(const FwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 base = shared_address(shared);
        const Problem& problem = p.problem;
        const ForwardLane lane;
        const typename Grid::template Block<kBlockRows> block(problem, grid);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(problem, sequence);
        const int thread = threadIdx.x;
        const int warp_row = thread / 32 % kGroupWarps * kWarpRows;
        const int group = thread / 32 / kGroupWarps, group_key = group * Step;  // key group; its first key in a step
        const int row = block.row + (kHeads == 1 ? warp_row : 0);

        if constexpr (kHeads == 1) {  // the block's rows of Q to shared memory
            constexpr int kRows = kThreads / threads_per_row(kChunks);
            TileLoader<kChunks, kRows, kThreads> q(
                thread, rows_of(p.q, block.batch, block.head, sequence.q_offset()) + block.row * p.q.row_stride, p.q.row_stride,
                problem.headdim);
#pragma unroll 4
            for (int i = 0; i < kBlockRows; i += kRows) {
                q.load(sequence.seqlen_q() - block.row - i);
                q.flip_signs(problem.sign_flip);  // a negative softmax_scale flips the signs of Q
                q.store(base + i * kPitch + swizzled<kChunks>(q.row, q.chunk), kPitch);
            }
        } else {
            // all heads' loads before the first store: such a block has few steps, and waits for memory once
            using StreamQ = TileStream<kChunks, kHeadRows, kThreads>;
            static_assert(StreamQ::kPasses == 1 && StreamQ::kChunksPerRow == 1, "a thread loads one chunk of each head");
            uint4 q[kHeads][1][1] = {};
            const u32 store = base + swizzled<kChunks>(StreamQ::row_of(thread), StreamQ::chunk_of(thread));
#pragma unroll
            for (int h = 0; h < kHeads; h++) {
                StreamQ stream(thread, rows_of(p.q, block.batch, block.head + h, sequence.q_offset()), p.q.row_stride,
                               problem.headdim, block.row, sequence.seqlen_q());
                stream.load(q[h], p.q.row_stride, block.row);
            }
#pragma unroll
            for (int h = 0; h < kHeads; h++) store_shared(store + h * kHeadRows * kPitch, flipped(q[h][0][0], problem.sign_flip));
        }

        // The block's first key. Batch-invariant kernels round it down to a multiple of kTileKeys. Kernels with pages, bias or
        // dropout, and generic ones (kRoundedKeys), round it to one of 16: pages come in groups of 16 keys, bias and random numbers
        // in groups of 4.
        int key = first_step<kTileKeys>(block.template key_first<kTileKeys>(mask));
        if (kRoundedKeys) key &= ~15;
        const int key_end = keep_in_register(block.template key_end<kTileKeys>(mask));
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;  // out stays NaN, with which the library filled it
        }
        typename Grid::template Steps<kTileKeys> keys(grid, block, key, key_end);
        using Bits = typename Grid::template Bits<kWarpRows, kTileKeys>;
        Bits bits;
        KvTiles<kPaged, kChunks, kChunksV, kTileKeys, kThreads, Grid::template Stream> tiles(thread, p, block, sequence.k_offset(),
                                                                                             key, key_end);
        using StreamK = TileStream<kChunks, kTileKeys, kThreads>;
        using StreamV = TileStream<kChunksV, kTileKeys, kThreads>;
        // K and V in flight from global to shared memory.
        uint4 staging[larger_of(StreamK::kPasses, StreamV::kPasses)][larger_of(StreamK::kChunksPerRow, StreamV::kChunksPerRow)] =
            {};
        const u32 q_lane = keep_in_register(base + swizzled<kChunks>(warp_row + lane.q_row(), 0));
        const u32 k_lane = keep_in_register(base + kOffsetK + swizzled<kChunks>(group_key + lane.k_row(), 0));
        const u32 v_own = keep_in_register(base + kOffsetV + swizzled<kChunksV>(group_key + lane.v_row(), lane.v_chunk()));
        const u32 v_other = keep_in_register(base + kOffsetV + swizzled<kChunksV>(group_key + (lane.v_row() ^ 8), lane.v_chunk()));
        const u32 k_store =
            keep_in_register(base + kOffsetK + swizzled<kChunks>(StreamK::row_of(thread), StreamK::chunk_of(thread)));
        const u32 v_store =
            keep_in_register(base + kOffsetV + swizzled<kChunksV>(StreamV::row_of(thread), StreamV::chunk_of(thread)));
        // Steps that begin at keys unmasked.first to first + span need no mask. A warp of padding rows counts as one at the last
        // row, so that a tile past the last key is masked in all warps.
        UnmaskedKeys<Step> unmasked(mask, min(row, sequence.seqlen_q() - 1), kWarpRows);
        static_assert(!kRequiredFeatures || KeyGroups == 1, "features with state along the keys need steps in order");
        Features<RowTiles, kKeyTiles, Grid> features(p, grid, mask, unmasked, LaneScratch(), row, key);
        if (!kRequiresBias) {  // a bias leaves no registers for the range
            unmasked.first = keep_in_register(unmasked.first);
            unmasked.span = keep_in_register(unmasked.span);
        }

        const float scale = features.scale(p), inverse_scale = 1.f / scale;  // `scale` turns what the softmax takes to log2 units
        SoftmaxState<RowTiles> softmax;
        // with ALiBi, row maxima begin at the score of each row's nearest visible key; else this does nothing
        features.init_row_max(softmax, p, mask, rows_of(p.q, block.batch, block.head, sequence.q_offset()),
                              rows_of(p.k, block.batch, block.head_k, sequence.k_offset()), row);
        Accumulators o;
        clear_tiles(o);

        if constexpr (kHeads == 1) {
            tiles.load_k(staging, p, keys.first());
            tiles.k.store(staging, k_store, kPitch, false);  // false: also stores padding columns. Later (true) they are still 0
            tiles.load_v(staging, p, keys.first());
        } else {  // V does not wait for K either
            uint4 first[StreamK::kPasses][StreamK::kChunksPerRow] = {};
            tiles.load_k(first, p, keys.first());
            tiles.load_v(staging, p, keys.first());
            tiles.k.store(first, k_store, kPitch, false);
        }
        __syncthreads();
#pragma unroll 1
        for (; keys.exists(); keys.advance(grid)) {
            const int key = keys.first();
            Tile s;
            bits.load(grid, keys, 0);  // 0: of this step, not a later one
            ScoreBias<ForwardLayout, RowTiles, kKeyTiles> bias;
            if (kBiasAhead && p.score_options.bias) bias.load(p, row, key + group_key);
            features.init_accumulators(p, s, row, key + group_key);
            features.load(p, row, key + group_key);
            add_scores(s, q_lane, k_lane);
            features.add_to(p, s);
            if (kGeneric) {
                s.apply_score_mod(p, mask, row, key + group_key);
                if (kHasBias && p.score_options.bias) {
                    if (!kBiasAhead) bias.load(p, row, key + group_key);
                    bias.add_to(s, p.score_options);
                }
            }
            // A step that reaches past the last key has masked scores, but perhaps only in the last key group.
            bool masked = !unmasked.contains(key + group_key) || keys.has_bits();
            // A vote, although all lanes agree: it tells the compiler that no warp diverges.
            if (kListed) masked = __any_sync(~0u, masked);
            if (masked) {
                features.correct_masked_tile(s, softmax, unmasked, p, mask, row, key + group_key);
                if constexpr (Bits::kHidesAll) {
                    bits.combine(keys, mask, row, !unmasked.contains(key + group_key));
                    bits.apply_to(s);
                } else {
                    s.apply_mask(mask, row, key + group_key);
                }
                // Clears V past the last key: P = 0 times NaN would be NaN. A step masked for its bits alone has no such key.
                if (KeyGroups == 1 && !(kListed && unmasked.contains(key))) tiles.v.clear_beyond(staging, key);
            }
            if (KeyGroups > 1 && key + kTileKeys > key_end) tiles.v.clear_beyond(staging, key);
            tiles.v.store(staging, v_store, kPitchV, false);
            tiles.load_k(staging, p, keys.after(1));
            __syncthreads();
            if (s.needs_rescale(softmax))
                features.update_row_max(s, softmax, scale, inverse_scale, rescale_output<ForwardLayout>(o));
            features.set_masked(masked, s);
            // Rolled to halve the code. Registers cannot be indexed, so the scores move down by one tile instead.
            u32 v_offset = 0;
#pragma unroll 1
            for (int tile = 0; tile < kKeyTiles; tile++, v_offset += 16 * kPitchV) {
                Probabilities<RowTiles> probabilities;
                DropoutBits<ForwardLayout, RowTiles> kept;
                if (kGeneric && kHasDropout && p.score_options.rng_state) kept.draw(p, row, key + group_key + 16 * tile);
                typename Features<RowTiles, kKeyTiles, Grid>::Numbers numbers;
                features.draw(numbers, p, row, key + group_key + 16 * tile);
#pragma unroll
                for (int u = 0; u < 2; u++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
#pragma unroll
                        for (int v = 4 * u; v < 4 * u + 4; v++) {
                            s.tile[mt][0][v] =
                                softmax.row[mt][ForwardLayout::row_of(v)].probability(features.score(s.tile[mt][0][v]), scale);
                            if (kGeneric && kHasDropout && !kept(mt, v)) s.tile[mt][0][v] = 0.f;
                        }
                        probabilities.pack_own(lane, mt, u, s.tile[mt][0],
                                               [&](u32& x, u32& y) { features.drop(x, y, numbers, p, mt, u); });
                    }
                accumulate(o, probabilities, v_own + v_offset, v_other + v_offset);
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                    for (int nt = 1; nt < kKeyTiles; nt++)
#pragma unroll
                        for (int v = 0; v < 8; v++) s.tile[mt][nt - 1][v] = s.tile[mt][nt][v];
            }
            tiles.k.store(staging, k_store, kPitch, true);  // true: no chunks past the last column, which are 0 already
            tiles.load_v(staging, p, keys.after(1));
            __syncthreads();
        }
        features.finish(softmax, scale);
        if (KeyGroups > 1 && !combine_key_groups(base, thread, group, softmax, o)) return;
        if (!grid.template combine_splits<kThreads>(softmax, o)) return;  // another block writes out
        write_output<RowTiles, kOutputTiles>(p, lane, grid.remat_batch(problem), grid.remat_head(problem), row, softmax, o);
    }
};

// The kernel as most rows in src/kernels name it. Blocks of fewer than 128 rows have two key groups.
constexpr int kKeyGroups = BLOCK_ROWS < 128 ? 2 : 1;
template <class Grid>
using SharedQ = ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS * kKeyGroups / (THREADS / 32) / 16, STEP / kKeyGroups,
                               kKeyGroups, BLOCKS_PER_SM, Grid>;

}  // namespace volta
