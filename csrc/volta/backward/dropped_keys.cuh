// Dropout of transposed scores: which of a lane's probabilities are dropped.
#pragma once

#include "backward/modifiers.cuh"
#include "volta/backward/fragments.cuh"

namespace volta {

// A lane has two keys of a group of four, for four queries, and so has its neighbour: each computes the numbers of two queries. All
// lanes of the warp together.
class DroppedKeys {
    u32 kept_ = 0;

public:
    __device__ __forceinline__ DroppedKeys(const Philox& philox, unsigned threshold, const ScorePlace<KeysLayout>& place) {
        const int odd = place.key(0) & 1, row = place.query(0) + 2 * odd, key = place.key(0) & ~3;
        u32 mine = 0;
#pragma unroll 1
        for (int i = 0; i < 2; i++) mine |= kept(philox.numbers(row + i, key), threshold) << 16 * i;
        const u32 other = __shfl_xor_sync(~0u, mine, 1);
        // bits: key of four, of which the lane has 0 and 2 from here on; pair of queries * 8; query of the pair * 16
        kept_ = (odd ? other | mine << 8 : mine | other << 8) >> odd;
    }
    // The sign bits of those of word i of a packed tile.
    __device__ __forceinline__ u32 signs(int i) const { return ~kept_ << (15 - 2 * (i / 2) - 8 * (i % 2)) & 0x80008000; }
};

}  // namespace volta
