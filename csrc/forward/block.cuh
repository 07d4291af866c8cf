// Grid mapping of the forward kernels: a block's rows, head and batch entry, from blockIdx.
#pragma once

#include "tile.cuh"
#include "volta_fa_params.h"

// The grid's x axis is blocks of rows and its y axis heads. With EitherOrder it may be the other way round: the planner
// decides, and the kernel infers it from the grid's size. If there are as many heads as blocks of rows, both mappings cover the
// same tiles.
template <bool EitherOrder>
__device__ __forceinline__ bool heads_first(const Problem& p) {
    return EitherOrder && gridDim.x == p.nheads;
}
// The block's head, rematerialized (ptx.cuh).
template <bool EitherOrder>
__device__ __forceinline__ int remat_head(const Problem& p) {
    return heads_first<EitherOrder>(p) ? remat_block_x() : remat_block_y();
}

// Blocks start in the order of blockIdx, x fastest. The last rows come first: under a causal mask they see the most keys, and a
// long block that starts last makes a tail.
template <int BlockRows, bool EitherOrder = false>
struct ForwardBlock {
    int row, head, head_k, batch;
    __device__ __forceinline__ explicit ForwardBlock(const Problem& p)
        : row((heads_first<EitherOrder>(p) ? gridDim.y - 1 - blockIdx.y : gridDim.x - 1 - blockIdx.x) * BlockRows),
          head(heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y),
          head_k((heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y) / (p.nheads / p.nheads_k)), batch(blockIdx.z) {}
    // `row`, rematerialized (ptx.cuh).
    __device__ __forceinline__ static int remat_row(const Problem& p) {
        return (heads_first<EitherOrder>(p) ? gridDim.y - 1 - remat_block_y() : gridDim.x - 1 - remat_block_x()) * BlockRows;
    }
};
