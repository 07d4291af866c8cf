// DenseBlocks says which columns a thread block of a backward kernel visits without a block-sparse mask: all of a range. Main
// kernels compute dK and dV, most also dQ: a thread block owns keys, and its columns are queries. dq kernels compute dQ: a thread
// block owns queries, and its columns are keys. DenseBlocks is the default template argument Blocks of both. ListedBlocks
// (backward/block_mask.cuh) has the same interface for block-sparse masks.
#pragma once

#include "dense_steps.cuh"  // DenseSteps: iterator over a range, a step (the columns that a thread block computes at once) at a time
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Stands in for ScoreBits (block_mask.cuh), which hides single scores of partially masked blocks. Its calls compile to nothing.
// load()'s unnamed numbers are the warp's first row and column, and the number of the sequence's columns; hide()'s a tile's
// numbers, of rows and of columns.
struct NoScoreBits {
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks&, const Steps&, int, int, int) {}
    __device__ __forceinline__ static constexpr bool any() { return false; }
    template <class Tile>
    __device__ __forceinline__ void hide(Tile&, int, int = 0) const {}
};

struct DenseBlocks {
    static constexpr bool kListed = false;  // tells kernels that no lists name the steps
    template <class Layout, int Rows>
    using Bits = NoScoreBits;
    // Iterates over the columns from `first` up to `end`, Step at a time. Unnamed arguments are those of ListedBlocks: a head, a
    // row, and the sequence's columns. DenseSteps ignores its first two arguments: from them, iterators over lists find a list.
    template <int Step>
    __device__ __forceinline__ DenseSteps<Step> steps(const BwdParams&, int, int, int first, int end, int) const {
        return DenseSteps<Step>(0, 0, first, end);
    }
    // Main kernels: which of the sequence's blocks of Keys keys the thread block owns. Grid maps blockIdx to it and to a KV head.
    template <int Keys, class Grid>
    __device__ __forceinline__ static int key_block(const BwdParams& p, const Grid& grid) {
        return grid.number(p);
    }
    // First of the thread block's Rows queries in dq kernels. Under a causal mask the last queries see most keys: they start first.
    template <int Rows>
    __device__ __forceinline__ static int first_row(const BwdParams&) {
        return (gridDim.x - 1 - blockIdx.x) * Rows;
    }
};
