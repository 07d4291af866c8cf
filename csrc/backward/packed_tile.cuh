// A lane's part of a 16x16 tile of P^T or dS^T (rows are keys), packed to fp16, and dropout on it. Used by the scores kernels of
// both families (store_scores.cuh) and by volta's main kernels. A lane has four neighboring queries of two keys that are two apart.
// Their elements v as fp32, and the words as fp16, counted from the lane's first query and key:
//
//            query 0, 1        query 2, 3
//   key 0    v 0, 1: word 0    v 4, 5: word 1
//   key 2    v 2, 3: word 2    v 6, 7: word 3
#pragma once

#include "backward/modifiers.cuh"
#include "backward/residual_signs.cuh"

struct PackedTile {
    unsigned x[4];  // words
};
// Word i has elements packed_element(i) and packed_element(i) + 1. Element v is in word packed_word(v).
__device__ __forceinline__ constexpr int packed_element(int i) { return 4 * (i % 2) + 2 * (i / 2); }
__device__ __forceinline__ constexpr int packed_word(int v) { return (v & 2) + (v >> 2); }

// Packs a tile by pack(lo, hi).
template <class Pack>
__device__ __forceinline__ PackedTile packed(const float (&s)[8], Pack pack) {
    const auto word = [&](int i) { return pack(s[packed_element(i)], s[packed_element(i) + 1]); };
    return {{word(0), word(1), word(2), word(3)}};
}
__device__ __forceinline__ PackedTile pack_probability_tile(const float (&s)[8]) { return packed(s, pack_shifted); }
// Also sets `with_signs` to the tile with residual signs (residual_signs.cuh).
__device__ __forceinline__ PackedTile pack_probability_tile(const float (&s)[8], PackedTile& with_signs) {
    PackedTile tile;
#pragma unroll
    for (int i = 0; i < 4; i++) tile.x[i] = pack_shifted_and_signs(s[packed_element(i)], s[packed_element(i) + 1], with_signs.x[i]);
    return tile;
}
// dS stays fp32 until here, because dP - delta may be far beyond fp16 where P is small. Only dS itself is rounded. Beyond 65504
// it becomes infinity, which a GradScaler detects.
__device__ __forceinline__ PackedTile pack_tile(const float (&s)[8]) { return packed(s, to_half2); }
// Multiplies s by value(x) of the elements of a tile.
template <class Value>
__device__ __forceinline__ void multiply(float (&s)[8], const PackedTile& x, Value value) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_float2(x.x[i]);
        s[packed_element(i)] *= value(pair.x);
        s[packed_element(i) + 1] *= value(pair.y);
    }
}
__device__ __forceinline__ void multiply(float (&s)[8], const PackedTile& x) {
    multiply(s, x, [](float element) { return element; });
}
// Returns x, which has no signs, with the signs of y.
__device__ __forceinline__ PackedTile with_signs_of(const PackedTile& x, const PackedTile& y) {
    const auto word = [&](int i) { return x.x[i] | (y.x[i] & kSigns); };
    return {{word(0), word(1), word(2), word(3)}};
}
__device__ __forceinline__ PackedTile without_signs(const PackedTile& x) {
    return {{x.x[0] & ~kSigns, x.x[1] & ~kSigns, x.x[2] & ~kSigns, x.x[3] & ~kSigns}};
}
// Multiplies s by x, probabilities whose signs are those of residuals, or mean something else.
__device__ __forceinline__ void multiply_by_probabilities(float (&s)[8], const PackedTile& x, bool has_residuals) {
    multiply(s, x, [=](float p) { return from_residual_sign(p, has_residuals); });
}

// Decides which probabilities of one tile are dropped. One partner lane (XOR Layout::kKeyPartnerMask) has the other two keys of an
// aligned group of four. Another (kQueryPartnerMask) has the queries 4 before or after, which share Philox calls with this lane's.
// So the four lanes need four calls: each makes one, and they exchange the bits. All lanes of the warp construct it together.
template <class Layout>
class DroppedKeys {
    unsigned kept_;

public:
    __device__ __forceinline__ DroppedKeys(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
        const int odd = coord.key(0) & 1, has_bit_of_4 = coord.query(0) >> 2 & 1;
        // A call is that of a row whose bit 2 is clear, and of an aligned group of four keys (philox.cuh).
        const unsigned drawn = rule.kept_bits(philox.numbers((coord.query(0) & ~4) + odd + 2 * has_bit_of_4, coord.key(0) & ~3));
        // Bits of the lane's queries `odd` and odd + 2, then of the other two. Shifted by `odd`, the lane's keys are in columns
        // 0 and 2.
        const unsigned own = merge_calls(drawn, __shfl_xor_sync(~0u, drawn, Layout::kQueryPartnerMask), has_bit_of_4, has_bit_of_4);
        const unsigned others = __shfl_xor_sync(~0u, own, Layout::kKeyPartnerMask);
        const unsigned even_queries = (odd ? others : own) >> odd, odd_queries = (odd ? own : others) >> odd;
        // Number of an element's bit: 2 * (pair of queries) + 8 * (key) + 16 * (query of the pair), each 0 or 1.
        kept_ = __byte_perm(even_queries, odd_queries, 0x6420);
    }
    // Returns the sign bits (0x8000, 0x80000000) of dropped elements in word i of a packed tile.
    __device__ __forceinline__ unsigned signs(int i) const { return ~kept_ << (15 - 2 * (i % 2) - 8 * (i / 2)) & 0x80008000; }
};
