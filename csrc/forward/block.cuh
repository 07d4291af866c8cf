// Grid mapping of the forward kernels: a block's query rows, head and batch entry, from blockIdx. (Stream-K grids have one of their
// own, tile_split.cuh.) remat_* functions (rematerialize, ptx.cuh) read a special register again where the value is needed, so that
// it holds no register in between.
#pragma once

#include "mask.cuh"  // Mask: key_first(), key_end(): keys that rows see
#include "tile.cuh"  // for its ptx.cuh: remat_*()
#include "volta_fa_params.h"  // generated from src/params: Problem

// Returns whether the grid's x axis is heads and its y axis blocks of rows, which EitherOrder allows (Layout::kEitherOrder). The
// planner chooses it under causal and block masks: blocks start x first, so the long blocks of all heads start first. The kernel
// infers it from the grid's size. With as many heads as blocks of rows, both orders cover the same pairs.
template <bool EitherOrder>
__device__ __forceinline__ bool heads_first(const Problem& p) {
    return EitherOrder && gridDim.x == p.nheads;
}
template <bool EitherOrder>
__device__ __forceinline__ int remat_head(const Problem& p) {
    return heads_first<EitherOrder>(p) ? remat_block_x() : remat_block_y();
}

// Query heads that a block computes. Grid: a grid policy, the kernels' template argument that says which rows and keys a block has.
// The two policies for several heads (HeadGroupGrid, {volta,turing}/forward) specialize this constant.
template <class Grid>
constexpr int kBlockHeads = 1;

// A block's first query row, query head, KV head and batch entry. The last rows come first: under a causal mask they see the most
// keys, and a long block that starts last would run alone at the end.
template <int BlockRows, bool EitherOrder = false>
struct ForwardBlock {
    int row, head, head_k, batch;
    __device__ __forceinline__ explicit ForwardBlock(const Problem& p)
        : row((heads_first<EitherOrder>(p) ? gridDim.y - 1 - blockIdx.y : gridDim.x - 1 - blockIdx.x) * BlockRows),
          head(heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y),
          head_k((heads_first<EitherOrder>(p) ? blockIdx.x : blockIdx.y) / (p.nheads / p.nheads_k)), batch(blockIdx.z) {}
    __device__ __forceinline__ static int remat_row(const Problem& p) {
        return (heads_first<EitherOrder>(p) ? gridDim.y - 1 - remat_block_y() : gridDim.x - 1 - remat_block_x()) * BlockRows;
    }
};

// The same for a block that computes Heads heads of one KV head, with one warp per head: BlockRows / Heads rows of each, from `row`
// on. Fewer rows of a head span fewer keys, so under a short window fewer of the loaded keys are masked. The grid's axes: row
// tiles, groups of heads.
template <int BlockRows, int Heads>
struct HeadGroupBlock {
    int row, head, head_k, batch;  // `head`: the first
    __device__ __forceinline__ explicit HeadGroupBlock(const Problem& p)
        : row(remat_row(p)), head(blockIdx.y * Heads), head_k(head / (p.nheads / p.nheads_k)), batch(blockIdx.z) {}
    __device__ __forceinline__ static int remat_row(const Problem&) {
        return (gridDim.x - 1 - remat_block_x()) * (BlockRows / Heads);
    }
};
// The Block of grid policies without a block mask: a thread block's coordinates, from Base (ForwardBlock or HeadGroupBlock), and
// its range of keys. Rows: the block's rows of a head. Other policies' Block reads its Grid; here that argument is unused.
template <class Base, int Rows>
struct DenseBlock : Base {
    template <class Grid>
    __device__ __forceinline__ DenseBlock(const Problem& p, const Grid&) : Base(p) {}
    // The block's keys: first to end - 1, those that `mask` lets any of its rows see. Step (keys of an iteration) is unused here;
    // the ranges of volta/forward/stream_k.cuh count steps.
    template <int Step>
    __device__ __forceinline__ int key_first(const Mask& mask) const {
        return mask.key_first(Base::row);
    }
    template <int Step>
    __device__ __forceinline__ int key_end(const Mask& mask) const {
        return mask.key_end(Base::row, Rows);
    }
};
// Returns the warp's head; one warp per head.
template <int Heads>
__device__ __forceinline__ int remat_group_head() {
    return remat_block_y() * Heads + remat_thread_index() / 32;
}
