// Block index of the forward kernels: block of rows, head and batch entry.
#pragma once

#include "tile.cuh"
#include "volta_fa_params.h"

// The grid's first axis is blocks of rows and its second heads. With EitherOrder it may be the other way round: the planner
// decides, and the kernel infers it from the grid's size. If there are as many heads as blocks of rows, both readings are
// right.
template <bool EitherOrder>
__device__ __forceinline__ bool heads_first(const Problem& p) {
    return EitherOrder && gridDim.x == p.nheads;
}
// The block's head, read again (see remat_thread_index()).
template <bool EitherOrder>
__device__ __forceinline__ int remat_head(const Problem& p) {
    return heads_first<EitherOrder>(p) ? remat_block_index() : remat_block_head();
}

// Blocks start in the order of blockIdx, first axis first. The last rows come first: under a causal mask they see the most
// keys, and a long block that starts late is a tail.
template <int BlockRows, bool EitherOrder = false>
struct ForwardBlock {
    int row, head, head_k, batch;
    __device__ __forceinline__ explicit ForwardBlock(const Problem& p)
        : row((heads_first<EitherOrder>(p) ? gridDim.y - 1 - blockIdx.y : gridDim.x - 1 - blockIdx.x) * BlockRows),
          head(heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y),
          head_k((heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y) / (p.nheads / p.nheads_k)), batch(blockIdx.z) {}
    // `row`, computed again (see remat_thread_index()).
    __device__ __forceinline__ static int remat_row(const Problem& p) {
        return (heads_first<EitherOrder>(p) ? gridDim.y - 1 - remat_block_head() : gridDim.x - 1 - remat_block_index()) * BlockRows;
    }
};
