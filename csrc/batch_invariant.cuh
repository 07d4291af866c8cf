// What batch-invariant kernels do differently: they are the usual sources, compiled again with -DBATCH_INVARIANT. A row's bits
// depend on its own query, keys and values alone: not on other rows of its tile, other sequences, or the number of blocks. Included
// by the forward and decode kernels; docs/design/batch-invariance.md lists all differences.
#pragma once

#include "softmax.cuh"

#ifdef BATCH_INVARIANT
constexpr bool kBatchInvariant = true;
#else
constexpr bool kBatchInvariant = false;
#endif

// Which rows of a warp move their softmax maximum, which is updated lazily (softmax.cuh), once a score of any row exceeds its
// limit: all, or those above their own limits. A move changes a row's rounding, so a neighbor must not cause it.
constexpr RescaledRows kMovedRows = kBatchInvariant ? RescaledRows::kExceeding : RescaledRows::kAll;

// Returns the first key of the main loop: `key`, the first that a window lets the block's rows see. Batch-invariant kernels round
// it down to a multiple of Step, the keys of an iteration: which keys share a product must not depend on the block.
template <int Step>
__device__ __forceinline__ int first_step(int key) {
    return kBatchInvariant ? key / Step * Step : key;
}
