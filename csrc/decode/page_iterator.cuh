// The way through a sequence's tokens, page by page. All lanes of a warp together.
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

class PageIterator {
    int page_;     // number of the page in the sequence
    int first_;    // that the lanes' numbers begin with
    int numbers_;  // that page first_ + lane has in the cache

    // Of tokens that exist alone: behind them the table may hold anything. A dense sequence is one page, its entry.
    __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& s) {
        first_ = page_;
        const int mine = page_ + (threadIdx.x & 31);
        const bool exists = !p.cache.block_table || mine * static_cast<long long>(p.cache.rows) < s.seqlen_k;
        numbers_ = exists ? page_of(p.cache, s.batch, mine) : -1;
        // Waits for them here: a scoreboard has many loads, and whoever asks for a number would wait for all that are on their way.
        if constexpr (kStaged) numbers_ = __shfl_sync(~0u, numbers_, threadIdx.x & 31);
    }

public:
    int row;  // of the page, of the step's first token

    __device__ __forceinline__ PageIterator(const DecodeParams& p, const WorkTile& s, int token) {
        const int at = s.k_offset + token;
        page_ = p.cache.block_table ? at / p.cache.rows : 0;
        row = at - page_ * p.cache.rows;
        fetch(p, s);
    }
    // By tokens that no page ends between. Returns whether that is another page: its row 0.
    template <int Tokens = kStepTokens>
    __device__ __forceinline__ bool advance(const DecodeParams& p, const WorkTile& s) {
        row += Tokens;
        if (row < p.cache.rows) return false;
        row = 0;
        page_++;
        if (page_ - first_ == 32) fetch(p, s);
        return true;
    }
    // The page's number in the cache.
    __device__ __forceinline__ int number() const { return __shfl_sync(~0u, numbers_, page_ - first_); }
    // That of the next page; no page's where the table was not looked at that far.
    __device__ __forceinline__ int next_number() const {
        const int number = __shfl_sync(~0u, numbers_, (page_ - first_ + 1) & 31);
        return page_ - first_ == 31 ? -1 : number;
    }
};

}  // namespace decode
