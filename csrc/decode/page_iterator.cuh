// Iterates over the pages of one sequence of the KV cache, for the decode loaders and MLA. All lanes of a warp call it together.
//
// The lanes hold the next 32 entries of the block table, one each, so that entering a page costs a shuffle and no load. A dense
// cache is one page: the sequence's entry. A page has p.cache.rows tokens. (forward/pages.cuh has another PageIterator.)
#pragma once

#include "decode/tile_scheduler.cuh"  // WorkTile: tokens and rows that a block computes; kStaged, kStepTokens

namespace decode {

// Position of a step (the tokens that a warp computes at once, all in one page) in a sequence's pages.
class PageIterator {
    int page_;  // index of the current page in the sequence
    int first_;  // page index of lane 0's entry
    int numbers_;  // page number in the cache of page first_ + lane; -1 past the last token

    // Loads 32 entries, from the current page on. Entries past the last token may be anything, so they are not read. With a block
    // table s.k_offset is 0: the operator rejects leftpad_k.
    __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& s) {
        first_ = page_;
        const int mine = page_ + (threadIdx.x & 31);
        const bool exists = !p.cache.block_table || mine * static_cast<long long>(p.cache.rows) < s.seqlen_k;
        numbers_ = exists ? page_of(p.cache, s.batch, mine) : -1;
        // The shuffle waits for the entries here. A later wait would also wait for all tile loads in flight, because they share a
        // scoreboard. kStaged: loads are kept in flight across steps (staged_loader.cuh).
        if constexpr (kStaged) numbers_ = __shfl_sync(~0u, numbers_, threadIdx.x & 31);
    }

public:
    int row;  // of the step's first token, counted from the page's first

    // `token`: the first step's first token.
    __device__ __forceinline__ PageIterator(const DecodeParams& p, const WorkTile& s, int token) {
        const int at = s.k_offset + token;  // cache row, from the sequence's first page on
        page_ = p.cache.block_table ? at / p.cache.rows : 0;
        row = at - page_ * p.cache.rows;
        fetch(p, s);
    }
    // Advances by Tokens, a step: page sizes are multiples of it. Returns true on entering a new page, at its row 0.
    template <int Tokens = kStepTokens>
    __device__ __forceinline__ bool advance(const DecodeParams& p, const WorkTile& s) {
        row += Tokens;
        if (row < p.cache.rows) return false;
        row = 0;
        page_++;
        if (page_ - first_ == 32) fetch(p, s);
        return true;
    }
    // Returns the current page's number in the cache, unvalidated.
    __device__ __forceinline__ int number() const { return __shfl_sync(~0u, numbers_, page_ - first_); }
    // Returns the next page's number, for a prefetch; -1 if no lane has its entry.
    __device__ __forceinline__ int next_number() const {
        const int number = __shfl_sync(~0u, numbers_, (page_ - first_ + 1) & 31);
        return page_ - first_ == 31 ? -1 : number;
    }
};

}  // namespace decode
