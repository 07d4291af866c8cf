// Lengths that lie in memory, whose values nobody has checked.
#pragma once

#include "volta_fa_params.h"

// Volatile, so that what is loaded again holds no registers in between.
__device__ __forceinline__ int load_length(const int* p) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}

// Rows cu[batch] .. cu[batch + 1] of `total`, at most `longest` of them. Returns whether that is what cu says; the call's first
// sequence begins with row 0.
__device__ __forceinline__ bool packed_range(const Lengths& lengths, const int* cu, int batch, int total, int longest, int& first,
                                             int& count) {
    const int begin = load_length(cu + batch), end = load_length(cu + batch + 1);
    first = min(max(begin, 0), total);
    count = min(max(min(end, total) - first, 0), longest);
    return first == begin && first + count == end && (lengths.first_batch + batch > 0 || begin == 0);
}
