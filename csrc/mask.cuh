// The one mask rule, for both passes.
//
// Query row i sees the keys j with  i + o - window_left <= j <= i + o + window_right  and
// 0 <= j < seqlen_k, where o = seqlen_k - seqlen_q (bottom-right alignment). A side without a bound
// carries seqlen_q + seqlen_k, so nothing here tests for "no window". All arguments may lie outside the
// matrix (the padding of an edge tile).
#pragma once

#include "volta_fa_params.h"

struct Mask {
    int low, high;  // the keys of row i are i + low .. i + high, both inclusive
    int seqlen_q, seqlen_k;

    // (Not by the other: ptxas schedules that worse.)
    __device__ __forceinline__ explicit Mask(const Problem& p)
        : low(p.seqlen_k - p.seqlen_q - p.window_left), high(p.seqlen_k - p.seqlen_q + p.window_right), seqlen_q(p.seqlen_q),
          seqlen_k(p.seqlen_k) {}
    // For a sequence that is not as long as the problem says.
    __device__ __forceinline__ Mask(const Problem& p, int seqlen_q_, int seqlen_k_)
        : low(seqlen_k_ - seqlen_q_ - p.window_left), high(seqlen_k_ - seqlen_q_ + p.window_right), seqlen_q(seqlen_q_),
          seqlen_k(seqlen_k_) {}

    __device__ __forceinline__ bool visible(int row, int key) const {
        return key >= row + low && key <= row + high && key < seqlen_k;
    }

    // Keys that any of the rows [row, row + rows) sees: [first, end). Empty where first >= end.
    __device__ __forceinline__ int key_first(int row) const { return max(row + low, 0); }
    __device__ __forceinline__ int key_end(int row, int rows) const { return min(min(row + rows, seqlen_q) + high, seqlen_k); }

    // Keys that all of the rows [row, row + rows) see: [first, end). A tile of keys inside needs no mask.
    __device__ __forceinline__ int full_first(int row, int rows) const { return row + rows - 1 + low; }
    __device__ __forceinline__ int full_end(int row) const { return min(row + high + 1, seqlen_k); }

    // The same, seen from the keys: rows that see any of the keys [key, key + keys) ...
    __device__ __forceinline__ int row_first(int key) const { return max(key - high, 0); }
    __device__ __forceinline__ int row_end(int key, int keys) const { return min(min(key + keys, seqlen_k) - low, seqlen_q); }
    // ... and rows that see all of them.
    __device__ __forceinline__ int full_row_first(int key, int keys) const { return key + keys - 1 - high; }
    __device__ __forceinline__ int full_row_end(int key) const { return min(key - low + 1, seqlen_q); }
};

// Of the keys [key, key + keys): the tiles of Step rows that need no mask, in one comparison. Where some
// of the keys lie beyond the last one, all tiles need it.
template <int Step>
struct UnmaskedRows {
    int first;       // such tiles begin at first .. first + span
    unsigned span;

    __device__ __forceinline__ UnmaskedRows(const Mask& mask, int key, int keys) : first(mask.full_row_first(key, keys)) {
        const int last = mask.full_row_end(key) - Step;
        const bool none = last < first || key + keys > mask.seqlen_k;
        span = none ? 0 : last - first;
        if (none) first = 0x7fffffff;  // no row is so large
    }
    __device__ __forceinline__ bool contains(int row) const { return static_cast<unsigned>(row - first) <= span; }
};

// Of the rows [row, row + rows): the tiles of Step keys that need no mask, in one comparison.
template <int Step>
struct UnmaskedKeys {
    int first;       // such tiles begin at first .. first + span
    unsigned span;

    __device__ __forceinline__ UnmaskedKeys(const Mask& mask, int row, int rows) : first(mask.full_first(row, rows)) {
        const int last = mask.full_end(row) - Step;
        const bool none = last < first;
        span = none ? 0 : last - first;
        if (none) first = 0x7fffffff;  // no key is so large
    }
    __device__ __forceinline__ bool contains(int key) const { return static_cast<unsigned>(key - first) <= span; }
};
