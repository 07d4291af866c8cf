// Lengths that lie in memory, whose values nobody has checked.
#pragma once

// Volatile, so that what is loaded again holds no registers in between.
__device__ __forceinline__ int load_length(const int* p) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}

// Rows cu[batch] .. cu[batch + 1] of `total`, at most `longest` of them. Returns whether that is what cu says; `is_first`: the call's
// first sequence, which begins with row 0.
__device__ __forceinline__ bool packed_range(const int* cu, int batch, bool is_first, int total, int longest, int& first, int& count) {
    const int begin = load_length(cu + batch), end = load_length(cu + batch + 1);
    first = min(max(begin, 0), total);
    count = min(max(min(end, total) - first, 0), longest);
    return first == begin && first + count == end && (!is_first || begin == 0);
}
