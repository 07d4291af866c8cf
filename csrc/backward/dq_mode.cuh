// What a main kernel of the backward pass does with dq. A main kernel's blocks own keys and compute dk and dv, but each block has
// only a part of every row of dq. Template parameter of {volta,turing}/backward/single_role.cuh and warp_specialized.cuh;
// Pass::dq_mode in src/kernels/passes.rs chooses it for each kernel.
#pragma once

enum class DqMode {
    kSeparate,  // leaves dq to a second kernel (dq.cuh, dq_warp_specialized.cuh): deterministic, no atomics
    kAtomicAdd,  // adds dq to an fp32 accumulator by atomics; the preprocess kernel clears it, the postprocess kernel converts it
    // Stores dq itself, because the block has all keys of its heads: the fused kernel, the whole backward pass in one launch. It
    // also computes each row's delta, rowsum(dO * O), as preprocess would, and visits all query rows: dq is 0 if one sees no key.
    kStore,
};
