// A lane's part of a 16x16 tile of P^T or dS^T (rows are keys), packed to fp16, and dropout on it. Used by store_scores.cuh, which
// stores P and dS in both families (volta and turing), and by volta's main kernels. volta's dq kernel packs dS with it too: there
// rows are queries, so read "query" for "key" below, and the other way round. A lane has four neighboring queries of two keys that
// are two apart: 8 fp32 elements v, packed into 4 words of two fp16 each. Queries and keys count from the lane's first:
//
//            query 0, 1        query 2, 3
//   key 0    v 0, 1: word 0    v 4, 5: word 1
//   key 2    v 2, 3: word 2    v 6, 7: word 3
#pragma once

#include "backward/modifiers.cuh"  // merge_calls(), DropoutRule: bits of Philox calls, 1: kept; ScoreCoord: places of elements
#include "backward/residual_signs.cuh"  // from_residual_sign(), kSigns

struct PackedTile {
    unsigned x[4];  // words of two fp16 elements
};
// Word i has elements packed_element(i) and packed_element(i) + 1. Element v is in word packed_word(v).
__device__ __forceinline__ constexpr int packed_element(int i) { return 4 * (i % 2) + 2 * (i / 2); }
__device__ __forceinline__ constexpr int packed_word(int v) { return (v & 2) + (v >> 2); }

// Packs a tile. pack(lo, hi) returns the word of two elements.
template <class Pack>
__device__ __forceinline__ PackedTile packed(const float (&s)[8], Pack pack) {
    const auto word = [&](int i) { return pack(s[packed_element(i)], s[packed_element(i) + 1]); };
    return {{word(0), word(1), word(2), word(3)}};
}
// Packs s as P * 2^12. s is P * 2^-100 (kExponentShift, probabilities.cuh), because pack_shifted multiplies by 2^112 as it packs.
__device__ __forceinline__ PackedTile pack_probability_tile(const float (&s)[8]) { return packed(s, pack_shifted); }
// Also sets `with_signs` to the same with sign bits, which P leaves free, since it is never negative. A set bit says that fp16
// rounded P down. From it multiply_by_probabilities() corrects P by the mean rounding error, for dS (residual_signs.cuh).
__device__ __forceinline__ PackedTile pack_probability_tile(const float (&s)[8], PackedTile& with_signs) {
    PackedTile tile;
#pragma unroll
    for (int i = 0; i < 4; i++) tile.x[i] = pack_shifted_and_signs(s[packed_element(i)], s[packed_element(i) + 1], with_signs.x[i]);
    return tile;
}
// Packs dS, which is fp32 until here, because dP - delta may be far beyond fp16 where P is small. Numbers from 65520 on become
// infinity, which PyTorch's GradScaler detects.
__device__ __forceinline__ PackedTile pack_tile(const float (&s)[8]) { return packed(s, to_half2); }
// Multiplies s by a packed tile, element by element: by value(element).
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
// Returns x, whose sign bits are clear, with the sign bits of y. kSigns masks the sign bits of a word's two elements.
__device__ __forceinline__ PackedTile with_signs_of(const PackedTile& x, const PackedTile& y) {
    const auto word = [&](int i) { return x.x[i] | (y.x[i] & kSigns); };
    return {{word(0), word(1), word(2), word(3)}};
}
__device__ __forceinline__ PackedTile without_signs(const PackedTile& x) {
    return {{x.x[0] & ~kSigns, x.x[1] & ~kSigns, x.x[2] & ~kSigns, x.x[3] & ~kSigns}};
}
// Turns s from (dP - delta) / 2^12 into dS, by x, which is P * 2^12. With has_residuals the sign bits of x tell which way P was
// rounded, and correct it. Else they mark elements that dropout drops, and are ignored here.
__device__ __forceinline__ void multiply_by_probabilities(float (&s)[8], const PackedTile& x, bool has_residuals) {
    multiply(s, x, [=](float p) { return from_residual_sign(p, has_residuals); });
}

// Decides which probabilities of one tile are dropped. A Philox call (random numbers, philox.cuh) decides four keys of two queries
// that are 4 apart. One partner lane (XOR Layout::kKeyPartnerMask) has the other two keys of an aligned group of four, another
// (kQueryPartnerMask) the queries 4 before or after. Each of these four lanes makes one call, and they exchange bits, all together.
template <class Layout>
class DroppedKeys {
    unsigned kept_;

public:
    __device__ __forceinline__ DroppedKeys(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
        const int odd = coord.key(0) & 1;  // 1 if the lane has keys 1 and 3 of a group of four, else it has 0 and 2
        const int has_bit_of_4 = coord.query(0) >> 2 & 1;  // 1 for the later four of eight queries
        // Of eight queries, call i (0 to 3) has queries i and i + 4, for an aligned group of four keys (philox.cuh). The lane's
        // call is number odd + 2 * has_bit_of_4.
        const unsigned drawn = rule.kept_bits(philox.numbers((coord.query(0) & ~4) + odd + 2 * has_bit_of_4, coord.key(0) & ~3));
        // own: bits of the lane's queries `odd` and odd + 2, for all four keys, from its own call and its query partner's. Of each
        // call the lane has the later query if has_bit_of_4 is 1; then its own call is also the later one, with query odd + 2.
        // others: bits of the lane's other two queries. Query r (0 or 1) of a word has key c (0 to 3) in bit 2 * r + c % 2 + 16 *
        // (c / 2). So `>> odd` moves the bits of the lane's two keys to where those of keys 0 and 2 are.
        const unsigned own = merge_calls(drawn, __shfl_xor_sync(~0u, drawn, Layout::kQueryPartnerMask), has_bit_of_4, has_bit_of_4);
        const unsigned others = __shfl_xor_sync(~0u, own, Layout::kKeyPartnerMask);
        const unsigned even_queries = (odd ? others : own) >> odd, odd_queries = (odd ? own : others) >> odd;
        // Bytes 0 and 2 of both words (0x6420) have the bits of the first and of the second key. So an element's bit has number
        // 2 * (pair of queries) + 8 * (key) + 16 * (query of the pair), each 0 or 1.
        kept_ = __byte_perm(even_queries, odd_queries, 0x6420);
    }
    // Returns the sign bits (0x8000, 0x80000000) of dropped elements in word i of a packed tile.
    __device__ __forceinline__ unsigned signs(int i) const { return ~kept_ << (15 - 2 * (i % 2) - 8 * (i / 2)) & 0x80008000; }
};
