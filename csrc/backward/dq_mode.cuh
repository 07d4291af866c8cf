// What a main kernel of the backward pass ({volta,turing}/backward/single_role.cuh, warp_specialized.cuh) does with dq. Template
// parameter of these kernels: Pass::dq_mode in src/kernels/passes.rs chooses it for each.
#pragma once

enum class DqMode {
    kSeparate,  // leaves dq to a second kernel (dq.cuh, dq_warp_specialized.cuh): deterministic, no atomics
    kAtomicAdd,  // adds dq to the fp32 accumulator by atomics; preprocess clears it, postprocess converts it
    // Stores dq itself, because the block has all keys of its heads: the fused kernel, the whole backward pass in one launch.
    // It computes the row statistics too, and visits all query rows, because rows that see no key get a dq of 0.
    kStore,
};
