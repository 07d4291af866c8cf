// Loads and clamps sequence lengths (in rows) from GPU memory, which the host may not have validated. Used by seqlen_info.cuh,
// cache.cuh, decode/partials.cuh and shared/select/select.cuh.
#pragma once

#include "ptx.cuh"  // load_int(): a volatile load
#include "volta_fa_params.h"  // generated from src/params: Lengths

// Loads one length, page number or index.
__device__ __forceinline__ int load_length(const int* p) { return load_int(p); }

// Sets `first` and `count` to the rows of sequence `batch` in a packed tensor, cu[batch] to cu[batch + 1] - 1, clamped to the
// tensor's `total` rows and to `longest` (max_seqlen). Returns true if clamping changed nothing and the call's first sequence
// begins with row 0. (A call can take several launches. first_batch: sequences of earlier ones.)
__device__ __forceinline__ bool packed_range(const Lengths& lengths, const int* cu, int batch, int total, int longest, int& first,
                                             int& count) {
    const int begin = load_length(cu + batch), end = load_length(cu + batch + 1);
    first = min(max(begin, 0), total);
    count = min(max(min(end, total) - first, 0), longest);
    return first == begin && first + count == end && (lengths.first_batch + batch > 0 || begin == 0);
}
