// Block index of the volta main kernels (single_role.cuh, warp_specialized.cuh): which keys and which KV head a block has.
// BwdParams::first_key_block: number of the launch's first block of keys.
#pragma once

#include "backward/tiles.cuh"
#include "volta_fa_params.h"

namespace volta {

// The grid's first axis is blocks of keys and its second heads, or the other way round, as in forward/block.cuh. Blocks start
// in the order of blockIdx, first axis first. Under a causal mask the first keys are seen by the most queries, so they start
// first. All members read special registers again, so that they hold no register in between.
//
// The grid policy of main kernels; StreamKKeyBlock (stream_k.cuh) is the other one.
struct KeyBlock : BatchAxis {
    static constexpr bool kStreamK = false;
    // The plan chooses the order; the kernel infers it from the grid's size.
    __device__ __forceinline__ static bool heads_first(const BwdParams& p) { return gridDim.x == p.problem.nheads_k; }
    __device__ __forceinline__ static int number(const BwdParams& p) { return p.first_key_block + in_launch(p); }
    __device__ __forceinline__ static int head(const BwdParams& p) { return heads_first(p) ? remat_block_x() : remat_block_y(); }
    // Blocks of keys of a head in this launch.
    __device__ __forceinline__ static int count(const BwdParams& p) { return heads_first(p) ? gridDim.y : gridDim.x; }
    // The accumulator that the block adds dq to: the only one if the stride is 0, else one that no other block of this launch
    // adds to.
    __device__ __forceinline__ static float* dq_accum(const BwdParams& p) {
        return p.dq_accum + in_launch(p) * p.dq_accum_split_stride;
    }
    // Returns true for the block that stores these gradients.
    template <int Threads, class... Gradients>
    __device__ __forceinline__ static bool combine_splits(Gradients&...) {
        return true;
    }

private:
    __device__ __forceinline__ static int in_launch(const BwdParams& p) {
        return heads_first(p) ? remat_block_y() : remat_block_x();
    }
};

}  // namespace volta
