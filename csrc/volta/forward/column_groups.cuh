// Forward kernel of the volta family for headdim 512, whose output does not fit one warp's registers: from fp16 q, k and v to out
// (fp16 or fp32) and softmax_lse. csrc/entry.cu calls run().
//
// The eight warps of a block are two groups of four, or one group. A group has 32 rows, and its warps divide the columns: of Q and
// K in the first product, of V and the output in the second. A step is 16 keys. K, V and partial scores (sums over one warp's
// columns) have buffers of their own, so that a group has two barriers a step:
//
//   S = Q K^T, store partial S  |  sum, mask, softmax, store P  |  O += P V
//
// Two groups are a product apart: while one has its softmax, the tensor cores compute products of the other. Block barriers would
// keep them together. So named barriers order them: warps 0 to 3, the first group, load V, warps 4 to 7 load K, and four barriers
// say that V or K is complete, or has been read. Each group waits at two, and only arrives at the other two. The second group
// begins its first product after the first group's: together, both would wait for shared memory, and then for K and V from L2.
//
// For sums, mask and softmax each warp has a part: eight of the group's rows with all 16 keys. So a row's state is one warp's.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, where quad is lane % 4 and half is lane / 16. A quad-pair is in
// row qm (bit 2 of the lane) and column qn (bit 3) of the warp's 2x2 (volta/mma.cuh). "Group" alone is a group of warps below. A
// part is eight rows of a group (kParts), a chunk eight columns (16 bytes), a pitch the bytes of a row in shared memory.
//
//   mt, r, j          a row tile of 16; one of a lane's two rows in it; an output tile of 16 columns
//   w, u              in O += P V: w is 0 for the eight keys of the lane's quad-pair column, 1 for the others; u is 0 for the even
//                     four of these, 1 for the odd
//   sequence          lengths of the block's sequence, and its first rows in the tensors (q_offset(), k_offset())
//   keys              iterator over the block's steps: first() is the step's first key, after(n) that of the step n later
//   named_sync(i, n), named_arrive()  bar.sync and bar.arrive of barrier i, for n threads; named_sync_or(i, n, x): also returns
//                     whether x is true in any of them
//   remat_*()         read a special register again, so that it holds no register; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kPaged, kHas..., kGeneric  what this kernel is compiled for (features.cuh); kGeneric: score features by parameters
//   problem.scale_log2, sign_flip  |softmax_scale| * log2(e); 0x80008000 (signs of two fp16) if softmax_scale is negative, else 0
//   HEADDIM_V, STEP, THREADS, SHARED_BYTES  the kernel's row in src/kernels: columns of V, keys of a step; threads and shared
//                     memory of a block
#pragma once

#include "forward/block.cuh"  // a block's rows, head and batch entry
#include "forward/pages.cuh"  // PagedTileStream: loads of a KV cache; has_pages(): whether it has all pages of the sequence
#include "volta/forward/required_features.cuh"  // layout.cuh: ForwardLane, ForwardLayout, grid policies
#include "volta/forward/output_product.cuh"  // accumulate_columns()

namespace volta {

// Layout of the summed scores, as score_layout.cuh describes it: of a 16x16 tile of ForwardLayout the lane's first row, with its
// four keys in their order. A warp's lanes so have eight rows; the warp's first row selects which. Element v is query first_query()
// + query_slot(v) and key first_key() + key_slot(v). row_of() and row_slot() give a lane's rows so (here one row, its first).
// kEitherOrder: grids may have heads on their first axis (forward/block.cuh). leads_row(): the one lane that reports a row.
struct ColumnGroupsLayout {
    using Lane = volta::Lane;
    using Tile = float[4];
    static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 4;
    static constexpr bool kEitherOrder = ForwardLayout::kEitherOrder;
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return ForwardLayout::first_query(l); }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return ForwardLayout::first_key(l); }
    __device__ __forceinline__ static constexpr int query_slot(int) { return 0; }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return v; }

    static constexpr int kRows = 1, kKeys = 4;
    __device__ __forceinline__ static constexpr int row_of(int) { return 0; }
    __device__ __forceinline__ static constexpr int row_slot(int) { return 0; }
    static constexpr int kRowLaneMasks[2] = {2, 8};  // shfl_xor masks that reach the other lanes of a row
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return ForwardLayout::leads_row(l); }
};
static_assert(has_rows<ColumnGroupsLayout>(), "rows and elements agree");

// Clears a thread's registers for a tile of K or V: `Passes` rows of ChunksPerRow chunks (tile.cuh).
template <int Passes, int ChunksPerRow>
__device__ __forceinline__ void clear(uint4 (&staging)[Passes][ChunksPerRow]) {
#pragma unroll
    for (int i = 0; i < Passes; i++)
#pragma unroll
        for (int c = 0; c < ChunksPerRow; c++) staging[i][c] = zero_chunk();
}

// Loads tiles (Rows keys) of K and V of a block, one after the other: the first half of its Threads threads loads V, the second
// half K. Stream: the loader, TileStream of tile.cuh. Paged: the specialization below goes through a KV cache's pages.
template <bool Paged, int Chunks, int Rows, int Threads, template <int, int, int> class Stream>
struct KOrVTiles {
    Stream<Chunks, Rows, Threads / 2> tile;
    unsigned stride;  // of rows, in elements

    __device__ __forceinline__ static bool loads_k(int thread) { return thread >= Threads / 2; }

    // Keys `first` to last - 1 of a sequence whose key 0 is row k_offset of its batch entry.
    template <class Block>
    __device__ __forceinline__ KOrVTiles(int thread, const FwdParams& p, const Block& block, int k_offset, int first, int last)
        : tile(thread % (Threads / 2), rows_of(loads_k(thread) ? p.k : p.v, block.batch, block.head_k, k_offset),
               loads_k(thread) ? p.k.row_stride : p.v.row_stride, loads_k(thread) ? p.problem.headdim : p.problem.headdim_v, first,
               last),
          stride(loads_k(thread) ? p.k.row_stride : p.v.row_stride) {}
    // Loads the next tile, whose first key is number `key`. What does not exist is 0.
    template <class Data>
    __device__ __forceinline__ void load(Data& data, const FwdParams&, int key) {
        clear(data);
        tile.load(data, stride, key);
    }
};
// `Unused`: the loader for tensors without pages. kPageGroup (16): tokens that always lie in one page.
template <int Chunks, int Rows, int Threads, template <int, int, int> class Unused>
struct KOrVTiles<true, Chunks, Rows, Threads, Unused> {
    using Stream = PagedTileStream<Chunks, Rows, Threads / 2>;
    static_assert(Rows == kPageGroup, "a step is one group");
    Stream tile;
    typename Stream::Pages pages;
    int last;  // one past the last key

    __device__ __forceinline__ static bool loads_k(int thread) { return thread >= Threads / 2; }
    __device__ __forceinline__ static const Operand& operand(const FwdParams& p, int thread) {
        return loads_k(thread) ? p.cache.k : p.cache.v;
    }

    template <class Block>
    __device__ __forceinline__ KOrVTiles(int thread, const FwdParams& p, const Block& block, int k_offset, int first, int last_)
        : tile(thread % (Threads / 2), operand(p, thread), block.head_k, loads_k(thread) ? p.problem.headdim : p.problem.headdim_v,
               last_),
          pages(p.cache, block.batch, k_offset, first, last_), last(last_) {}
    template <class Data>
    __device__ __forceinline__ void load(Data& data, const FwdParams& p, int key) {
        clear(data);
        tile.load(data, p.cache, operand(p, remat_thread_index()), pages, key);
        pages.advance(p.cache, key + Rows, last);
    }
};

// The kernel. BlockRows: 64 or 32, kRowGroups (two or one) groups of kGroupWarps warps. Grid: a block's rows, its steps of keys
// and how it loads them (layout.cuh).
template <int Headdim, int BlockRows, class Grid = DataParallelGrid>
struct ForwardColumnGroups {
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kRowTiles = 2, kStep = 16, kGroupRows = 16 * kRowTiles;  // row tiles of 16 of a warp's products
    static constexpr int kBlockRows = BlockRows, kRowGroups = kBlockRows / kGroupRows, kGroupWarps = kWarps / kRowGroups;
    static_assert(kRowGroups * kGroupRows == kBlockRows && (kGroupWarps == 4 || kGroupWarps == 8), "one or two groups");
    static constexpr int kGroupThreads = 32 * kGroupWarps;
    using Layout = ColumnGroupsLayout;
    // Parts of a group's scores, each eight rows: one of two row tiles, and one of two rows of a lane. A warp sums, masks and
    // exponentiates one. With eight warps in a group, two do the same part, and the first stores the results.
    static constexpr int kParts = kRowTiles * ForwardLayout::kRows;
    static constexpr int kPartRows = 12;  // from a part's first row to its last: rows 0 to 3 and 8 to 11, or 4 to 7 and 12 to 15
    static constexpr int kChunks = Headdim / kChunk, kWarpChunks = kChunks / kGroupWarps, kOutputTiles = kWarpChunks / 2;
    // Chunk number i of a warp in the first product is i * kGroupWarps plus the warp's number in its group. The last ones of Q
    // are in registers: shared memory has no room for them.
    static constexpr int kRegisterChunks = kGroupWarps == 4 ? 4 : 6, kSharedChunks = kWarpChunks - kRegisterChunks;
    static constexpr int kChunksQ = kGroupWarps * kSharedChunks, kPitch = kChunks * kChunkBytes, kPitchQ = kChunksQ * kChunkBytes;
    static_assert(kWarpChunks % 2 == 0 && kSharedChunks >= 2, "add_scores() takes chunks in pairs");
    // Shared memory: Q; K; V; partial scores, with P and the factors of rows. At the end, states of rows in P's place.
    static constexpr int kOffsetK = kBlockRows * kPitchQ, kOffsetV = kOffsetK + kStep * kPitch;
    static constexpr int kOffsetScores = kOffsetV + kStep * kPitch;
    static constexpr int kLaneScores = 32 * kChunkBytes;  // a chunk of each lane: partial scores of a part, by one warp
    static constexpr int kPartScores = kGroupWarps * kLaneScores, kGroupScores = kParts * kPartScores;
    // P and the factors of a part take the place of its scores once its warp has them. Another warp may still read these scores
    // where two compute a part.
    static constexpr bool kOverScores = kGroupWarps == kParts;
    static constexpr int kOffsetP = kOverScores ? kOffsetScores : kOffsetScores + kRowGroups * kGroupScores, kPitchP = 2 * kStep;
    // 512 bytes hold eight rows of P, 256 bytes, and their factors.
    static constexpr int kPartP = kOverScores ? kPartScores : 512, kGroupP = kParts * kPartP;
    static constexpr int kFactors = 8 * kPitchP;  // after the part's P
    static constexpr int kSharedBytes = kOffsetScores + kRowGroups * (kGroupScores + (kOverScores ? 0 : kGroupP));
    static_assert(Headdim == HEADDIM_V && kThreads == THREADS && kStep == STEP && kSharedBytes == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");

    // Sums of the first product, used in turn, because a product waits for its sum. Features and pages leave registers for one.
    static constexpr int kSums = (kHasScoreFeatures || kPaged) && kRowGroups == 2 ? 1 : 2;
    using Tile = Scores<ForwardLayout, kRowTiles, 1>;  // a lane's scores of the warp's columns: tile[mt][0]
    using RowScores = Scores<Layout, 1, 1>;  // of a part, summed
    using RowState = SoftmaxRows<Layout, 1>;  // lazy maximum and sum of the lane's row (softmax.cuh)
    using Accumulators = Accumulator[kRowTiles][kOutputTiles];

    // Named barriers: one of each group (kGroup, kGroup + 1), then those between two groups. In a step the first group waits for
    // kKComplete, multiplies Q K^T, arrives at kKRead, waits for kVRead, stores V, arrives at kVComplete. The second waits for
    // kKRead, multiplies, arrives at kVRead, waits for kVComplete, stores the next K, arrives at kKComplete. All threads take part
    // in these, without branches on the group: after a branch, ptxas takes warps for divergent, and each __syncwarp() costs
    // instructions.
    enum Barrier : int { kGroup = 1, kVComplete = kGroup + 2, kVRead, kKComplete, kKRead };

    // The thread's coordinates, and its addresses in shared memory, which begins at `base`. Each is used once a step, where it is
    // computed again from the thread's number: the loop has no registers for them.
    struct Coord {
        u32 base;
        ForwardLane lane;
        int warp, group_warp, group, group_row;  // group_warp: the warp's number in its group; group_row: the group's first row
        int part, own_row;  // of the summed scores: the warp's part, and the lane's row in the block

        __device__ __forceinline__ Coord(u32 base_, int thread)
            : base(base_), lane(thread & 31), warp(thread / 32), group_warp(warp % kGroupWarps), group(warp / kGroupWarps),
              group_row(group * kGroupRows), part(group_warp % kParts),
              own_row(group_row + part_row(part) + Layout::first_query(lane)) {}

        // First row of a part, in its group.
        __device__ __forceinline__ static int part_row(int part) {
            return part / ForwardLayout::kRows * 16 + ForwardLayout::row_slot(part % ForwardLayout::kRows);
        }
        // The warp's first row of the summed scores.
        __device__ __forceinline__ int first_row() const { return group_row + part_row(part); }
        // Whether the warp stores what it made of its part.
        __device__ __forceinline__ bool stores() const { return kGroupWarps == kParts || group_warp < kParts; }

        // The lane's operands of its first chunk, or of its first output columns.
        __device__ __forceinline__ u32 q() const { return base + swizzled<kChunksQ>(group_row + lane.q_row(), group_warp); }
        __device__ __forceinline__ u32 k() const { return base + kOffsetK + swizzled<kChunks>(lane.k_row(), group_warp); }
        __device__ __forceinline__ u32 v() const {
            return base + kOffsetV + swizzled<kChunks>(lane.v_row(), kWarpChunks * group_warp + lane.v_chunk());
        }
        // From the rows of the lane's own keys to the other eight.
        __device__ __forceinline__ int v_other() const { return (lane.qn ? -8 : 8) * kPitch; }
        // Partial scores: of each part, of each warp, a chunk of each lane.
        __device__ __forceinline__ u32 score_store() const {
            return base + kOffsetScores + group * kGroupScores + group_warp * kLaneScores + lane.lane * kChunkBytes;
        }
        __device__ __forceinline__ u32 score_load() const {
            return base + kOffsetScores + group * kGroupScores + part * kPartScores + lane.lane * kChunkBytes;
        }
        // Offset of P: of each part eight rows of two units (16 bytes) of eight keys, even keys before odd ones, as the second
        // product takes them. Bit 4 of a row is its row tile, bit 2 its part in that; bits 0, 1 and 3 number it in the part. Bit 2
        // is also XORed into the unit, against bank conflicts.
        __device__ __forceinline__ static int probability(int row, int unit) {
            return kOffsetP + row / 16 * 2 * kPartP + (row >> 2 & 1) * kPartP + ((row & 3) + (row >> 1 & 4)) * kPitchP +
                   (unit ^ (row >> 2 & 1)) * kChunkBytes;
        }
        __device__ __forceinline__ u32 p_store() const {
            return base + group * kGroupP + probability(own_row - group_row, lane.qn) + (lane.t & 2) * 2;
        }
        __device__ __forceinline__ u32 p_load() const { return base + group * kGroupP + probability(lane.q_row(), lane.qn); }
        // The factor by which the output of the lane's row in a part is rescaled.
        __device__ __forceinline__ u32 factor(int part) const {
            const int row = Layout::first_query(lane);
            return base + group * kGroupP + kOffsetP + part * kPartP + kFactors + ((row & 3) + (row >> 1 & 4)) * 4;
        }
        // Loads the float of the lane's output row r of row tile mt, from an array of the block's rows at `offset`.
        __device__ __forceinline__ float row_float(int offset, int mt, int r) const {
            return __uint_as_float(load_shared1(
                base + offset + 4 * (group_row + ForwardLayout::first_query(lane) + 16 * mt + ForwardLayout::row_slot(r))));
        }
    };

    // Operands of the first product for one chunk (eight columns): the lane's rows of Q and of K.
    struct Operands {
        uint4 a[kRowTiles], b;
        __device__ __forceinline__ void load_q(u32 q) {
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) a[mt] = load_shared(q + mt * 16 * kPitchQ);
        }
        __device__ __forceinline__ void load_k(u32 k) { b = load_shared(k); }
        __device__ __forceinline__ void multiply(Tile (&s)[kSums], const uint4 (&q)[kRowTiles]) const {
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(s[0].tile[mt][0], q[mt].x, q[mt].y, b.x, b.y);
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(s[kSums - 1].tile[mt][0], q[mt].z, q[mt].w, b.z, b.w);
        }
    };

    // Returns the address of the warp's next chunk from that of an even one: kGroupWarps chunks further, in rows of Chunks
    // chunks. The swizzle (tile.cuh) XORs the lower three bits of a chunk's number if Chunks is a multiple of 8, else two. With
    // four warps in a group, the step of 4 is bit 2, which is 0 in an even chunk.
    template <int Chunks>
    __device__ __forceinline__ static u32 odd_chunk(u32 even) {
        return kGroupWarps == 4 && Chunks % 8 == 0 ? even ^ 4 * kChunkBytes : even + kGroupWarps * kChunkBytes;
    }

    // Partial S = Q K^T over the warp's columns, in kSums sums. q and k: the lane's addresses of its chunk 0. `last`: chunks of Q
    // in registers. Loads and products alternate between even and odd chunks.
    __device__ __forceinline__ static void add_scores(Tile (&s)[kSums], u32 q, u32 k,
                                                      const uint4 (&last)[kRegisterChunks][kRowTiles]) {
        // bytes from an even chunk to the next even one; chunks in the rolled loop, whose Q is in shared memory
        constexpr int kPair = 2 * kGroupWarps * kChunkBytes, kRolled = kSharedChunks / 2 * 2;
        Operands even, odd;
        even.load_q(q), even.load_k(k);
#pragma unroll 1
        for (int i = 0; i < kRolled; i += 2, q += kPair, k += kPair) {
            odd.load_q(odd_chunk<kChunksQ>(q)), odd.load_k(odd_chunk<kChunks>(k));
            __syncwarp();
            even.multiply(s, even.a);
            even.load_q(q + kPair), even.load_k(k + kPair);  // after the last pair, this Q may stay unused
            __syncwarp();
            odd.multiply(s, odd.a);
        }
#pragma unroll
        for (int c = kRolled; c < kWarpChunks; c += 2, k += kPair) {
            odd.load_k(odd_chunk<kChunks>(k));
            __syncwarp();
            if (c < kSharedChunks)
                even.multiply(s, even.a);
            else
                even.multiply(s, last[c - kSharedChunks]);
            if (c + 2 < kWarpChunks) even.load_k(k + kPair);
            __syncwarp();
            odd.multiply(s, last[c + 1 - kSharedChunks]);
        }
    }

    __device__ __forceinline__ static void run(const FwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 base = shared_address(shared);
        const Problem& problem = p.problem;
        const typename Grid::template Block<kBlockRows> block(problem, grid);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(problem, sequence);
        const int thread = threadIdx.x, row = keep_in_register(block.row + Coord(base, thread).first_row());
        const auto coord = [&] { return Coord(base, remat_thread_index()); };

        uint4 q_last[kRegisterChunks][kRowTiles];
        {
            const Coord at = coord();
            const unsigned short* q_base = rows_of(p.q, block.batch, block.head, sequence.q_offset()) + block.row * p.q.row_stride;
            constexpr int kRows = kThreads / threads_per_row(kChunksQ);
            TileLoader<kChunksQ, kRows, kThreads> q(thread, q_base, p.q.row_stride, min(problem.headdim, kChunksQ * kChunk));
#pragma unroll 1
            for (int i = 0; i < kBlockRows; i += kRows) {
                q.load(sequence.seqlen_q() - block.row - i);
                q.flip_signs(problem.sign_flip);  // a negative softmax_scale flips the signs of Q
                q.store(base + i * kPitchQ + swizzled<kChunksQ>(q.row, q.chunk), kPitchQ);
            }
#pragma unroll
            for (int c = 0; c < kRegisterChunks; c++)
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) {
                    const int i = at.group_row + 16 * mt + at.lane.q_row(),
                              chunk = kGroupWarps * (kSharedChunks + c) + at.group_warp;
                    q_last[c][mt] = zero_chunk();
                    if (block.row + i < sequence.seqlen_q() && chunk * kChunk < problem.headdim)
                        q_last[c][mt] = flipped(load_global(q_base + i * p.q.row_stride + chunk * kChunk), problem.sign_flip);
                }
        }

        // The block's first key. Batch-invariant kernels (a row's bits do not depend on other rows) round it down to a multiple of
        // kStep. Kernels with pages, bias or dropout, and generic ones (kRoundedKeys), round it to one of 16: pages come in groups
        // of 16 keys, bias and random numbers in groups of 4.
        int key = first_step<kStep>(block.template key_first<kStep>(mask));
        if (kRoundedKeys) key &= ~15;
        const int key_end = keep_in_register(block.template key_end<kStep>(mask));
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;  // out stays NaN, with which the library filled it
        }
        typename Grid::template Steps<kStep> keys(grid, block, key, key_end);
        using Tiles = KOrVTiles<kPaged, kChunks, kStep, kThreads, Grid::template Stream>;
        Tiles tiles(thread, p, block, sequence.k_offset(), key, key_end);
        using Stream = TileStream<kChunks, kStep, kThreads / 2>;
        // Steps that begin at keys unmasked.first to first + span (inclusive) need no mask. A warp of padding rows counts as one at
        // the last row, so that a tile past the last key is masked in all warps.
        UnmaskedKeys<kStep> unmasked(mask, min(row, sequence.seqlen_q() - 1), kPartRows);
        // apply_score_mod leaves the scores of generic kernels in log2 units
        const float scale = kGeneric ? 1.f : problem.scale_log2;

        RowState softmax;
        Accumulators o;
        clear_tiles(o);

        const auto loads_k = [] { return Tiles::loads_k(remat_thread_index()); };
        // Where the thread's first chunk of a tile goes. (store()'s argument `false`: stores zeros past the last column too.)
        const auto kv_store = [&] {
            const int thread = remat_thread_index();
            const int loader = thread % (kThreads / 2);
            return base + (Tiles::loads_k(thread) ? kOffsetK : kOffsetV) +
                   swizzled<kChunks>(Stream::row_of(loader), Stream::chunk_of(loader));
        };
        if (loads_k()) {
            uint4 staging[Stream::kPasses][Stream::kChunksPerRow];
            tiles.load(staging, p, keys.first());
            tiles.tile.store(staging, kv_store(), kPitch, false);
        }
        __syncthreads();
        // Each wait below has one arrival; that for the first K is here.
        if (kRowGroups == 2 && loads_k()) named_arrive(kKComplete, kThreads);
#pragma unroll 1
        for (; keys.exists(); keys.advance(grid)) {
            const int key = keys.first();
            // V, or the next K, in flight from global to shared memory; during the products it takes no registers.
            uint4 staging[Stream::kPasses][Stream::kChunksPerRow];
            {
                Tile s[kSums];
#pragma unroll
                for (int i = 0; i < kSums; i++) s[i].clear();
                const Coord at = coord();
                if (kRowGroups == 2) named_sync(at.group ? kKRead : kKComplete, kThreads);
                add_scores(s, at.q(), at.k(), q_last);
                if (kRowGroups == 2) named_arrive(coord().group ? kVRead : kKRead, kThreads);
                tiles.load(staging, p, loads_k() ? keys.after(1) : key);
                const u32 to = coord().score_store();
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
                    for (int r = 0; r < ForwardLayout::kRows; r++) {
                        const float *x = s[0].tile[mt][0] + 2 * r, *y = s[kSums - 1].tile[mt][0] + 2 * r;
                        const auto sum = [&](int v) { return __float_as_uint(kSums == 2 ? x[v] + y[v] : x[v]); };
                        // in the order of keys: elements 0, 1 are keys 0, 2, and 4, 5 are 1, 3
                        store_shared(to + (mt * ForwardLayout::kRows + r) * kPartScores,
                                     make_uint4(sum(0), sum(4), sum(1), sum(5)));
                    }
            }
            RowScores s;
            const Coord at = coord();
            named_sync(kGroup + at.group, kGroupThreads);
            float* x = s.tile[0][0];
#pragma unroll
            for (int from = 0; from < kGroupWarps; from++) {
                const uint4 part = load_shared(at.score_load() + from * kLaneScores);
                const float y[4] = {__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z),
                                    __uint_as_float(part.w)};
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = from == 0 ? y[i] : x[i] + y[i];
            }
            if (kGeneric) {
                s.apply_score_mod(p, mask, row, key);
                if (kHasBias && p.score_options.bias) {
                    ScoreBias<Layout, 1, 1> bias;
                    bias.load(p, row, key);
                    bias.add_to(s, p.score_options);
                }
            }
            if (kHasScoreFeatures || !unmasked.contains(key)) {  // with score features always: no registers for the test
                const int batch = grid.remat_batch(problem);
                s.apply_mask(mask_of(problem, BlockSeqlenInfo(p, batch)), row, key);
            }
            // If a score exceeds its row's limit, row maxima move (kMovedRows: of all rows, or in batch-invariant kernels of rows
            // above their limits), and `factor` rescales the lane's row of output.
            const bool moved = s.needs_rescale(softmax);
            float factor = 1.f;
            if (moved) {
                const float inverse_scale = 1.f / __int_as_float(keep_in_register(__float_as_int(scale)));
                s.template update_row_max<kMovedRows>(softmax, scale, inverse_scale, [&](int, int, float f) { factor = f; });
            }
            unsigned kept = ~0u;
            if (kGeneric && kHasDropout && p.score_options.rng_state) {
                // A Philox call has rows r and r + 4, where r % 8 < 4: the shift moves the bits of the lane's row to row r's. Bit
                // kept_bit(0, i) is then the lane's key i.
                const int of_row = row + Layout::first_query(at.lane);
                const uint4 numbers =
                    DropoutBits<ForwardLayout, 1>::numbers_of(p).numbers(of_row & ~4, key + Layout::first_key(at.lane));
                kept = DropoutRule(p.score_options).kept_bits(numbers) >> kept_bit(of_row >> 2 & 1, 0);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = softmax.row[0][0].probability(x[i], scale);
                if (kGeneric && kHasDropout && !(kept >> kept_bit(0, i) & 1)) x[i] = 0.f;
            }
            if (at.stores()) {
                store_shared1(at.p_store(), pack_probabilities(x[0], x[2]));
                store_shared1(at.p_store() + 8, pack_probabilities(x[1], x[3]));
                if (Layout::leads_row(at.lane)) store_shared1(at.factor(at.part), __float_as_uint(factor));
            }
            if (kRowGroups == 2) named_sync(at.group ? kVComplete : kVRead, kThreads);
            tiles.tile.store(staging, kv_store(), kPitch, false);
            if (kRowGroups == 2) named_arrive(at.group ? kKComplete : kVComplete, kThreads);
            if (named_sync_or(kGroup + at.group, kGroupThreads, moved)) {
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
                    for (int r = 0; r < ForwardLayout::kRows; r++) {
                        const float f = __uint_as_float(load_shared1(at.factor(mt * ForwardLayout::kRows + r)));
#pragma unroll
                        for (int j = 0; j < kOutputTiles; j++)
#pragma unroll
                            for (int x = 0; x < 8; x++)
                                if (ForwardLayout::row_of(x) == r) o[mt][j][x] *= f;
                    }
            }
            const Coord product = coord();
            u32 v = product.v(), p_tile = product.p_load();
            const int v_other = product.v_other();
            // Own keys, then those of the other quad-pair column. Rolled, to fit the instruction cache.
#pragma unroll 1
            for (int w = 0; w < 2; w++) {
                uint4 probabilities[kRowTiles];
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) probabilities[mt] = load_shared(p_tile + mt * ForwardLayout::kRows * kPartP);
                accumulate_columns<1, kPitch>(
                    o,
                    [&](int mt, int, int u) {
                        const uint4& x = probabilities[mt];
                        return u ? RowPair{x.z, x.w} : RowPair{x.x, x.y};
                    },
                    [&](int) { return v; });
                v += v_other, p_tile ^= kChunkBytes;
            }
        }
        if (kRowGroups == 2 && !loads_k()) named_sync(kKComplete, kThreads);
        __syncthreads();

        // Softmax states go from the warps of parts to all warps, which have these rows' output. One lane of a row has its sum.
        const Coord at = coord();
        const float sum = row_sum<Layout>(softmax.row[0][0].sum);
        if (at.stores() && Layout::leads_row(at.lane)) {
            store_shared1(base + kOffsetP + at.own_row * 4, __float_as_uint(softmax.row[0][0].row_max));
            store_shared1(base + kOffsetP + (kBlockRows + at.own_row) * 4, __float_as_uint(sum));
        }
        __syncthreads();
        SoftmaxState<kRowTiles> state;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) {
                state.row[mt][r].row_max = at.row_float(kOffsetP, mt, r);
                const float sum = at.row_float(kOffsetP + kBlockRows * 4, mt, r);
                state.row[mt][r].sum = ForwardLayout::leads_row(at.lane) ? sum : 0.f;
            }
        if (!grid.template combine_splits<kThreads>(state, o)) return;  // another block writes out
        const Coord last = coord();
        FwdParams columns = p;  // as if out had the warp's columns only
        columns.out.ptr += kWarpChunks * kChunk * last.group_warp * (out_is_fp32(p) ? 2 : 1);
        columns.problem.headdim_v -= kWarpChunks * kChunk * last.group_warp;
        write_output<kRowTiles, kOutputTiles>(columns, last.lane, grid.remat_batch(problem), grid.remat_head(problem),
                                              row - last.first_row() + last.group_row, state, o);
    }
};

}  // namespace volta
