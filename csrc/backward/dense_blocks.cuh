// DenseBlocks, the default template argument Blocks of backward kernels: they have no block-sparse mask. ListedBlocks
// (block_mask.cuh) has the same interface with one.
#pragma once

#include "dense_steps.cuh"
#include "volta_fa_params.h"

// Stands in for ScoreBits (block_mask.cuh), a bit for each score of a block that the mask hides in part. Without a block mask its
// calls compile to nothing.
struct NoScoreBits {
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks&, const Steps&, int, int, int) {}
    __device__ __forceinline__ static constexpr bool any() { return false; }
    template <class Tile>
    __device__ __forceinline__ void hide(Tile&, int, int = 0) const {}
};

// A block visits all steps of a range.
struct DenseBlocks {
    static constexpr bool kListed = false;
    template <class Layout, int Rows>
    using Bits = NoScoreBits;
    // The steps from `first` up to `end`. ListedBlocks' other arguments are a head, a row and the number of columns. DenseSteps
    // ignores its grid and its block: 0.
    template <int Step>
    __device__ __forceinline__ DenseSteps<Step> steps(const BwdParams&, int, int, int first, int end, int) const {
        return DenseSteps<Step>(0, 0, first, end);
    }
    // Number of the thread block's block of Keys keys in the main kernels.
    template <int Keys, class Grid>
    __device__ __forceinline__ static int key_block(const BwdParams& p, const Grid& grid) {
        return grid.number(p);
    }
    // First row of a block of Rows queries in the dq kernels. Under a causal mask the last queries see the most keys, so they start
    // first.
    template <int Rows>
    __device__ __forceinline__ static int first_row(const BwdParams&) {
        return (gridDim.x - 1 - blockIdx.x) * Rows;
    }
};
