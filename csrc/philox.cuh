// The random numbers of dropout: src/ops/dropout.rs says which, and why seven rounds.
#pragma once

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

    // The numbers of four columns of a row; column is a multiple of 4.
    __device__ __forceinline__ uint4 numbers(int row, int column) const {
        uint4 c = make_uint4(column / 4, row, head, offset);
        unsigned k0 = key[0], k1 = key[1];
#pragma unroll
        for (int round = 0; round < 7; round++) {
            const unsigned long long low = 0xD2511F53ull * c.x, high = 0xCD9E8D57ull * c.z;
            c = make_uint4(static_cast<unsigned>(high >> 32) ^ c.y ^ k0, static_cast<unsigned>(high),
                           static_cast<unsigned>(low >> 32) ^ c.w ^ k1, static_cast<unsigned>(low));
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        return c;
    }
};
