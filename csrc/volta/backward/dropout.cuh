// Dropout on transposed scores (S^T) in the volta main kernels: which of a lane's probabilities are dropped.
#pragma once

#include "backward/modifiers.cuh"
#include "volta/backward/fragments.cuh"

namespace volta {

// Decides the probabilities of one tile. A lane has two keys of an aligned group of four, for four queries. One neighbor has
// the other two keys; another has the queries 4 before or after, which share Philox calls with these. So the four lanes draw
// for one of four queries each, and exchange. All lanes of the warp construct it together.
class DroppedKeys {
    u32 kept_;

public:
    __device__ __forceinline__ DroppedKeys(const Philox& philox, const DropoutRule& rule, const ScoreCoord<KeysLayout>& coord) {
        const int odd = coord.key(0) & 1, has_bit_of_4 = coord.query(0) >> 2 & 1;
        const u32 drawn = rule.kept_bits(philox.numbers((coord.query(0) & ~4) + odd + 2 * has_bit_of_4, coord.key(0) & ~3));
        // Bits of the lane's queries `odd` and odd + 2, then of the other two. Shifted by `odd`, the lane's keys are in columns
        // 0 and 2.
        const u32 own = merge_calls(drawn, __shfl_xor_sync(~0u, drawn, 2), has_bit_of_4, has_bit_of_4);
        const u32 others = __shfl_xor_sync(~0u, own, 1);
        const u32 even_queries = (odd ? others : own) >> odd, odd_queries = (odd ? own : others) >> odd;
        // Number of an element's bit: 2 * (pair of queries) + 8 * (key) + 16 * (query of the pair), each 0 or 1.
        kept_ = __byte_perm(even_queries, odd_queries, 0x6420);
    }
    // Returns the sign bits (0x8000, 0x80000000) of dropped elements in word i of a packed tile.
    __device__ __forceinline__ u32 signs(int i) const { return ~kept_ << (15 - 2 * (i % 2) - 8 * (i / 2)) & 0x80008000; }
};

}  // namespace volta
