// Dropout in the turing backward kernels: which of a lane's probabilities are kept (philox.cuh).
#pragma once

#include "backward/modifiers.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// For layouts where a lane has two keys of an aligned group of four, for two queries. The partner lane has the other two keys
// of the same queries, so each draws for one query, and they exchange. All lanes of the warp call it together.
template <class Layout>
__device__ __forceinline__ u32 draw_kept_pairs(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    static_assert(Layout::kRows == 2 && Layout::kKeys == 2, "a lane has two keys of two queries");
    const int odd = coord.key(0) & 1, row = coord.query(0) + (odd ? Layout::row_slot(1) : 0);
    const u32 mine = rule.kept_bits(philox.numbers(row & ~4, coord.key(0) & ~3));
    return merge_calls(mine, __shfl_xor_sync(~0u, mine, Layout::kKeyPartnerMask), row >> 2 & 1, odd) >> odd;
}

// Returns a word whose bit kept_bit(row_of(v), key_slot(v)) is set if element v is kept (is_kept). Ignore its other bits: with two
// keys per lane they belong to the partner's keys.
template <class Layout>
__device__ __forceinline__ u32 draw_kept_tile(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    if constexpr (Layout::kKeys == 4)
        return draw_kept_rows(philox, rule, coord);
    else
        return draw_kept_pairs(philox, rule, coord);
}

}  // namespace turing
