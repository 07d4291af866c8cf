// Work of the blocks of the forward kernels' stream-K grids: row tiles (BlockRows query rows of a head) and splits of their keys.
// src/plan/stream_k.rs decides which block takes which keys. Grid policies: volta/forward/stream_k.cuh, forward/split_stream_k.cuh.
#pragma once

#include "features.cuh"  // kPaged; Problem, StreamKParams, StreamKSplit (src/params)

// Paged kernels (over a KV cache) have lengths in GPU memory, so the planner cannot count the steps of a row tile. Their splits
// count in kPagedParts equal parts of these steps (`PAGED_PARTS` in src/limits.rs): 2^15, because ends are 16-bit numbers.
constexpr int kPagedParts = 1 << 15;

// A block's work: all keys of a row tile, or one split of them.
struct TileSplit {
    int row_block;  // number of the row tile, over all heads and batch entries
    int stream_k_tile = 0;  // number of the row tile among those that are split, which come last
    int first = 0, end;  // range of keys, in steps; paged: in parts
    int index = 0, splits = 1;  // number of this split; splits of the row tile

    // `block`: blockIdx.x. The first data_parallel_tiles blocks take a row tile each, with no end: Mask::key_end() limits it.
    __device__ __forceinline__ TileSplit(const StreamKParams& s, int block) : row_block(block), end(0x7fffffff) {
        if (block >= s.data_parallel_tiles) {
            const StreamKSplit x = s.splits[block - s.data_parallel_tiles];
            stream_k_tile = x.tile;
            row_block = s.data_parallel_tiles + stream_k_tile;
            first = x.first;
            end = x.end;
            index = x.part >> 8;
            splits = x.part & 0xff;  // `part` (none of kPagedParts) is 256 * index + splits
        }
    }
    // Not paged: returns the key at which the split ends, beyond all keys if the row tile is not split.
    template <int Step>
    __device__ __forceinline__ int key_end() const {
        return min(end, 0x7fffffff / Step) * Step;
    }
};

// First row, head and batch entry of a row tile.
template <int BlockRows>
struct TileCoord {
    int row, head, batch;
    __device__ __forceinline__ TileCoord(const Problem& p, int row_block) {
        const int tiles_of_head = (p.seqlen_q + BlockRows - 1) / BlockRows;  // row tiles
        if (kPaged) {  // the planner takes these grids for one sequence alone. Last rows of all heads first: they see most keys
            const int from_last = row_block / p.nheads;
            row = (tiles_of_head - 1 - from_last) * BlockRows;
            batch = 0;
            head = row_block - from_last * p.nheads;
            return;
        }
        const int heads = row_block / tiles_of_head;
        row = (row_block - heads * tiles_of_head) * BlockRows;
        batch = heads / p.nheads;
        head = heads - batch * p.nheads;
    }
};

// A block's TileCoord, its KV head, and its split.
template <int BlockRows>
struct SplitBlock : TileCoord<BlockRows> {
    TileSplit split;
    int head_k;
    __device__ __forceinline__ SplitBlock(const Problem& p, const TileSplit& split_)
        : TileCoord<BlockRows>(p, split_.row_block), split(split_), head_k(TileCoord<BlockRows>::head / (p.nheads / p.nheads_k)) {}
};
