// Stream-K grid policy of the volta forward kernels (their template argument Grid), for problems whose last wave of blocks would
// leave most of the GPU idle. Row tiles (BlockRows query rows of a head) left over after the full waves are split along the keys.
// So the blocks that the GPU runs at once get equal work. src/plan/stream_k.rs decides which block takes which keys.
//
// TileSplit (forward/tile_split.cuh) is a block's work: a row tile (its number is row_block), and a range of its steps of Step keys
// (first to end). It is split number `index` of `splits`; 1 means all keys, without an end. stream_k_tile numbers the split tiles.
//
// Paged kernels read lengths from GPU memory. So there first and end count in kPagedParts (2^15) equal parts of the row tile's own
// steps. A paged launch has one sequence. Its row tiles begin with the last rows of all heads, which see the most keys.
//
// Each split's partial result goes to scratch memory. The last block to finish a row tile combines its splits in key order. No
// block waits, and the output is deterministic.
#pragma once

#include "forward/tile_split.cuh"  // TileSplit, SplitBlock; TileCoord: first row, head and batch entry of a row tile
#include "semaphore.cuh"
#include "volta/forward/required_features.cuh"  // layout.cuh: store_partial(), combine_partial(): softmax state and output

namespace volta {

// Grid policy; DataParallelGrid (layout.cuh) is the default one. The kernel's main loop is written once for all policies, so each
// names its iterator over steps of Step keys (Steps), its block mask's bits (here none: calls compile to nothing) and its loader of
// K and V (Stream: tiles of Rows keys by Chunks chunks of eight columns, by Threads threads). mask.key_first(row) and key_end(row,
// rows) are the range of keys that `rows` rows from `row` on see. remat_*() read blockIdx again, to hold no register. kPaged,
// kVarlen and kGeneric (parameters say which score features): what the kernel is compiled for.
template <int BlockRows>
class StreamKGrid {
    // Has scratch memory for max_splits splits of each split row tile (partials), and a semaphore for each tile. launch_id is
    // unique to a call: is_last_block() counts blocks of this launch alone, so semaphores need no initialization (semaphore.cuh).
    const StreamKParams& params_;

    using TileCoord = ::TileCoord<BlockRows>;
    // First row, head and batch entry of the block's row tile, for code that runs rarely.
    __device__ __forceinline__ TileCoord remat_coord(const Problem& p) const {
        return TileCoord(p, TileSplit(params_, remat_block_x()).row_block);
    }

public:
    // The grid has one axis, splits and whole row tiles. So code that reads head and batch from blockIdx (dropout) cannot use it.
    static constexpr bool kHasHeadAndBatchAxes = false;
    template <int Step>
    using Steps = DenseSteps<Step>;
    template <int Rows, int Step>
    using Bits = NoMaskBits;
    template <int Chunks, int Rows, int Threads>
    using Stream = TileStream<Chunks, Rows, Threads>;
    static_assert((!kVarlen || kPaged) && !kGeneric, "varlen and generic kernels need grid axes for head and batch");
    __device__ __forceinline__ explicit StreamKGrid(const StreamKParams& params) : params_(params) {}

    // A block's first row, heads and batch entry, and its keys: key_first() to key_end(). Masks may leave none: first >= end.
    template <int Rows>
    struct Block : SplitBlock<BlockRows> {
        static_assert(Rows == BlockRows, "the planner counts tiles of BlockRows rows");
        using SplitBlock<BlockRows>::split;
        __device__ __forceinline__ Block(const Problem& p, const StreamKGrid& grid)
            : SplitBlock<BlockRows>(p, TileSplit(grid.params_, blockIdx.x)) {}
        template <int Step>
        __device__ __forceinline__ int key_first(const Mask& mask) const {
            if (kPaged) return end_of_parts<Step>(mask, split.first);
            // Steps begin at the same keys in all splits, whatever the window: keys that it hides are masked.
            return max(mask.key_first(TileCoord::row) / Step * Step, split.first * Step);
        }
        // Returns the key at which the first `parts` of kPagedParts equal parts of the row tile's steps end, in whole steps.
        template <int Step>
        __device__ __forceinline__ int end_of_parts(const Mask& mask, int parts) const {
            const int first = mask.key_first(TileCoord::row) / Step * Step;
            const unsigned long long steps = max(all_end(mask) - first + Step - 1, 0) / Step;
            return first + static_cast<int>(steps * parts / kPagedParts) * Step;
        }
        // One past the last key that a row of the tile sees, in any split.
        __device__ __forceinline__ int all_end(const Mask& mask) const { return mask.key_end(TileCoord::row, BlockRows); }
        template <int Step>
        __device__ __forceinline__ int key_end(const Mask& mask) const {
            if (kPaged) return split.splits == 1 ? all_end(mask) : min(all_end(mask), end_of_parts<Step>(mask, split.end));
            return min(all_end(mask), split.template key_end<Step>());
        }
    };

    // Called by all threads after the main loop. Stores this split's softmax state and unscaled output `o`, of a warp's RowTiles by
    // OutputTiles tiles. The last block of the row tile combines all splits in them and gets true: it writes out and lse.
    template <int Threads, int RowTiles, int OutputTiles>
    __device__ __forceinline__ bool combine_splits(SoftmaxState<RowTiles>& softmax, Accumulator (&o)[RowTiles][OutputTiles]) const {
        const TileSplit split(params_, remat_block_x());
        if (split.splits == 1) return true;
        // Memory has chunk i (16 bytes) of all threads, then i + 1. __stcg and __ldcg bypass L1, which other SMs do not share.
        constexpr int kSplitChunks = kPartialChunks<RowTiles, OutputTiles> * Threads;
        const int first_split = split.stream_k_tile * params_.max_splits;
        uint4* first =
            reinterpret_cast<uint4*>(params_.partials) + static_cast<long long>(first_split) * kSplitChunks + threadIdx.x;
        uint4* own = first + split.index * kSplitChunks;
        store_partial(softmax, o, [&](int chunk, uint4 x) { __stcg(own + chunk * Threads, x); });
        __threadfence();  // this thread's split is visible before the semaphore counts it
        if (!is_last_block(params_.semaphores + split.stream_k_tile, params_.launch_id, split.splits)) return false;
        softmax = SoftmaxState<RowTiles>();  // its own split too is read back, so that the order of additions is that of the keys
        clear_tiles(o);
#pragma unroll 1
        for (int i = 0; i < split.splits; i++, first += kSplitChunks)
            combine_partial(softmax, o, [&](int chunk) { return __ldcg(first + chunk * Threads); });
        return true;
    }

    __device__ __forceinline__ int remat_batch(const Problem& p) const { return remat_coord(p).batch; }
    __device__ __forceinline__ int remat_head(const Problem& p) const { return remat_coord(p).head; }
};

}  // namespace volta
