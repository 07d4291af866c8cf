// Iterates over the pages of one sequence of the KV cache, for the decode loaders. All lanes of a warp call it together.
//
// (Forward kernels have a PageIterator of another kind: forward/pages.cuh.) The lanes hold the next 32 entries of the block table,
// one each, so that entering a page costs a shuffle and no load. A dense cache is one page: the sequence's entry.
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

// Position of a step in a sequence's pages.
class PageIterator {
    int page_;  // index of the current page in the sequence
    int first_;  // page index of lane 0's entry
    int numbers_;  // page number in the cache of page first_ + lane

    // Loads 32 entries. Entries past the last token may be anything, so they are not read. A dense cache has one page.
    __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& s) {
        first_ = page_;
        const int mine = page_ + (threadIdx.x & 31);
        const bool exists = !p.cache.block_table || mine * static_cast<long long>(p.cache.rows) < s.seqlen_k;
        numbers_ = exists ? page_of(p.cache, s.batch, mine) : -1;
        // Waits for the entries here. A later wait would also wait for all tile loads in flight, because they share a
        // scoreboard.
        if constexpr (kStaged) numbers_ = __shfl_sync(~0u, numbers_, threadIdx.x & 31);
    }

public:
    int row;  // row in the page of the step's first token

    __device__ __forceinline__ PageIterator(const DecodeParams& p, const WorkTile& s, int token) {
        const int at = s.k_offset + token;
        page_ = p.cache.block_table ? at / p.cache.rows : 0;
        row = at - page_ * p.cache.rows;
        fetch(p, s);
    }
    // Advances by Tokens, which no page boundary divides. Returns true on entering a new page, at its row 0.
    template <int Tokens = kStepTokens>
    __device__ __forceinline__ bool advance(const DecodeParams& p, const WorkTile& s) {
        row += Tokens;
        if (row < p.cache.rows) return false;
        row = 0;
        page_++;
        if (page_ - first_ == 32) fetch(p, s);
        return true;
    }
    // The current page's number in the cache.
    __device__ __forceinline__ int number() const { return __shfl_sync(~0u, numbers_, page_ - first_); }
    // The next page's number; -1 if its entry is not loaded.
    __device__ __forceinline__ int next_number() const {
        const int number = __shfl_sync(~0u, numbers_, (page_ - first_ + 1) & 31);
        return page_ - first_ == 31 ? -1 : number;
    }
};

}  // namespace decode
