// Dropout: which of a lane's probabilities are kept.
#pragma once

#include "backward/modifiers.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Where a lane has two keys of a group of four, for two queries: the lane that has the other two has the same queries: each
// draws for one of them. All lanes of the warp together.
template <class Layout>
__device__ __forceinline__ u32 draw_kept_pairs(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    static_assert(Layout::kRows == 2 && Layout::kKeys == 2, "see above");
    const int odd = coord.key(0) & 1, row = coord.query(0) + (odd ? Layout::row_slot(1) : 0);
    const u32 mine = rule.kept_bits(philox.numbers(row & ~4, coord.key(0) & ~3));
    return merge_calls(mine, __shfl_xor_sync(~0u, mine, Layout::kKeyPartnerMask), row >> 2 & 1, odd) >> odd;
}

// Bit kept_bit(row_of(v), key_slot(v)) of element v, and no others but those of a call.
template <class Layout>
__device__ __forceinline__ u32 draw_kept_tile(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    if constexpr (Layout::kKeys == 4)
        return draw_kept_rows(philox, rule, coord);
    else
        return draw_kept_pairs(philox, rule, coord);
}

}  // namespace turing
