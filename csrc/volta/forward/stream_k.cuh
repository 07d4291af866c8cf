// Stream-K grid of the volta forward kernels. It is for problems whose last wave of blocks would leave most of the GPU idle.
// The row tiles left over after the full waves are split along the keys, so that every resident block gets equal work.
// src/plan/stream_k.rs decides which block takes which keys, in the order in which blocks start.
//
// Paged kernels read lengths from memory, so their splits are parts of a row tile's own steps. Their tiles begin with the last
// rows of all heads, which see the most keys, and their launch has one sequence.
//
// Each split goes to scratch memory. The last block to finish a row tile combines its splits in key order. No block waits, and
// the output is deterministic.
#pragma once

#include "semaphore.cuh"
#include "volta/forward/required_features.cuh"

namespace volta {

// Parts of a row tile's steps in which splits of paged kernels count (`PAGED_PARTS` in src/limits.rs).
constexpr int kPagedParts = 1 << 15;

// A block's work: all keys of a row tile, or one split of them.
struct TileSplit {
    int row_block;  // number of the row tile, over all heads and batch entries
    int stream_k_tile = 0;  // number of the row tile among those that are split
    int first = 0, end;  // range of keys, in steps; paged: in parts
    // number of this split; splits of the row tile
    int index = 0, splits = 1;

    // A tile without splits has no end: key_end() limits it.
    __device__ __forceinline__ TileSplit(const StreamKParams& s, int block) : row_block(block), end(0x7fffffff) {
        if (block >= s.data_parallel_tiles) {
            const StreamKSplit x = s.splits[block - s.data_parallel_tiles];
            stream_k_tile = x.tile;
            row_block = s.data_parallel_tiles + stream_k_tile;
            first = x.first;
            end = x.end;
            index = x.part >> 8;
            splits = x.part & 0xff;  // StreamKSplit::part in src/params/forward.rs has both
        }
    }
};

// Grid policy; DataParallelGrid (layout.cuh) is the default one.
template <int BlockRows>
class StreamKGrid {
    const StreamKParams& params_;

    // Row, head and batch entry of a row tile.
    struct TileCoord {
        int row, head, batch;
        __device__ __forceinline__ TileCoord(const Problem& p, int row_block) {
            const int of_head = (p.seqlen_q + BlockRows - 1) / BlockRows;
            if (kPaged) {
                const int from_last = row_block / p.nheads;
                row = (of_head - 1 - from_last) * BlockRows;
                batch = 0;
                head = row_block - from_last * p.nheads;
                return;
            }
            const int heads = row_block / of_head;
            row = (row_block - heads * of_head) * BlockRows;
            batch = heads / p.nheads;
            head = heads - batch * p.nheads;
        }
    };
    // Computed again for code that runs rarely (see remat_thread_index()).
    __device__ __forceinline__ TileCoord remat_coord(const Problem& p) const {
        return TileCoord(p, TileSplit(params_, remat_block_x()).row_block);
    }

public:
    static constexpr bool kHasHeadAndBatchAxes = false;
    template <int Step>
    using Steps = DenseSteps<Step>;
    template <int Rows, int Step>
    using Bits = NoMaskBits;
    template <int Chunks, int Rows, int Threads>
    using Stream = TileStream<Chunks, Rows, Threads>;
    static_assert((!kVarlen || kPaged) && !kGeneric, "a stream-K grid has no axes for head and batch");
    __device__ __forceinline__ explicit StreamKGrid(const StreamKParams& params) : params_(params) {}

    // Coordinates and keys of a block.
    template <int Rows>
    struct Block : TileCoord {
        TileSplit split;
        int head_k;
        __device__ __forceinline__ Block(const Problem& p, const StreamKGrid& grid)
            : Block(p, TileSplit(grid.params_, blockIdx.x)) {}
        __device__ __forceinline__ Block(const Problem& p, const TileSplit& split_)
            : TileCoord(p, split_.row_block), split(split_), head_k(TileCoord::head / (p.nheads / p.nheads_k)) {
            static_assert(Rows == BlockRows, "the planner counts tiles of BlockRows rows");
        }
        template <int Step>
        __device__ __forceinline__ int key_first(const Mask& mask) const {
            if (kPaged) return part<Step>(mask, split.first);
            // Steps begin at the same keys in all splits, whatever the window: keys that it hides are masked.
            return max(mask.key_first(TileCoord::row) / Step * Step, split.first * Step);
        }
        // Returns the key at which a number of parts of the row tile's steps end.
        template <int Step>
        __device__ __forceinline__ int part(const Mask& mask, int parts) const {
            const int first = mask.key_first(TileCoord::row) / Step * Step;
            const unsigned long long steps = max(all_end(mask) - first + Step - 1, 0) / Step;
            return first + static_cast<int>(steps * parts / kPagedParts) * Step;
        }
        __device__ __forceinline__ int all_end(const Mask& mask) const { return mask.key_end(TileCoord::row, BlockRows); }
        template <int Step>
        __device__ __forceinline__ int key_end(const Mask& mask) const {
            if (kPaged) return split.splits == 1 ? all_end(mask) : min(all_end(mask), part<Step>(mask, split.end));
            return min(mask.key_end(TileCoord::row, BlockRows), min(split.end, 0x7fffffff / Step) * Step);
        }
    };

    // Stores this split. Returns true for the last block of the row tile, after it has combined all splits.
    template <int Threads, int RowTiles, int OutputTiles>
    __device__ __forceinline__ bool combine_splits(SoftmaxState<RowTiles>& softmax, Accumulator (&o)[RowTiles][OutputTiles]) const {
        const TileSplit split(params_, remat_block_x());
        if (split.splits == 1) return true;
        // those of all threads are adjacent
        constexpr int kSplitChunks = kPartialChunks<RowTiles, OutputTiles> * Threads;
        const int first_split = split.stream_k_tile * params_.max_splits;
        uint4* first =
            reinterpret_cast<uint4*>(params_.partials) + static_cast<long long>(first_split) * kSplitChunks + threadIdx.x;
        uint4* own = first + split.index * kSplitChunks;
        store_partial(softmax, o, [&](int chunk, uint4 x) { __stcg(own + chunk * Threads, x); });
        __threadfence();  // this thread's split is visible before the semaphore counts it
        __syncthreads();
        const bool last =
            threadIdx.x == 0 && arrive_is_last(params_.semaphores + split.stream_k_tile, params_.launch_id, split.splits);
        if (!__syncthreads_or(last)) return false;
        __threadfence();  // other blocks' splits are read after the count
        softmax = SoftmaxState<RowTiles>();
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < OutputTiles; j++) clear(o[mt][j]);
#pragma unroll 1
        for (int i = 0; i < split.splits; i++, first += kSplitChunks)
            combine_partial(softmax, o, [&](int chunk) { return __ldcg(first + chunk * Threads); });
        return true;
    }

    __device__ __forceinline__ int remat_batch(const Problem& p) const { return remat_coord(p).batch; }
    __device__ __forceinline__ int remat_head(const Problem& p) const { return remat_coord(p).head; }
};

}  // namespace volta
