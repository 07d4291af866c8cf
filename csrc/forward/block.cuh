// Which block of rows, head and batch entry a block of a forward kernel works on.
#pragma once

#include "tile.cuh"
#include "volta_fa_params.h"

// Blocks start in the order of blockIdx: the last rows first, since under a causal mask they see the most keys and a
// late long block is a tail.
template <int BlockRows>
struct ForwardBlock {
    int row, head, head_k, batch;
    __device__ __forceinline__ explicit ForwardBlock(const Problem& p)
        : row((gridDim.x - 1 - blockIdx.x) * BlockRows), head(blockIdx.y), head_k(blockIdx.y / (p.nheads / p.nheads_k)),
          batch(blockIdx.z) {}
    // `row`, for a branch that is rarely taken: thread_index_here().
    __device__ __forceinline__ static int row_here() { return (gridDim.x - 1 - block_index_here()) * BlockRows; }
};
