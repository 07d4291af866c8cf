// Grid policy of the volta main kernels (single_role.cuh, warp_specialized.cuh), their template argument Grid: which keys and which
// KV head a block has. stream_k.cuh has the other policy, StreamKKeyBlock.
#pragma once

#include "backward/tiles.cuh"
#include "volta_fa_params.h"

namespace volta {

// The grid's first axis is blocks of keys and its second KV heads, or the other way round; the third is batch entries. Blocks start
// along the first axis. Under a causal mask the first keys are seen by the most queries, so they start first: those of all heads,
// with heads on the first axis. remat_*() reads blockIdx again, to hold no register. BatchAxis has batch(), the batch entry.
struct KeyBlock : BatchAxis {
    static constexpr bool kStreamK = false;  // a block visits all queries of its keys
    // The planner (src/plan) puts heads first under causal and block masks; the kernel infers it from the grid's size. With as many
    // KV heads as blocks of keys, both orders cover the same (block of keys, KV head) pairs.
    __device__ __forceinline__ static bool heads_first(const BwdParams& p) { return gridDim.x == p.problem.nheads_k; }
    // Number of the block of keys in its KV head, head(). One launch may take a part of these, from first_key_block on.
    __device__ __forceinline__ static int number(const BwdParams& p) { return p.first_key_block + in_launch(p); }
    __device__ __forceinline__ static int head(const BwdParams& p) { return heads_first(p) ? remat_block_x() : remat_block_y(); }
    // Blocks of keys of a head in this launch.
    __device__ __forceinline__ static int count(const BwdParams& p) { return heads_first(p) ? gridDim.y : gridDim.x; }
    // The fp32 accumulator that the block adds dq to: the only one if the stride is 0, else one that no other block of keys of this
    // launch adds to, which makes dq deterministic. The stride counts floats.
    __device__ __forceinline__ static float* dq_accum(const BwdParams& p) {
        return p.dq_accum + in_launch(p) * p.dq_accum_split_stride;
    }
    // Called after the last step with the accumulators of dk and dv. Returns whether this block of Threads threads stores them:
    // always here. (StreamKKeyBlock first adds those of the other blocks that have the same keys.)
    template <int Threads, class... Gradients>
    __device__ __forceinline__ static bool combine_splits(Gradients&...) {
        return true;
    }

private:
    // Number of the block of keys among those of its head in this launch.
    __device__ __forceinline__ static int in_launch(const BwdParams& p) {
        return heads_first(p) ? remat_block_y() : remat_block_x();
    }
};

}  // namespace volta
