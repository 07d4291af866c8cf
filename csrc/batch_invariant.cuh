// What kernels of batch-invariant calls do otherwise (Variant::is_batch_invariant). A row's bits depend on its own query, keys and
// values alone: not on other rows of its tile, other sequences, or the number of blocks. docs/design/batch-invariance.md explains
// each difference. Included where such a difference is.
#pragma once

#include "softmax.cuh"

#ifdef BATCH_INVARIANT
constexpr bool kBatchInvariant = true;
#else
constexpr bool kBatchInvariant = false;
#endif

// Which rows of a warp move their maximum once a score of any row exceeds its limit: all, or those above their own limits. A
// maximum that moves because of a neighbor would round the row's probabilities otherwise.
constexpr RescaledRows kMovedRows = kBatchInvariant ? RescaledRows::kExceeding : RescaledRows::kAll;

// The first key of a block of rows, rounded down to a whole step: which keys share a product must not depend on the block.
template <int Step>
__device__ __forceinline__ int first_step(int key) {
    return kBatchInvariant ? key / Step * Step : key;
}
