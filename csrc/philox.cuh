// Dropout's random numbers (Philox4x32 with 7 rounds) and the choice of probabilities to keep. The counter is (column / 4,
// row, head, offset), the key is the seed: src/ops/dropout.rs defines both, and the CPU backend computes the same numbers. One call
// decides eight probabilities, four columns of two rows that differ by 4, by 15-bit comparisons in fp16 pairs. Kernels with
// dropout, forward and backward, get it through score_mod.cuh.
#pragma once

#include "volta_fa_params.h"  // generated from src/params: ScoreOptions, with the problem's dropout

// Rounds of Philox: the fewest that pass the statistical tests of BigCrush (Salmon et al., 2011).
constexpr int kPhiloxRounds = 7;
constexpr unsigned kPhiloxKeyIncrements[2] = {0x9E3779B9u, 0xBB67AE85u};  // added to the key in each round

// A 64-bit product, in halves. A round computes two.
struct PhiloxProduct {
    unsigned low, high;
    __device__ __forceinline__ explicit PhiloxProduct(unsigned long long x)
        : low(static_cast<unsigned>(x)), high(static_cast<unsigned>(x >> 32)) {}
};
// The products of words x and z of the counter by Philox's multipliers.
__device__ __forceinline__ PhiloxProduct philox_product_x(unsigned x) { return PhiloxProduct(0xD2511F53ull * x); }
__device__ __forceinline__ PhiloxProduct philox_product_z(unsigned z) { return PhiloxProduct(0xCD9E8D57ull * z); }
__device__ __forceinline__ void philox_round(uint4& c, unsigned k0, unsigned k1) {
    const PhiloxProduct first = philox_product_x(c.x), second = philox_product_z(c.z);
    c = make_uint4(second.high ^ c.y ^ k0, second.low, first.high ^ c.w ^ k1, first.low);
}

// Rounds 0 and 1 of a call, split into products that calls of the same head, row or column share: volta's forward kernels with
// dropout compute each product once (volta/forward/feature_dropout.cuh). The table has the counter's words before, after round 0
// and after round 1. K: the key of round 1.
//
//             x                                   y             z                                   w
//   counter   column / 4                          row           head                                offset
//   round 0   of_head.high ^ row ^ key[0]         of_head.low   of_column.high ^ offset ^ key[1]    of_column.low
//   round 1   of_both.high ^ of_head.low ^ K[0]   of_both.low   of_row.high ^ of_column.low ^ K[1]  of_row.low
//
// of_head and of_column are the products of the counter; of_row and of_both (of column and offset) those of x and z after round 0.
struct PhiloxTerms {
    unsigned key[2], x;  // the key; word x after round 0, which depends on head and row alone

    __device__ __forceinline__ PhiloxTerms() {}
    // Terms of row 0.
    __device__ __forceinline__ PhiloxTerms(unsigned key0, unsigned key1, unsigned head)
        : key{key0, key1}, x(philox_product_z(head).high ^ key0) {}
    // Flips bits of the row's number. From row 0 this moves to row `bits`.
    __device__ __forceinline__ void flip_row(unsigned bits) { x ^= bits; }
    __device__ __forceinline__ unsigned key_of_round_1(int i) const { return key[i] + kPhiloxKeyIncrements[i]; }
    // The product of_row of the row with these bits flipped.
    __device__ __forceinline__ PhiloxProduct of_row(unsigned bits = 0) const { return philox_product_x(x ^ bits); }
    __device__ __forceinline__ static unsigned head_low(unsigned head) { return philox_product_z(head).low; }
    __device__ __forceinline__ static PhiloxProduct of_column(unsigned column) { return philox_product_x(column / 4); }
    // `z_without_column`: offset ^ key[1].
    __device__ __forceinline__ static PhiloxProduct of_both(const PhiloxProduct& of_column, unsigned z_without_column) {
        return philox_product_z(of_column.high ^ z_without_column);
    }
    // The counter after round 1. Callers that keep of_head.low ^ K[0] and of_row.high ^ K[1] in registers pass these as head_low
    // and row_high, and 0 as k0 and k1.
    __device__ __forceinline__ static uint4 after_round_1(const PhiloxProduct& of_both, const PhiloxProduct& of_column,
                                                          unsigned head_low, unsigned row_high, unsigned row_low, unsigned k0,
                                                          unsigned k1) {
        return make_uint4(of_both.high ^ head_low ^ k0, of_both.low, row_high ^ of_column.low ^ k1, row_low);
    }
};

// The word of a call's numbers that has those of row r (0: the call's `row`, 1: row + 4), columns c (lower half) and c + 2 (upper
// half), counted from the call's `column`; c is 0 or 1.
__device__ __forceinline__ constexpr unsigned philox_word(const uint4& numbers, int r, int c) {
    return r ? (c ? numbers.w : numbers.z) : (c ? numbers.y : numbers.x);
}

// Random numbers of one head.
struct Philox {
    unsigned key[2], head, offset;

    __device__ __forceinline__ Philox() {}
    // `state`: seed and offset in GPU memory. `head`: batch entry * nheads + query head.
    __device__ __forceinline__ Philox(const unsigned long long* state, unsigned head_) : head(head_) {
        const unsigned long long seed = __ldg(state);
        key[0] = static_cast<unsigned>(seed);
        key[1] = static_cast<unsigned>(seed >> 32);
        offset = static_cast<unsigned>(__ldg(state + 1));
    }

    // Returns eight numbers of 16 bits (dropout ignores the highest): of four columns from `column`, a multiple of 4, and two rows,
    // `row` and row + 4, where row % 8 < 4. philox_word() says which word has which.
    __device__ __forceinline__ uint4 numbers(int row, int column) const {
        uint4 c = make_uint4(column / 4, row, head, offset);
#pragma unroll
        for (int round = 0; round < kPhiloxRounds; round++)
            philox_round(c, key[0] + round * kPhiloxKeyIncrements[0], key[1] + round * kPhiloxKeyIncrements[1]);
        return c;
    }

    // Keys of all rounds, and the numbers from them, for kernels with registers to spare.
    struct RoundKeys {
        unsigned key[kPhiloxRounds][2];
    };
    __device__ __forceinline__ RoundKeys round_keys() const {
        RoundKeys keys;
#pragma unroll
        for (int i = 0; i < 2 * kPhiloxRounds; i++) keys.key[i / 2][i % 2] = key[i % 2] + i / 2 * kPhiloxKeyIncrements[i % 2];
        return keys;
    }
    __device__ __forceinline__ uint4 numbers(int row, int column, const RoundKeys& keys) const {
        uint4 c = make_uint4(column / 4, row, head, offset);
#pragma unroll
        for (int i = 0; i < kPhiloxRounds; i++) philox_round(c, keys.key[i][0], keys.key[i][1]);
        return c;
    }
};

// Decides from random numbers which probabilities are kept. The host sets both words (Rule in src/ops/dropout.rs):
//
//   threshold   a 15-bit number in both halves, compared as fp16
//   inverted    0 if numbers from the threshold on keep their probability (dropout_p up to 0.5); all bits set if numbers below
//               it do. So the threshold is at most half of the 2^15 numbers, 0x4000, which is the finite fp16 number 2
struct DropoutRule {
    unsigned threshold, inverted;

    __device__ __forceinline__ explicit DropoutRule(const ScoreOptions& o)
        : threshold(o.dropout_threshold), inverted(o.dropout_inverted) {}

    // Returns 0xffff in each half that, without its highest bit, is not below the threshold. Without their sign, fp16 numbers have
    // the order of their bits as integers. The comparison is true for NaN too (geu), whose bits are above every threshold.
    __device__ __forceinline__ unsigned not_below(unsigned numbers) const {
        unsigned halves;
        asm("{.reg .b32 x; abs.f16x2 x, %1; set.geu.u32.f16x2 %0, x, %2;}" : "=r"(halves) : "r"(numbers), "r"(threshold));
        return halves;
    }
    // Returns 0xffff in each half whose probability is kept.
    __device__ __forceinline__ unsigned kept_halves(unsigned numbers) const { return not_below(numbers) ^ inverted; }
    // Returns a bit for each of the eight probabilities of a call, at the place that kept_bit() tells: 1 if it is kept.
    __device__ __forceinline__ unsigned kept_bits(const uint4& numbers) const {
        // Words x, y, z and w give bits 0 to 3 of both halves: the lower for columns c, the upper for columns c + 2.
        return (kept_halves(numbers.x) & 0x10001) | (kept_halves(numbers.y) & 0x20002) | (kept_halves(numbers.z) & 0x40004) |
               (kept_halves(numbers.w) & 0x80008);
    }
};
// Number of the bit in kept_bits() of row r (0: the call's `row`, 1: row + 4) and column c (0 to 3).
__device__ __forceinline__ constexpr int kept_bit(int r, int c) { return 2 * r + c % 2 + 16 * (c / 2); }
// Mask of the four bits of row 0; those of row 1 are two bits higher.
constexpr unsigned kBitsOfRow = 1u << kept_bit(0, 0) | 1u << kept_bit(0, 1) | 1u << kept_bit(0, 2) | 1u << kept_bit(0, 3);
