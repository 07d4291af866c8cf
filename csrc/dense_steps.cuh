// Iteration over a contiguous range of keys or queries, in kernels without a block mask: forward grids and
// backward/dense_blocks.cuh include it. The functions are those of the iterators over a block mask's lists (block_lists.cuh has a
// table), so that a kernel's main loop is written once. They ignore their grid (policy of the kernel) and block, which
// say where the lists are.
#pragma once

// The steps (iterations of a main loop) of Step columns from `first` up to `end`. Columns are keys, or queries where rows are keys.
template <int Step>
class DenseSteps {
    int first_, end_;

public:
    template <class Grid, class Block>
    __device__ __forceinline__ DenseSteps(const Grid&, const Block&, int first, int end) : first_(first), end_(end) {}
    __device__ __forceinline__ bool exists() const { return first_ < end_; }
    __device__ __forceinline__ int first() const { return first_; }
    // First column of the step `steps` later; past the last step, one that is not loaded.
    __device__ __forceinline__ int after(int steps) const { return first_ + steps * Step; }
    template <class Grid>
    __device__ __forceinline__ void advance(const Grid&) {
        first_ += Step;
    }
    // Whether a block mask hides some scores of this step, by one bit each.
    __device__ __forceinline__ static constexpr bool has_bits() { return false; }
};

// Stands in for MaskBits (forward/block_mask.cuh), a block mask's bits of single scores. Its calls compile to nothing. Keys is an
// iterator over steps.
struct NoMaskBits {
    static constexpr bool kHidesAll = false;  // whether the bits also hide what lengths, causal masks and windows hide
    // The int: how many steps later the bits are used. (forward/split.cuh loads a step's bits late: it passes the warp's
    // first row.)
    template <class Grid, class Keys>
    __device__ __forceinline__ void load(const Grid&, const Keys&, int) {}
    // The int: the warp's first row.
    template <class Keys, class Mask>
    __device__ __forceinline__ void combine(const Keys&, const Mask&, int) {}
    // The int: first key of the tiles, counted from the step's first.
    template <class Scores>
    __device__ __forceinline__ void apply_to(Scores&, int = 0) const {}
};
