// Tree mask of speculative decoding: the seqlen_q queries of a sequence are its last seqlen_q keys too (draft tokens), and
// each sees those that its word of tree_mask names. The word of query i is p.score_options.bias[i], 64 bits: bit j is key
// seqlen_k - seqlen_q + j. All rows see the keys before the draft tokens. Used by block.cuh, in kernels with kTree.
//
// A window counts by depth: the draft tokens that a query sees are its ancestors, in order, and itself. So the query's
// position is that of the first draft token plus the number of its ancestors, and the window hides its lowest bits.
#pragma once

#include "decode/tile_scheduler.cuh"
#include "features.cuh"

namespace decode {

// The draft tokens that a row sees, inside its window. Kernels without a tree have none.
template <bool>
struct DraftTokens {
    unsigned long long bits;
    // Returns whether the row sees draft token i, which may be any number up to 63.
    __device__ __forceinline__ bool visible(int i) const { return i < 0 || (bits >> (i & 63) & 1); }
};
template <>
struct DraftTokens<false> {};

// Sets a row's draft tokens and returns its depth. Query 0 is the sequence's first.
__device__ __forceinline__ int load_draft_tokens(const DecodeParams& p, const WorkTile& s, int query, DraftTokens<true>& row) {
    const auto words = reinterpret_cast<const unsigned long long*>(p.score_options.bias);
    unsigned long long bits = __ldg(words + s.batch * p.score_options.bias_batch_stride + s.q_offset + query);
    if (s.seqlen_q < 64) bits &= (1ull << s.seqlen_q) - 1;
    const int count = __popcll(bits);
    for (int hidden = count - 1 - p.problem.window_left; hidden > 0; hidden--) bits &= bits - 1;
    row.bits = bits;
    return max(count, 1) - 1;
}

}  // namespace decode
