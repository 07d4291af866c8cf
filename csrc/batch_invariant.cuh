// Constants of batch-invariant kernels, for calls with the option batch_invariant: a query gets the same output bits whatever else
// is in the batch. A row's bits depend on its own query, keys and values alone: not on other rows of its tile, other sequences, or
// the number of blocks. These kernels are the usual sources, compiled again with -DBATCH_INVARIANT. Included by the forward and
// decode kernels; docs/design/batch-invariance.md lists all differences.
#pragma once

#include "softmax.cuh"  // RescaledRows: which rows move

#ifdef BATCH_INVARIANT
constexpr bool kBatchInvariant = true;
#else
constexpr bool kBatchInvariant = false;
#endif

// A row's softmax maximum is lazy: a warp raises it, and rescales the output, only once a score of any of its rows exceeds that
// row's limit (softmax.cuh). kMovedRows says which rows then move: usually all, so that the next time comes later. A move changes a
// row's rounding, and no neighbor may cause it: batch-invariant kernels move only rows above their own limits.
constexpr RescaledRows kMovedRows = kBatchInvariant ? RescaledRows::kExceeding : RescaledRows::kAll;

// Returns the first key of the main loop: `key`, the first that a window lets the block's rows see. Batch-invariant kernels round
// it down to a multiple of Step, the keys of an iteration: which keys share a product must not depend on the block.
template <int Step>
__device__ __forceinline__ int first_step(int key) {
    return kBatchInvariant ? key / Step * Step : key;
}
