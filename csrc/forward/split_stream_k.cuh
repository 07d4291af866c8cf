// Stream-K grid of WideForward (split.cuh), the forward kernel of fp32 tensors with wide heads: StreamKKeys is its template
// argument Keys. A VAE (image decoder of diffusion models) has one head, whose row tiles leave many SMs idle in their last wave.
// Blocks compute splits of the keys of these tiles, and store their results in scratch memory. The last block to finish a tile
// combines its splits in key order. No block waits, and the output is deterministic. remat_*: computed again, to hold no register.
//
//   TileSplit      a block's work (tile_split.cuh): a row tile, row_block, and steps `first` up to `end` of kStep keys, split
//                  number `index` of `splits` (1: all keys). stream_k_tile numbers the split tiles
//   StreamKParams  scratch memory for max_splits splits of each split tile (partials), and semaphores that count finished splits:
//                  counts with another launch_id are 0, so their memory needs no initialization (semaphore.cuh)
//   Family         the mma layout (split.cuh)
//   BLOCK_ROWS     of a row tile; THREADS: of a block. Both from the kernel's row in src/kernels
#pragma once

#include "forward/split.cuh"  // SeenKeys (grid, keys that a block's rows see), kStep; SoftmaxRows: row_max and sum of rows
#include "forward/tile_split.cuh"  // TileSplit, TileCoord, SplitBlock
#include "semaphore.cuh"  // is_last_block()

namespace split {

template <class Family>
class StreamKKeys : public SeenKeys {
    using Layout = typename Family::Layout;
    const StreamKParams& params_;

    // First row, head and batch entry of the block's row tile.
    __device__ __forceinline__ TileCoord<BLOCK_ROWS> remat_coord(const Problem& p) const {
        return TileCoord<BLOCK_ROWS>(p, TileSplit(params_, remat_block_x()).row_block);
    }

public:
    static_assert(!kVarlen && !kGeneric, "the grid has no axes for head and batch, which these features read");
    __device__ __forceinline__ explicit StreamKKeys(const StreamKParams& params) : params_(params) {}
    // The grid has one axis, so heads are never first: RowTileGrid::block's bool EitherOrder (they may be) is unused.
    template <int Rows, bool>
    __device__ __forceinline__ SplitBlock<Rows> block(const Problem& p) const {
        static_assert(Rows == BLOCK_ROWS, "the planner counts tiles of BLOCK_ROWS rows");
        return SplitBlock<Rows>(p, TileSplit(params_, blockIdx.x));
    }
    // Returns the end of the block's keys.
    template <int Rows, class Block>
    __device__ __forceinline__ static int end(const Mask& mask, const Block& block) {
        return min(mask.key_end(block.row, Rows), block.split.template key_end<kStep>());
    }
    // Returns an iterator over the block's steps. Ahead: of how many later steps it also tells the keys, for loads.
    template <int Ahead, int Rows, class Block>
    __device__ __forceinline__ Steps<Ahead> steps(const FwdParams&, const Block& block, const Mask& mask) const {
        const int first = max(mask.key_first(block.row) & ~(kStep - 1), block.split.first * kStep);
        return Steps<Ahead>(*this, block, first, end<Rows>(mask, block));
    }

    // Stores this split. Returns true for the last block of the row tile, after it has combined all splits, its own too, in key
    // order. A thread's result is the maxima and sums of its two rows, then outputs, in 16-byte chunks. Memory has chunk i of all
    // threads, then i + 1. __stcg and __ldcg bypass L1, which other SMs do not share.
    template <class Output>
    __device__ __forceinline__ bool combine_splits(SoftmaxRows<Layout, 1>& softmax, Output& o) const {
        const TileSplit split(params_, remat_block_x());
        if (split.splits == 1) return true;
        constexpr int kTiles = sizeof(o[0]) / sizeof(o[0][0]), kElements = Layout::kElements;
        constexpr int kSplitChunks = (1 + kTiles * kElements / 4) * THREADS;
        static_assert(Layout::kRows == 2 && kElements % 4 == 0, "rows of a lane, elements of a chunk");
        const long long first_split = static_cast<long long>(split.stream_k_tile) * params_.max_splits;
        uint4* chunks = reinterpret_cast<uint4*>(params_.partials) + first_split * kSplitChunks + threadIdx.x;
        uint4* own = chunks + split.index * kSplitChunks;
        SoftmaxRow(&rows)[2] = softmax.row[0];
        __stcg(own, chunk(rows[0].row_max, rows[0].sum, rows[1].row_max, rows[1].sum));
#pragma unroll
        for (int j = 0; j < kTiles; j++)
#pragma unroll
            for (int v = 0; v < kElements; v += 4) {
                const float* x = o[0][j] + v;
                __stcg(own + (1 + (j * kElements + v) / 4) * THREADS, chunk(x[0], x[1], x[2], x[3]));
            }
        __threadfence();  // this thread's split is visible before the semaphore counts it
        if (!is_last_block(params_.semaphores + split.stream_k_tile, params_.launch_id, split.splits)) return false;
        softmax = SoftmaxRows<Layout, 1>();
        clear_tiles(o);
#pragma unroll 1
        for (int i = 0; i < split.splits; i++, chunks += kSplitChunks) {
            const uint4 state = __ldcg(chunks);
            float factor[2], other_factor[2];
            factor[0] = rows[0].merge(__uint_as_float(state.x), __uint_as_float(state.y), other_factor[0]);
            factor[1] = rows[1].merge(__uint_as_float(state.z), __uint_as_float(state.w), other_factor[1]);
#pragma unroll
            for (int j = 0; j < kTiles; j++)
#pragma unroll
                for (int v = 0; v < kElements; v += 4) {
                    const uint4 x = __ldcg(chunks + (1 + (j * kElements + v) / 4) * THREADS);
                    const u32 other[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        const int r = Layout::row_of(v + w);
                        o[0][j][v + w] = o[0][j][v + w] * factor[r] + __uint_as_float(other[w]) * other_factor[r];
                    }
                }
        }
        return true;
    }

    template <int, bool>
    __device__ __forceinline__ int remat_row(const Problem& p) const {
        return remat_coord(p).row;
    }
    template <bool>
    __device__ __forceinline__ int remat_head(const Problem& p) const {
        return remat_coord(p).head;
    }
    __device__ __forceinline__ int remat_batch(const Problem& p) const { return remat_coord(p).batch; }

private:
    __device__ __forceinline__ static uint4 chunk(float a, float b, float c, float d) {
        return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
    }
};

}  // namespace split
