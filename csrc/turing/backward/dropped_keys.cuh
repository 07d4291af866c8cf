// Dropout: which of a lane's probabilities are kept.
#pragma once

#include "backward/modifiers.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Where a lane has two keys of a group of four, for two queries: the lane that has the other two has the same queries: each
// computes the numbers of one of them. All lanes of the warp together.
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
    // As kept_bits in backward/modifiers.cuh: bit 4 * row_of(v) + key_slot(v) of element v.
    __device__ __forceinline__ u32 bits() const { return kept_; }
};

// The same for any layout.
template <class Layout>
__device__ __forceinline__ u32 kept_of_tile(const Philox& philox, unsigned threshold, const ScorePlace<Layout>& place) {
    if constexpr (Layout::kKeys == 4)
        return kept_bits(philox, threshold, place);
    else
        return KeptPairs<Layout>(philox, threshold, place).bits() & 0xff;
}

}  // namespace turing
