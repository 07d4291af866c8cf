// Dropout where a lane has two keys of a group of four, for two queries: which of its probabilities are kept.
#pragma once

#include "backward/modifiers.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// The lane that has the other two keys has the same queries: each computes the numbers of one of them. All lanes of the warp together.
template <class Layout>
class KeptPairs {
    u32 kept_;  // a bit for each key of four, of which the lane has 0 and 2 from here on; the second query's four bits further

public:
    __device__ __forceinline__ KeptPairs(const Philox& philox, unsigned threshold, const ScorePlace<Layout>& place) {
        static_assert(Layout::kRows == 2 && Layout::kKeys == 2, "see above");
        const int odd = place.key(0) & 1;
        const u32 mine = kept(philox.numbers(place.query(0) + (odd ? Layout::row_slot(1) : 0), place.key(0) & ~3), threshold);
        const u32 other = __shfl_xor_sync(~0u, mine, Layout::kKeyMate);
        kept_ = (odd ? other | mine << 4 : mine | other << 4) >> odd;
    }
    __device__ __forceinline__ bool operator[](int v) const { return kept_ >> (4 * Layout::row_of(v) + Layout::key_slot(v)) & 1; }
    // The sign bits of those dropped, of a pair of halves: both queries' of the lane's key number h.
    __device__ __forceinline__ u32 dropped_signs(int h) const {
        return (~kept_ << (15 - 2 * h) & 0x8000) | (~kept_ << (27 - 2 * h) & 0x80000000);
    }
};

}  // namespace turing
