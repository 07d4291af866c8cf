// Causal and sliding-window mask: which keys a query row sees, and which tiles need no mask. Used by the forward, backward and
// decode kernels. Positions count from a sequence's first query and first key. Let o = seqlen_k - seqlen_q (bottom-right
// alignment). Query i sees keys j with i + o - window_left <= j <= i + o + window_right and 0 <= j < seqlen_k; a causal mask has
// window_right = 0. A side without a window has a window of seqlen_q + seqlen_k. That reaches past either end, so no code tests for
// "no window". Arguments may lie outside the matrix, in the padding of edge tiles.
#pragma once

#include "volta_fa_params.h"  // generated from src/params: Problem, whose window_* count keys

// The mask of one sequence.
struct Mask {
    int low, high;  // row i sees keys i + low to i + high, inclusive
    int seqlen_q, seqlen_k;

    // For sequences that all have the problem's lengths. Does not call the other constructor: ptxas schedules that worse.
    __device__ __forceinline__ explicit Mask(const Problem& p)
        : low(p.seqlen_k - p.seqlen_q - p.window_left), high(p.seqlen_k - p.seqlen_q + p.window_right), seqlen_q(p.seqlen_q),
          seqlen_k(p.seqlen_k) {}
    // For a sequence with its own lengths.
    __device__ __forceinline__ Mask(const Problem& p, int seqlen_q_, int seqlen_k_)
        : low(seqlen_k_ - seqlen_q_ - p.window_left), high(seqlen_k_ - seqlen_q_ + p.window_right), seqlen_q(seqlen_q_),
          seqlen_k(seqlen_k_) {}

    __device__ __forceinline__ bool visible(int row, int key) const {
        return key >= row + low && key <= row + high && key < seqlen_k;
    }

    // Keys that any of the rows [row, row + rows) sees: [first, end). Empty if first >= end.
    __device__ __forceinline__ int key_first(int row) const { return max(row + low, 0); }
    __device__ __forceinline__ int key_end(int row, int rows) const { return min(min(row + rows, seqlen_q) + high, seqlen_k); }

    // Keys that all of the rows [row, row + rows) see: [first, end). A tile inside needs no mask.
    __device__ __forceinline__ int full_first(int row, int rows) const { return row + rows - 1 + low; }
    __device__ __forceinline__ int full_end(int row) const { return min(row + high + 1, seqlen_k); }

    // Rows that see any of the keys [key, key + keys): [first, end).
    __device__ __forceinline__ int row_first(int key) const { return max(key - high, 0); }
    __device__ __forceinline__ int row_end(int key, int keys) const { return min(min(key + keys, seqlen_k) - low, seqlen_q); }
    // Rows that see all of these keys: [first, end).
    __device__ __forceinline__ int full_row_first(int key, int keys) const { return key + keys - 1 - high; }
    __device__ __forceinline__ int full_row_end(int key) const { return min(key - low + 1, seqlen_q); }
};

// Tests in one comparison whether a tile of Step rows sees all keys [key, key + keys), so that it needs no mask. If some of these
// keys do not exist, every tile needs it.
template <int Step>
struct UnmaskedRows {
    int first;  // such tiles begin at rows first to first + span
    unsigned span;

    __device__ __forceinline__ UnmaskedRows(const Mask& mask, int key, int keys) : first(mask.full_row_first(key, keys)) {
        const int last = mask.full_row_end(key) - Step;
        const bool none = last < first || key + keys > mask.seqlen_k;
        span = none ? 0 : last - first;
        if (none) first = 0x7fffffff;  // no row is that large
    }
    __device__ __forceinline__ bool contains(int row) const { return static_cast<unsigned>(row - first) <= span; }
};

// Tests in one comparison whether all rows [row, row + rows) see a tile of Step keys, so that it needs no mask.
template <int Step>
struct UnmaskedKeys {
    int first;  // such tiles begin at keys first to first + span
    unsigned span;

    __device__ __forceinline__ UnmaskedKeys(const Mask& mask, int row, int rows) : first(mask.full_first(row, rows)) {
        const int last = mask.full_end(row) - Step;
        const bool none = last < first;
        span = none ? 0 : last - first;
        if (none) first = 0x7fffffff;  // no key is that large
    }
    __device__ __forceinline__ bool contains(int key) const { return static_cast<unsigned>(key - first) <= span; }
};
