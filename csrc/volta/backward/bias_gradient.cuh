// Gradient of a bias without broadcast dimensions: each element belongs to one score, so it is stored once, as fp16. (A
// broadcast bias sums its gradient by fp32 atomics: add_bias_gradient in backward/modifiers.cuh.) Used by the volta main
// kernels and by stored.cuh.
#pragma once

#include "volta/backward/fragments.cuh"
#include "volta_fa_params.h"

namespace volta {

// Stores a tile of dS as dbias. A lane has four queries of two keys two apart, and its neighbor those of the keys between. They
// exchange, so that each lane has two queries, and each store two keys. seqlen_k is even, so both keys exist or neither.
__device__ __forceinline__ void store_bias_gradient(const PackedTile& ds, const BwdParams& p, int head,
                                                    const ScoreCoord<KeysLayout>& coord) {
    const int odd = coord.key(0) & 1;
    u32 first[2], second[2];  // two queries of a key, and of the key two further
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 mine = odd ? ds.x[2 * i + 1] : ds.x[2 * i];
        const u32 others = __shfl_xor_sync(~0u, odd ? ds.x[2 * i] : ds.x[2 * i + 1], 1);
        first[i] = odd ? others : mine, second[i] = odd ? mine : others;
    }
    __syncwarp();  // what follows is computed from parameters after this point
    const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
    // two of the lane's four queries; keys of both lanes, from the even one on
    const int query = coord.query(0) + 2 * odd, key = coord.key(0) & ~1;
    unsigned short* to = reinterpret_cast<unsigned short*>(p.dbias) + remat_block_batch() * p.dbias_batch_stride +
                         head * p.dbias_head_stride + query * p.dbias_row_stride + key;
#pragma unroll
    for (int r = 0; r < 2; r++, to += p.dbias_row_stride) {
        if (query + r >= sequence.seqlen_q()) break;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (key + 2 * i < sequence.seqlen_k()) *reinterpret_cast<u32*>(to + 2 * i) = halves(first[i], second[i], r);
    }
}

}  // namespace volta
