// The random numbers of dropout, and what they decide: src/ops/dropout.rs says which, and why so.
#pragma once

#include "volta_fa_params.h"

struct Philox {
    unsigned key[2], head, offset;

    __device__ __forceinline__ Philox() {}
    // `head` counts over batch and heads.
    __device__ __forceinline__ Philox(const unsigned long long* state, unsigned head_) : head(head_) {
        const unsigned long long seed = __ldg(state);
        key[0] = static_cast<unsigned>(seed);
        key[1] = static_cast<unsigned>(seed >> 32);
        offset = static_cast<unsigned>(__ldg(state + 1));
    }

    // The numbers of four columns of two rows, `row` and row + 4, where row % 8 < 4; column is a multiple of 4. Word 2 * r + c of
    // the four has row r and columns c and c + 2.
    __device__ __forceinline__ uint4 numbers(int row, int column) const {
        uint4 c = make_uint4(column / 4, row, head, offset);
        unsigned k0 = key[0], k1 = key[1];
#pragma unroll
        for (int i = 0; i < kRounds; i++) {
            c = round(c, k0, k1);
            k0 += kKeySteps[0];
            k1 += kKeySteps[1];
        }
        return c;
    }

    // For a kernel with registers to spare: the keys of all rounds, and the numbers by them.
    static constexpr int kRounds = 7;
    struct RoundKeys {
        unsigned key[kRounds][2];
    };
    __device__ __forceinline__ RoundKeys round_keys() const {
        RoundKeys of;
#pragma unroll
        for (int i = 0; i < 2 * kRounds; i++) of.key[i / 2][i % 2] = key[i % 2] + i / 2 * kKeySteps[i % 2];
        return of;
    }
    __device__ __forceinline__ uint4 numbers(int row, int column, const RoundKeys& of) const {
        uint4 c = make_uint4(column / 4, row, head, offset);
#pragma unroll
        for (int i = 0; i < kRounds; i++) c = round(c, of.key[i][0], of.key[i][1]);
        return c;
    }

private:
    static constexpr unsigned kKeySteps[2] = {0x9E3779B9u, 0xBB67AE85u};
    __device__ __forceinline__ static uint4 round(const uint4& c, unsigned k0, unsigned k1) {
        const unsigned long long low = 0xD2511F53ull * c.x, high = 0xCD9E8D57ull * c.z;
        return make_uint4(static_cast<unsigned>(high >> 32) ^ c.y ^ k0, static_cast<unsigned>(high),
                          static_cast<unsigned>(low >> 32) ^ c.w ^ k1, static_cast<unsigned>(low));
    }
};

// The verdicts, from the numbers of a call.
struct DropoutRule {
    unsigned threshold, inverted;

    __device__ __forceinline__ explicit DropoutRule(const ScoreOptions& o)
        : threshold(o.dropout_threshold), inverted(o.dropout_inverted) {}

    // 0xffff in each half of a word that is not below the threshold. Halves without their signs are ordered as the 15-bit integers
    // are, and what would be NaN is not below any threshold.
    __device__ __forceinline__ unsigned not_below(unsigned numbers) const {
        unsigned halves;
        asm("{.reg .b32 x; abs.f16x2 x, %1; set.geu.u32.f16x2 %0, x, %2;}" : "=r"(halves) : "r"(numbers), "r"(threshold));
        return halves;
    }
    // The same of those whose probability is kept.
    __device__ __forceinline__ unsigned kept_halves(unsigned numbers) const { return not_below(numbers) ^ inverted; }
    // A bit each, as kept_bit numbers them.
    __device__ __forceinline__ unsigned kept_bits(const uint4& numbers) const {
        return (kept_halves(numbers.x) & 0x10001) | (kept_halves(numbers.y) & 0x20002) | (kept_halves(numbers.z) & 0x40004) |
               (kept_halves(numbers.w) & 0x80008);
    }
};
// Of row `r` (0: the call's first row, 1: the one 4 further) and column `c` of the four.
__device__ __forceinline__ constexpr int kept_bit(int r, int c) { return 2 * r + c % 2 + 16 * (c / 2); }
// The four bits of row 0.
constexpr unsigned kBitsOfRow = 1u << kept_bit(0, 0) | 1u << kept_bit(0, 1) | 1u << kept_bit(0, 2) | 1u << kept_bit(0, 3);
