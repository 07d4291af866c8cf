// DenseBlocks, the default template argument Blocks of the backward main and dq kernels: no block-sparse mask, so a thread block
// visits all columns of a range. Main kernels own keys, and their columns are queries; dq kernels own queries and visit keys.
// ListedBlocks (backward/block_mask.cuh) has the same interface for kernels with such a mask.
#pragma once

#include "dense_steps.cuh"
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Stands in for ScoreBits (block_mask.cuh), which hides single scores of partially masked blocks. Its calls compile to nothing.
// Unnamed numbers are ScoreBits': the warp's first row and column, the sequence's columns; hide(): a tile's numbers (m, n).
struct NoScoreBits {
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks&, const Steps&, int, int, int) {}
    __device__ __forceinline__ static constexpr bool any() { return false; }
    template <class Tile>
    __device__ __forceinline__ void hide(Tile&, int, int = 0) const {}
};

struct DenseBlocks {
    static constexpr bool kListed = false;  // whether lists name the steps
    template <class Layout, int Rows>
    using Bits = NoScoreBits;
    // Iterates over the columns from `first` up to `end`, Step at a time. Unnamed arguments are those of ListedBlocks: a head, a
    // row, and the sequence's columns. DenseSteps ignores its first two.
    template <int Step>
    __device__ __forceinline__ DenseSteps<Step> steps(const BwdParams&, int, int, int first, int end, int) const {
        return DenseSteps<Step>(0, 0, first, end);
    }
    // Main kernels: number of the thread block's key block, of Keys keys. Grid maps blockIdx to key blocks and KV heads.
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
