// Stores dbias, the gradient of a bias without broadcast dimensions, where seqlen_k is even: each element belongs to one score, so
// it is dS, stored once as fp16. (Other gradients of a bias are added by fp32 atomics: backward/modifiers.cuh.) Called by a warp
// for each of its 16x16 tiles of dS, in the main kernels (single_role.cuh, warp_specialized.cuh: blocks own keys) and through
// stored.cuh. KeysLayout (fragments.cuh): such a tile's rows are keys, and a lane has four queries of two keys.
#pragma once

#include "volta/backward/fragments.cuh"
#include "volta_fa_params.h"

namespace volta {

// Stores a 16x16 tile of dS^T as dbias, for query head `head`. `ds`: the lane's eight elements, four words of two fp16. `coord`:
// query and key of these; coord.query(0) and coord.key(0) are the lane's first, in the sequence. A lane has four queries of two
// keys two apart, and its neighbor (lane ^ 1) the keys between. They exchange halves, so that each lane has two queries of four
// keys, and a 4-byte store two keys. Both keys exist or neither: dbias is fp16 only if seqlen_k is even (src/params/backward.rs).
// remat_block_batch() reads blockIdx.z, the batch entry, again.
__device__ __forceinline__ void store_bias_gradient(const PackedTile& ds, const BwdParams& p, int head,
                                                    const ScoreCoord<KeysLayout>& coord) {
    const int odd = coord.key(0) & 1;
    u32 even_key[2], odd_key[2];  // words of two queries: of an even key, and of the odd one after it; [1]: of the keys two further
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // Word 2 * i + j of a packed tile has queries 2 * j and 2 * j + 1 of the lane's key i. Odd lanes keep j = 1, even ones 0.
        const u32 mine = odd ? ds.x[2 * i + 1] : ds.x[2 * i];
        const u32 others = __shfl_xor_sync(~0u, odd ? ds.x[2 * i] : ds.x[2 * i + 1], 1);
        even_key[i] = odd ? others : mine, odd_key[i] = odd ? mine : others;
    }
    __syncwarp();  // what follows is computed from parameters after this point, so that it holds no registers across the exchange
    const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
    // the first of the lane's two queries; the first key of both lanes, which is even
    const int query = coord.query(0) + 2 * odd, key = coord.key(0) & ~1;
    unsigned short* to = reinterpret_cast<unsigned short*>(p.dbias) + remat_block_batch() * p.dbias_batch_stride +
                         head * p.dbias_head_stride + query * p.dbias_row_stride + key;
#pragma unroll
    for (int r = 0; r < 2; r++, to += p.dbias_row_stride) {
        if (query + r >= sequence.seqlen_q()) break;
#pragma unroll
        for (int i = 0; i < 2; i++)
            // halves() takes query r of both keys: the words' lower (r = 0) or upper fp16
            if (key + 2 * i < sequence.seqlen_k()) *reinterpret_cast<u32*>(to + 2 * i) = halves(even_key[i], odd_key[i], r);
    }
}

}  // namespace volta
