// Tree mask of speculative decoding: the seqlen_q queries of a sequence are draft tokens, and so are its last seqlen_q keys. A
// query sees the draft tokens whose bits are set in its word of tree_mask, and the keys before them, unless a window hides them.
// The word of query i has 64 bits, so seqlen_q is at most 64. Bit j is key seqlen_k - seqlen_q + j. Used by block.cuh, in
// kernels with kTree.
//
// A query sees itself and its ancestors in the tree, which come before it in the sequence. The number of ancestors is its depth. A
// window counts by depth: a query's position is that of the first draft token plus its depth. So it hides the lowest set bits.
#pragma once

#include "decode/tile_scheduler.cuh"  // WorkTile: batch entry, lengths and rows of a block's work; DecodeParams
#include "features.cuh"  // kTree: the kernel has the tree mask

namespace decode {

// The draft tokens that a row sees, inside its window. The bool is kTree: kernels without a tree have none.
template <bool>
struct DraftTokens {
    unsigned long long bits;
    // Returns whether the row sees draft token i, at most 63; true for negative i, keys before them, which only a window may hide.
    __device__ __forceinline__ bool visible(int i) const { return i < 0 || (bits >> (i & 63) & 1); }
};
template <>
struct DraftTokens<false> {};

// Loads a row's draft tokens, without those that the window hides. Returns its depth. Query 0 is the sequence's first.
__device__ __forceinline__ int load_draft_tokens(const DecodeParams& p, const WorkTile& s, int query, DraftTokens<true>& row) {
    // tree_mask takes the place of the bias, which these kernels lack. Its stride is in words. Packed sequences have stride 0, and
    // their words begin at q_offset, which is 0 in dense batches.
    const auto words = reinterpret_cast<const unsigned long long*>(p.score_options.bias);
    unsigned long long bits = __ldg(words + s.batch * p.score_options.bias_batch_stride + s.q_offset + query);
    if (s.seqlen_q < 64) bits &= (1ull << s.seqlen_q) - 1;
    const int count = __popcll(bits);
    // Hides the oldest first. Without a window, window_left is at least seqlen_q + seqlen_k, and nothing is hidden.
    for (int hidden = count - 1 - p.problem.window_left; hidden > 0; hidden--) bits &= bits - 1;
    row.bits = bits;
    return max(count, 1) - 1;
}

}  // namespace decode
