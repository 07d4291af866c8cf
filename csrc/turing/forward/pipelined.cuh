// Forward kernel of the turing family up to headdim 256, software-pipelined: from fp16 q, k and v to out (fp16 or fp32) and
// softmax_lse. Q, scores, P and output are in registers. csrc/entry.cu calls run() of `Pipelined`, at the end of this file, for
// most forward and prefill (paged) rows of src/kernels/turing.
//
// m16n8k8 takes 8 keys, so a warp works on tiles of 8 keys, three of them at once in different stages:
//
//   tile i + 1: S = Q K^T        tile i: softmax        tile i - 1: O += P V
//
// So there are always products and arithmetic that do not depend on each other. A step is two tiles, `half` 0 and 1, which may
// interleave its 16 keys: a lane's keys of the second are kNextTile (1, 2 or 8) after those of the first. K and V move through a
// ring of slots in shared memory, a step each. Step j reads K of steps j and j + 1, and V of steps j - 1 and j. It stores step
// j + kAhead, and loads that step or the one after it (CopyPlacement). With kAhead = 3, two steps touch slots j - 1 to j + 4. Eight
// slots keep these apart, so every second step has a barrier. With four slots and kAhead = 2 every step has one.
//
// Most steps need no mask. Where registers allow (kUnmaskedLoop) they have a loop of their own, because the test alone takes 3 to
// 6% of the time. With a block mask (Grid::kListed) lists name the key blocks, of 64 keys, that the rows see.
//
// Row maxima lag: a tile takes the maxima so far. If a lane's two probabilities of a row then sum to more than kLargestSum, 2^7,
// end_softmax() moves the maxima and computes the tile's probabilities again: times 2^8, as P is packed, they must fit fp16. With
// kRescaleBeforeExp the test comes first: fewer registers, more time. kInitialAlibi, kInitialBias, kOnlyFunction (the score
// function, softcap) and kCarriedDropout: all problems of the kernel use that feature.
//
// PipelinedParts (pipelined_parts.cuh) has sizes, choices and helpers, and the reason of each constant kName below. run() is the
// schedule: it loads Q, fills kAhead slots of the ring, computes the scores of tile 0, and then runs the steps. At the end come P V
// of the last tile and write_output() (layout.cuh). The lambdas of run():
//
//   load, store       copy a pass of a step: from global memory to registers; from there to a slot. A thread copies at most one
//                     chunk (8 columns) of K and of V in a pass, and a step has kPasses, one or two
//   copy_in_tile, copy_at  the same inside tile(), where CopyPlacement says so
//   begin             sets a tile's initial accumulators: 0, ALiBi's terms or the bias
//   end_softmax       ends the softmax of the tile before: moves row maxima if they lag too far, adds the tile's sums
//   tile, step        the three stages above for one i; a barrier, where one is due, and two tiles
//   steps, block_steps, listed_steps  loops over steps: of a range of keys; of one listed key block; of listed key blocks
//
//   StreamK, StreamV  a thread's copies of K and V (RowStream, row_stream.cuh; not stream-K)
//   mt, r, c          a tile of 16 query rows of the warp; one of a lane's two rows in it; a group of four chunks
//   fragments         a lane's operands K and V of a group c and one tile: one ldmatrix each
//   keys              under a block mask, iterator over listed steps: first() is the step's first key, after(n) that n steps later,
//                     has_bits() whether bits hide some of its scores, number_modulo<n>() the step's number modulo n
//   bits              under a block mask, which single scores exist: load(..., n) loads the bits of the step n later, combine()
//                     adds the other masks, apply_to() hides scores
//   OperandA          a lane's part of operand A: 16 rows of Q by a chunk, or P of 16 rows by 8 keys (layout.cuh)
//   remat_*           compute a value again, so that it holds no register in between; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kPaged, kHas..., kGeneric  what this kernel is compiled for (features.cuh); generic: parameters choose score features
//   problem.scale_log2, sign_flip  |softmax_scale| * log2(e); 0x80008000 (signs of two fp16) if softmax_scale is negative, else 0
//   HEADDIM, HEADDIM_V, BLOCK_ROWS, STEP, THREADS, SHARED_BYTES  the kernel's row in src/kernels: columns of Q and K, and of V;
//                     query rows, keys of a step, threads and shared memory of a block
#pragma once

#include "turing/forward/pipelined_parts.cuh"

namespace turing {

// A warp has 16 * RowTiles query rows. Slots: of the ring. Grid: the policy that tells a thread block its rows, heads and keys.
template <int Headdim, int HeaddimV, int Warps, int RowTiles, int Slots, class Grid = DenseGrid>
struct ForwardPipelined : PipelinedParts<Headdim, HeaddimV, Warps, RowTiles, Slots, Grid> {
    using Parts = PipelinedParts<Headdim, HeaddimV, Warps, RowTiles, Slots, Grid>;
    using Parts::copy_positions, Parts::slot_after, Parts::remat_warp_row, Parts::remat_warp_head, Parts::remat_mask,
        Parts::function_of, Parts::update_row_max, Parts::needs_rescale, Parts::update_row_max_before_exp;
    using Parts::kThreads, Parts::kWarpRows, Parts::kBlockRows, Parts::kHeads, Parts::kHeadRows, Parts::kStep, Parts::kChunks,
        Parts::kChunksV, Parts::kGroups, Parts::kGroupsV, Parts::kMostGroups, Parts::kTileBytes, Parts::kTileBytesV,
        Parts::kOffsetV, Parts::kSlotBytes, Parts::kRingBytes, Parts::kInitialAlibi, Parts::kInitialBias, Parts::kOnlyFunction,
        Parts::kCarriedDropout, Parts::kBackwards, Parts::kNextTile, Parts::kBarrierEverySecondStep, Parts::kAhead, Parts::kPasses,
        Parts::kRegistersFull, Parts::kFragmentsAhead, Parts::kChunkCoordsKept, Parts::kStreamsKept, Parts::kStreamsInShared,
        Parts::kPagesInBranch, Parts::kMaskKept, Parts::kRescaleBeforeExp, Parts::kKeysKept, Parts::kBlockLoop,
        Parts::kCopyPlacement, Parts::kCopiesInTiles, Parts::kUnmaskedLoop, Parts::kBitsAhead, Parts::kEnd, Parts::kLargestSum;
    using typename Parts::Block, typename Parts::CopyPlacement, typename Parts::CopyPositions, typename Parts::Fragments,
        typename Parts::Keys, typename Parts::Output, typename Parts::Probabilities, typename Parts::Softmax,
        typename Parts::StreamK, typename Parts::StreamV, typename Parts::Tile, typename Parts::TileSoftmax;
    // Sizes: kChunks, kGroups, kTileBytes are of Q and K, those with V of V and the output. kOffsetV: bytes from K to V in a slot.
    // Choices by the registers that a kernel leaves free (kRegistersFull: few):
    //   kFragmentsAhead   whether fragments are loaded while the products of the group before run, else when they are used
    //   kChunkCoordsKept  whether registers keep the row and chunk that a thread copies; kStreamsKept: these chunks' addresses in
    //                     row 0; kMaskKept: the mask; kKeysKept: the keys of all Philox rounds; else they are computed again
    //   kStreamsInShared  whether those addresses lie in shared memory, after the ring
    // kPagesInBranch: a branch guards loads of page numbers, else a predicate. kBlockLoop: loops over listed key blocks and inside
    // over their steps. kBitsAhead: steps from the load of a block mask's bits to their use. kEnd: a copy after a tile's products.
    // CopyPlacement; kCopiesInTiles: kLoadFirst, kStoreFirst or kBothPasses:
    //   kBetweenTiles     after the first tile, with two passes also after the second: store, then load
    //   kLoadFirst        one pass: the first tile loads, the second stores; kStoreFirst: the first stores, the second loads
    //   kBothPasses       two passes: each tile stores one and loads the other
    //   kAtProducts       between products, by copy_at(): kernels with kBlockLoop

    __device__ __forceinline__ static void run(const FwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 ring = shared_address(shared);
        const Problem& problem = p.problem;
        const Block block(problem, grid);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(problem, sequence);
        const int thread = threadIdx.x, lane = thread & 31;
        const int row = block.row + (kHeads == 1 ? thread / 32 * kWarpRows : 0),
                  head = block.head + (kHeads == 1 ? 0 : thread / 32);
        // The warp's first row. Without lists it is computed again at each use.
        const int kept_row = Grid::kListed ? keep_in_register(row) : 0;
        const auto warp_row = [&] { return Grid::kListed ? kept_row : remat_warp_row(p); };
        int key_first = Grid::kListed ? 0 : first_step<kStep>(mask.key_first(block.row));
        if (kHasScoreFeatures) key_first &= ~3;  // bias and random numbers come in groups of 4 keys
        if (kPaged) key_first &= ~(kPageGroup - 1);  // a step lies in one page: pages have multiples of kPageGroup (16) tokens
        const int key_end = Grid::kListed ? mask.seqlen_k : mask.key_end(block.row, kHeadRows);
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;  // out stays NaN, as the library filled it
        }
        // kBackwards: with ALiBi, scores rise toward a row's own position, so row maxima settle early if it comes first. Steps go
        // from own_key's, the position of the block's last row, down to key_first, then from key_last down to the one after it.
        const int own_key = block.row + kBlockRows - 1 + sequence.seqlen_k() - sequence.seqlen_q();
        const int key_last = key_first + (key_end - 1 - key_first) / kStep * kStep;
        int key = kBackwards ? key_first + max(min(own_key, key_end - 1) - key_first, 0) / kStep * kStep : key_first;
        Keys keys(grid, block, key, key_end);
        using Bits = typename Grid::template Bits<kWarpRows, kStep>;
        Bits bits;
        // Loads of Q, in flight while the list is decoded. Not in q, so that kernels without lists keep their machine code.
        OperandA loaded_q[kBlockLoop ? RowTiles : 1][kBlockLoop ? kChunks : 1];
        if constexpr (kBlockLoop) {
            Grid::begin_load_queries(loaded_q, p.q, rows_of(p.q, block.batch, head, sequence.q_offset()), row, sequence.seqlen_q(),
                                     problem.headdim);
            keys.start(grid.lists(), key_end);
        }
        if (Grid::kListed) key = keys.first();

        Softmax softmax;
        Output o;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kChunksV; j++)
#pragma unroll
                for (int w = 0; w < ForwardLayout::kElements; w++) o[mt][j][w] = 0.f;
        if (Grid::kListed ? keys.exists() : key_first < key_end) {
            OperandA q[RowTiles][kChunks];
            if (!kBlockLoop)
                load_queries(q, p.q, rows_of(p.q, block.batch, head, sequence.q_offset()), row, sequence.seqlen_q(),
                             problem.headdim, problem.sign_flip);

            const unsigned k_stride = p.k.row_stride, v_stride = p.v.row_stride;
            // The thread's number for V. Where a pass needs not all threads, warps count backwards: the first load K, the last V.
            const int thread_v = StreamV::kAllTakePart ? thread : kThreads - 32 - (thread & ~31) + lane;
            // With pages these point into page 0, and pages.address() adds that of the step's only group, 0.
            const StreamK kept_k(
                thread,
                kPaged ? head_base(p.cache.k, 0, block.head_k) : rows_of(p.k, block.batch, block.head_k, sequence.k_offset()),
                problem.headdim);
            const StreamV kept_v(
                thread_v,
                kPaged ? head_base(p.cache.v, 0, block.head_k) : rows_of(p.v, block.batch, block.head_k, sequence.k_offset()),
                problem.headdim_v);
            // 1: a step is one group of kPageGroup tokens. Without pages, calls compile to nothing (forward/pages.cuh).
            PageIteratorIfPaged<kStep, 1, kPagesInBranch> pages(p.cache, block.batch, sequence.k_offset(), key, key_end);
            const int head_k = kPaged ? keep_in_register(block.head_k) : 0;
            uint4 k_data = zero_chunk(), v_data = zero_chunk();  // columns of K past the matrix are never loaded and stay zero
            const u32 k_store = keep_in_register(ring + StreamK::offset(thread));
            const u32 v_store = kChunks == kChunksV && StreamV::kAllTakePart
                                    ? k_store + kOffsetV
                                    : keep_in_register(ring + kOffsetV + StreamV::offset(thread_v));
            const u32 k_fragment = keep_in_register(ring + swizzled<kChunks>(lane % 8, lane / 8));
            const u32 v_fragment = kChunks == kChunksV ? k_fragment + kOffsetV
                                                       : keep_in_register(ring + kOffsetV + swizzled<kChunksV>(lane % 8, lane / 8));
            // After the ring, 16 bytes a thread: its addresses in K and V. Then 16 more: its key, `inside`, ALiBi's constants.
            if (kStreamsInShared) {  // written by the thread that will read it
                static_assert(!kStreamsInShared || (StreamK::kPasses == 1 && StreamK::kAllTakePart), "one chunk of K and one of V");
                const auto k = reinterpret_cast<unsigned long long>(kept_k.column);
                const auto v = reinterpret_cast<unsigned long long>(kept_v.column);
                store_shared(ring + kRingBytes + 16 * thread, make_uint4(k, k >> 32, v, v >> 32));
                store_shared2(ring + kRingBytes + 16 * kThreads + 16 * thread, StreamK::key_of(thread), kept_k.inside);
            }
            // The thread's key in a step's first pass, counted from the step's first: of K, then of V.
            const int k_row = keep_in_register(StreamK::key_of(thread));
            const int v_row = kChunks == kChunksV && StreamV::kAllTakePart ? k_row : keep_in_register(StreamV::key_of(thread_v));
            // First key of the step that comes `steps` later. (After the last one, backwards, it may be clamped to 0.)
            const auto key_after = [&](int key, int steps) {
                if (Grid::kListed) return keys.after(steps);
                if (!kBackwards) return key + steps * kStep;
                const int after = key - steps * kStep;
                return max(after < key_first ? after + (key_last - key_first + kStep) : after, 0);
            };
            // Loads the thread's chunks of a pass of the step whose first key is first_key. load<true>: K's chunks past the matrix
            // are not loaded. V's (false) are its last chunk again: those columns of the output are not stored.
            const auto load = [&](int pass, int first_key) {
                if constexpr (kPaged) {
                    const int t = kChunkCoordsKept ? thread : remat_thread_index();
                    const StreamK k_here = kStreamsKept ? kept_k : StreamK(t, head_base(p.cache.k, 0, head_k), problem.headdim);
                    const StreamV v_here = kStreamsKept ? kept_v : StreamV(t, head_base(p.cache.v, 0, head_k), problem.headdim_v);
                    // Rows past the last are not loaded. What the registers held stays, and is multiplied by 0.
                    const int row = (kChunkCoordsKept ? k_row : StreamK::key_of(t)) + pass * StreamK::kKeysToNextPass;
                    const bool exists = first_key + row < key_end;
                    load_global_if(exists && k_here.inside, k_data, pages.address(p.cache, p.cache.k, k_here.column, 0, row));
                    load_global_if(exists, v_data, pages.address(p.cache, p.cache.v, v_here.column, 0, row));
                    if (pass == kPasses - 1) pages.advance(p.cache, first_key + kStep, key_end);
                    return;
                }
                StreamK k = kept_k;
                StreamV v = kept_v;
                if (kStreamsInShared) {
                    const u32 from = ring + kRingBytes + 16 * remat_thread_index();
                    const uint4 columns = load_shared(from);
                    k.column =
                        reinterpret_cast<const unsigned short*>(columns.x | static_cast<unsigned long long>(columns.y) << 32);
                    v.column =
                        reinterpret_cast<const unsigned short*>(columns.z | static_cast<unsigned long long>(columns.w) << 32);
                    const uint2 saved = load_shared2(from + 16 * kThreads);
                    k.inside = saved.y;
                    k.template load<true>(k_data, pass, k_stride, first_key + saved.x, key_end - 1);
                    v.template load<false>(v_data, pass, v_stride, first_key + saved.x, key_end - 1);
                    return;
                }
                if (pass < StreamK::kPasses)
                    k.template load<true>(k_data, pass, k_stride,
                                          first_key + (kChunkCoordsKept ? k_row : StreamK::key_of(remat_thread_index())),
                                          key_end - 1);
                if (pass < StreamV::kPasses)
                    v.template load<false>(v_data, pass, v_stride,
                                           first_key + (kChunkCoordsKept ? v_row : StreamV::key_of(remat_thread_index())),
                                           key_end - 1);
            };
            // Stores what was loaded for a pass to a slot of the ring, at this offset in bytes.
            const auto store = [&](int pass, u32 slot) {
                const u32 k_to = kChunkCoordsKept ? k_store : ring + StreamK::offset(remat_thread_index());
                if (pass < StreamK::kPasses) kept_k.store(k_data, pass, k_to + slot);
                const u32 v_to = kChunkCoordsKept ? v_store : ring + kOffsetV + StreamV::offset(remat_thread_index());
                if (pass < StreamV::kPasses) kept_v.store(v_data, pass, v_to + slot);
            };
            // Copies of a loop over listed key blocks, at position `at` of tile `half` (before the products of this chunk, or
            // kEnd): those that have this number in `positions`. Stores to `slot`, and loads the step whose first key is
            // `first_key`.
            const auto copy_at = [&](const CopyPositions& positions, int at, int half, u32 slot, int first_key) {
                const int pass = kPasses == 2 ? half : 0, load_pass = kPasses == 2 ? 1 - half : 0;
                const u32 k_to = kChunkCoordsKept ? k_store : ring + StreamK::offset(remat_thread_index());
                const u32 v_to = kChunkCoordsKept ? v_store : ring + kOffsetV + StreamV::offset(remat_thread_index());
                if (at == positions.store_k && pass < StreamK::kPasses) kept_k.store(k_data, pass, k_to + slot);
                if (at == positions.store_v && pass < StreamV::kPasses) kept_v.store(v_data, pass, v_to + slot);
                const int k_key = first_key + (kChunkCoordsKept ? k_row : StreamK::key_of(remat_thread_index()));
                const int v_key = first_key + (kChunkCoordsKept ? v_row : StreamV::key_of(remat_thread_index()));
                if (at == positions.load_k && load_pass < StreamK::kPasses)
                    kept_k.template load<true>(k_data, load_pass, k_stride, k_key, key_end - 1);
                if (at == positions.load_v && load_pass < StreamV::kPasses)
                    kept_v.template load<false>(v_data, load_pass, v_stride, v_key, key_end - 1);
            };

            // Factor of scores in the exponent. Those of generic kernels are in log2 units already.
            const float scale = kGeneric ? 1.f : kOnlyFunction ? function_of(p).factor() : problem.scale_log2;
            Probabilities probabilities[2] = {};
            TileSoftmax tile_softmax;  // of the tile before
            InitialAlibi<RowTiles> alibi;
            if (kInitialAlibi) {
                alibi.start(p, mask, row);
                if (kStreamsInShared)
                    store_shared2(ring + kRingBytes + 16 * kThreads + 16 * thread + 8, __float_as_uint(alibi.neg_slope),
                                  __float_as_uint(alibi.distance));
            }
            InitialBias<RowTiles> bias;
            if (kInitialBias) {
                bias.start(p, row);
                bias.load(p, key);
            }
            // Sets a tile's initial accumulators. `first_key`: its step's first key.
            const auto begin = [&](Tile& s, int half, int first_key) {
                if (kInitialAlibi) {
                    InitialAlibi<RowTiles> here = alibi;
                    if (kStreamsInShared) {
                        const uint2 kept = load_shared2(ring + kRingBytes + 16 * kThreads + 16 * remat_thread_index() + 8);
                        here.neg_slope = __uint_as_float(kept.x), here.distance = __uint_as_float(kept.y);
                    }
                    here.init_scores(s, first_key + half * kNextTile);
                } else if (kInitialBias)
                    bias.init_scores(s, half);
                else
                    s.clear();
            };
            StepDropoutMask<RowTiles> dropout;
            // Carried: registers keep seed, offset and head for the whole loop. Else tile() reads them in each step.
            const Philox philox = kCarriedDropout ? dropout.numbers_of(p) : Philox();
            Philox::RoundKeys round_keys;  // of the random generator, if registers have room (kKeysKept)
            if (kCarriedDropout && kKeysKept) {
                round_keys = philox.round_keys();
#pragma unroll
                for (int i = 0; i < 2 * kPhiloxRounds; i++)
                    round_keys.key[i / 2][i % 2] = keep_in_register(static_cast<int>(round_keys.key[i / 2][i % 2]));
            }

#pragma unroll
            for (int pass = 0; pass < StreamV::kPasses; pass++)
                kept_v.store(v_data, pass, v_store + slot_after(0, -1));  // zeros: the first tile multiplies them by P = 0
            if constexpr (kBlockLoop) {  // issues all loads before the first store: short lists do not hide their latency
                uint4 k_first[kAhead * kPasses], v_first[kAhead * kPasses];
#pragma unroll
                for (int i = 0; i < kAhead * kPasses; i++) {
                    const int pass = i % kPasses, first_key = key_after(key, i / kPasses);
                    k_first[i] = zero_chunk();
                    if (pass < StreamK::kPasses)
                        kept_k.template load<true>(k_first[i], pass, k_stride, first_key + k_row, key_end - 1);
                    if (pass < StreamV::kPasses)
                        kept_v.template load<false>(v_first[i], pass, v_stride, first_key + v_row, key_end - 1);
                }
#pragma unroll
                for (int i = 0; i < kAhead * kPasses; i++) {
                    const int pass = i % kPasses;
                    const u32 slot = i / kPasses * kSlotBytes;
                    if (pass < StreamK::kPasses) kept_k.store(k_first[i], pass, k_store + slot);
                    if (pass < StreamV::kPasses) kept_v.store(v_first[i], pass, v_store + slot);
                }
                Grid::end_load_queries(q, loaded_q, problem.sign_flip);
            } else {
#pragma unroll
                for (int i = 0; i < kAhead * kPasses; i++) {
                    load(i % kPasses, key_after(key, i / kPasses));
                    store(i % kPasses, i / kPasses * kSlotBytes);
                }
            }
            // With other placements a step stores before it loads, so what the first step stores is loaded here.
            if (kCopyPlacement != CopyPlacement::kLoadFirst) load(0, key_after(key, kAhead));
            __syncthreads();

            // Scores of even and of odd tiles.
            Tile scores[2];
            begin(scores[0], 0, key);
            if (kInitialBias) bias.load(p, key_after(key, 1));
            Fragments fragments;
#pragma unroll
            for (int c = 0; c < kGroups; c++) {
                fragments.load_k(k_fragment, c);
                unrolled<4, RowTiles>([&](int i, int mt) { mma(scores[0].tile[mt][0], q[mt][4 * c + i], fragments.k[i]); });
            }

            // Ends the softmax of the tile before, number `half` of its step, while its scores s still exist. The test for too
            // large probabilities is here, after the next tile's products, so that it waits for nothing.
            const auto end_softmax = [&](const Tile& s, Probabilities& p_last, int half) {
                if (kRescaleBeforeExp) return;
                if (__any_sync(~0u, tile_softmax.largest > kLargestSum))
                    update_row_max(p, s, tile_softmax, softmax, scale, o, p_last, dropout, half);
                unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) { softmax.row[mt][r].sum += tile_softmax.sum[mt][r]; });
            };

            // Stores and loads of a tile (kCopiesInTiles). Not inside tile(): a lambda there costs registers in kernels that never
            // call it, and block masks at headdim 128 then spill 24 bytes. `slot` and `step_key`: of this step.
            const auto copy_in_tile = [&](int half, u32 slot, int step_key) {
                constexpr bool kStoresFirst = kCopyPlacement == CopyPlacement::kStoreFirst;
                if (kCopyPlacement == CopyPlacement::kBothPasses) {
                    store(half, slot_after(slot, kAhead));
                    load(1 - half, key_after(step_key, kAhead + half));
                } else if (kStoresFirst == (half == 0)) {
                    store(0, slot_after(slot, kAhead));
                } else {
                    load(0, key_after(step_key, kStoresFirst ? kAhead + 1 : kAhead));
                }
            };
            // Whether this listed key block needs a mask. Read only where one loop runs all of them (!kUnmaskedLoop).
            bool is_masked = true;
            // Computes one tile, `half` of the step whose first key is step_key: scores s become probabilities p_this. Also
            // computes the next tile's scores s_next, and O += P V of the tile before, whose P is p_last; its scores are s_next on
            // entry. Shared addresses of a lane: K of the next tile (k_address), V of the tile before (v_address), the same for the
            // next call (k_ahead, v_ahead). may_mask: the tile may need a mask. `slot`: the step's for copy_in_tile(); for
            // copy_at() the one to store to, and loaded_key is the first key of the step to load.
            const auto tile = [&](bool may_mask, const Mask& mask, Tile& s, Tile& s_next, Probabilities& p_last,
                                  Probabilities& p_this, u32 k_address, u32 v_address, u32 k_ahead, u32 v_ahead, int step_key,
                                  int half, u32 slot, int loaded_key) {
                const int first_key = step_key + half * kNextTile;
                end_softmax(s_next, p_last, 1 - half);
                if constexpr (kCopiesInTiles && !kRescaleBeforeExp) copy_in_tile(half, slot, step_key);
                if (kInitialBias && uses_fp32_bias(p.score_options)) bias.add_fp32(p, s, half, step_key);
                if (kGeneric) {
                    s.apply_score_mod(p, mask, warp_row(), first_key);
                    if (kHasBias && p.score_options.bias) {
                        ScoreBias<ForwardLayout, RowTiles, 1> bias;
                        bias.load(p, warp_row(), first_key);
                        bias.add_to(s, p.score_options);
                    }
                }
                if (kHasDropout && !kCarriedDropout && half == 0) {  // a generic kernel: the problem may have no dropout
                    if (p.score_options.rng_state) {
                        const Philox philox = dropout.numbers_of(p);
                        dropout.template draw<kRegistersFull>(p, warp_row(), step_key,
                                                              [&](int row, int key) { return philox.numbers(row, key); });
                    } else {
                        dropout.keep_all(p);
                    }
                }
                // kHidesAll: a block mask's bits hide scores. combine() prepares those of this step, or of the next (1). `true`: it
                // also clears the bits of keys that causal mask, window or lengths hide.
                if constexpr (Bits::kHidesAll) {
                    if (!kBlockLoop) {
                        if (may_mask && half == 0) bits.combine(keys, kMaskKept ? mask : remat_mask(p), warp_row(), true);
                        if (may_mask) bits.apply_to(s, half * kNextTile);
                    } else if (may_mask && (kUnmaskedLoop || is_masked)) {
                        if (kBitsAhead == 1 && half == 0) bits.combine(keys, kMaskKept ? mask : remat_mask(p), warp_row(), true);
                        bits.apply_to(s, half * kNextTile);
                        if (kBitsAhead == 2 && half == 1) bits.combine(keys, kMaskKept ? mask : remat_mask(p), warp_row(), true, 1);
                        if (half == 1) bits.load(grid, keys, kBitsAhead);
                    }
                } else {
                    if (may_mask) s.apply_mask(kMaskKept ? mask : remat_mask(p), warp_row(), first_key);
                }
                if (kRescaleBeforeExp && needs_rescale(s, softmax, scale)) update_row_max_before_exp(s, softmax, scale, o, p_last);
                if constexpr (kCopiesInTiles && kRescaleBeforeExp) copy_in_tile(half, slot, step_key);
                begin(s_next, 1 - half, half ? key_after(step_key, 1) : step_key);
                if (kCarriedDropout && half == 0)  // the mask of both tiles of the step
                    dropout.template draw<kRegistersFull>(p, warp_row(), step_key, [&](int row, int key) {
                        return kKeysKept ? philox.numbers(row, key, round_keys) : philox.numbers(row, key);
                    });
                if (kInitialBias && half == 1) bias.load(p, key_after(step_key, 2));  // begin() has taken the next step's
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
                        if constexpr (kBlockLoop) copy_at(copy_positions(may_mask, half), chunk, half, slot, loaded_key);
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
                                p_this[mt][r] = may_mask ? tile_softmax.template probabilities<true>(p, s, softmax, scale, mt, r)
                                                         : tile_softmax.template probabilities<false>(p, s, softmax, scale, mt, r);
                                if (kHasDropout) p_this[mt][r] = dropout.apply(p, p_this[mt][r], mt, r, half);
                            }
                    }
                }
                if constexpr (kBlockLoop) copy_at(copy_positions(may_mask, half), kEnd, half, slot, loaded_key);
            };

            if (kFragmentsAhead) {
                fragments.load_k(k_fragment + kTileBytes, 0);
                fragments.load_v(v_fragment + slot_after(0, -1) + kTileBytesV, 0);
            }
            u32 slot = 0;  // of this step
            // Runs a step: a barrier, where one is due, tile 0 and tile 1, with the copies of kBetweenTiles.
            const auto step = [&](bool may_mask, const Mask& mask) {
                if constexpr (Grid::kListed) {  // computed again, so that they hold no registers between steps
                    key = keys.first();
                    slot = keys.template number_modulo<Slots>() * kSlotBytes;
                }
                if (!kBarrierEverySecondStep || slot % (2 * kSlotBytes) == 0) block_barrier();
                const u32 next = slot_after(slot, 1);
                // the lane's shared addresses in the slots of this step, the next and the last; then tile()'s slot and loaded_key
                const u32 k_this = k_fragment + slot, v_this = v_fragment + slot;
                const u32 k_next = k_fragment + next, v_last = v_fragment + slot_after(slot, -1);
                const u32 tile_slot = kBlockLoop ? slot_after(slot, kAhead) : slot;
                const int first_loaded = kBlockLoop ? key_after(key, kAhead + 2 - kPasses) : 0;
                const int second_loaded = kBlockLoop ? key_after(key, kAhead + 1) : 0;
                tile(may_mask, mask, scores[0], scores[1], probabilities[1], probabilities[0], k_this + kTileBytes,
                     v_last + kTileBytesV, k_next, v_this, key, 0, tile_slot, first_loaded);
                if constexpr (Grid::kListed && !kBlockLoop)
                    if (may_mask) bits.load(grid, keys, 1);
                if (kCopyPlacement == CopyPlacement::kBetweenTiles) {
                    store(0, slot_after(slot, kAhead));
                    // the second pass of the same step, or with one pass the step after it
                    load(kPasses - 1, key_after(key, kAhead + 2 - kPasses));
                }
                tile(may_mask, mask, scores[1], scores[0], probabilities[0], probabilities[1], k_next, v_this, k_next + kTileBytes,
                     v_this + kTileBytesV, key, 1, tile_slot, second_loaded);
                if (kPasses == 2 && kCopyPlacement == CopyPlacement::kBetweenTiles) {
                    store(1, slot_after(slot, kAhead));
                    load(0, key_after(key, kAhead + 1));
                }
                if (!Grid::kListed) slot = next;
            };
            // Runs the steps from `key` on that begin before key `until`; backwards, those that begin at `until` or after it.
            const auto steps = [&](bool may_mask, int until) {
                const Mask mask = remat_mask(p);
#pragma unroll 1
                for (; kBackwards ? key >= until : key < until; key += kBackwards ? -kStep : kStep) step(may_mask, mask);
            };
            if constexpr (kBlockLoop) {  // block masks without score features: listed key blocks, in each its steps
                // Runs the steps of a listed key block.
                const auto block_steps = [&](bool may_mask) {
                    const Mask mask = remat_mask(p);
                    // Partial key blocks come first in a list. So a block with bits is the first or follows one with bits, and the
                    // bits of its first step are combined already.
                    if (may_mask && kBitsAhead == 2 && !keys.has_bits()) bits.combine(keys, mask, warp_row(), true);
#pragma unroll 1
                    do step(may_mask, mask);
                    while (keys.advance());
                };
                const auto needs_mask = [&] {
                    const UnmaskedKeys<Keys::kBlockColumns> unmasked(remat_mask(p), warp_row(), kWarpRows);
                    return keys.has_bits() || __any_sync(~0u, !unmasked.contains(keys.first()));
                };
                bits.load(grid, keys, 0);
                if (kBitsAhead == 2) {
                    bits.combine(keys, remat_mask(p), warp_row(), true);
                    bits.load(grid, keys, 1);
                }
                while (keys.exists()) {
                    is_masked = needs_mask();
                    if (!kUnmaskedLoop || is_masked)
                        block_steps(true);
                    else
                        block_steps(false);
                    keys.advance_block();
                }
                slot = keys.template number_modulo<Slots>() * kSlotBytes;
            } else if constexpr (Grid::kListed) {  // block masks with score features: one loop, because two would spill registers
                // Runs steps until a listed key block needs a mask and those before did not, or the other way round.
                const auto listed_steps = [&](bool may_mask) {
                    const Mask mask = remat_mask(p);
                    const auto needs_mask = [&] {
                        const UnmaskedKeys<Keys::kBlockColumns> unmasked(remat_mask(p), warp_row(), kWarpRows);
                        return !kUnmaskedLoop || keys.has_bits() || __any_sync(~0u, !unmasked.contains(keys.first()));
                    };
                    while (keys.exists() && (!keys.begins_block() || needs_mask() == may_mask)) {
                        step(may_mask, mask);
                        keys.advance(grid);
                    }
                };
                bits.load(grid, keys, 0);
                while (keys.exists()) {
                    listed_steps(true);
                    if (kUnmaskedLoop) listed_steps(false);
                }
                slot = keys.template number_modulo<Slots>() * kSlotBytes;
            } else {
                // Masked steps, unmasked ones, masked ones. Their ranges are computed again in between. Steps that begin at keys
                // unmasked.first to `last` need no mask. Backwards the iteration has two parts (kBackwards above).
                const int own_step = key;
                int first_step = key_first;  // backwards: lowest step of this part
                for (;;) {
                    // The shuffle tells ptxas that the row is uniform in a warp.
                    const UnmaskedKeys<kStep> unmasked(remat_mask(p), __shfl_sync(~0u, warp_row(), 0), kWarpRows);
                    const int last = unmasked.first + static_cast<int>(unmasked.span);
                    if (kBackwards) {
                        const int none = key + 1;  // runs no step
                        steps(true, key > last ? max(last + 1, first_step) : key < unmasked.first ? first_step : none);
                        if (key >= first_step && key >= unmasked.first && key <= last)
                            steps(false, max(unmasked.first, first_step));
                        if (key >= first_step) continue;
                        if (first_step > key_first || own_step == key_last) break;
                        key = key_last, first_step = own_step + kStep;
                    } else {
                        steps(true, !kUnmaskedLoop || key > last ? key_end : min(unmasked.first, key_end));
                        if (key >= key_end) break;
                        if (kUnmaskedLoop) steps(false, min(last, key_end - 1) + 1);
                    }
                }
            }
            end_softmax(scores[1], probabilities[1], 1);
            if (kOnlyFunction)  // score = factor * state + constant; row_max has only factor * state, and lse needs both
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                    for (int r = 0; r < ForwardLayout::kRows; r++) softmax.row[mt][r].row_max += ScoreFunction::constant_of(scale);
            // O += P V of the last tile.
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
        write_output(p, remat_block_batch(), remat_warp_head(p), warp_row(), softmax, o);
    }
};

// The kernel of a row in src/kernels, whose KERNEL is Pipelined<DenseGrid>, <HeadGroupGrid<4>> or <BlockMaskGrid<...>>. Its ring
// has as many slots as fit its shared memory, rounded down to a multiple of four. A slot has STEP rows of K and V, of 2 bytes a
// column.
constexpr int kRingSlots = SHARED_BYTES / (2 * STEP * (HEADDIM + HEADDIM_V)) / 4 * 4;
template <class Grid>
using Pipelined =
    ForwardPipelined<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS * kBlockHeads<Grid> / (THREADS / 32) / 16, kRingSlots, Grid>;

}  // namespace turing
