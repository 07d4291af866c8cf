// The sequences of a KV cache: how long they are, and where a token's rows lie. For all kernels that read or write one.
//
// Lengths and page numbers come from memory, and nobody has checked them. A sequence whose lengths cannot be is not valid() and has
// neither queries nor keys; a page number outside the cache is refused by has_page(). Either way the sequence's rows are to be NaN,
// and nothing outside the tensors is touched.
//
// Tokens of a sequence are counted from its first one, which is at k_offset() of its entry (leftpad).
#pragma once

#include "lengths.cuh"
#include "volta_fa_params.h"

class CacheSeqlenInfo {
    const Problem& problem_;
    const Lengths& lengths_;
    int q_offset_, seqlen_q_, k_offset_, seqlen_k_cache_, seqlen_knew_, knew_offset_;
    bool has_queries_, valid_;

public:
    __device__ __forceinline__ CacheSeqlenInfo(const Problem& problem, const Lengths& lengths, const Cache& cache, int batch)
        : problem_(problem), lengths_(lengths), q_offset_(0), seqlen_q_(problem.seqlen_q), k_offset_(0),
          seqlen_knew_(cache.seqlen_new), knew_offset_(0), has_queries_(true), valid_(true) {
        if (lengths.cu_seqlens_q)
            has_queries_ =
                packed_range(lengths, lengths.cu_seqlens_q, batch, lengths.total_q, problem.seqlen_q, q_offset_, seqlen_q_);
        if (cache.cu_seqlens_k_new)
            valid_ &=
                packed_range(lengths, cache.cu_seqlens_k_new, batch, cache.total_new, cache.seqlen_new, knew_offset_, seqlen_knew_);
        if (cache.leftpad_k) k_offset_ = load_length(cache.leftpad_k + batch);
        const int capacity = cache.block_table ? cache.max_pages * cache.rows : cache.rows;
        const int end = cache.cache_seqlens ? load_length(cache.cache_seqlens + batch) : capacity;
        valid_ &= has_queries_ && k_offset_ >= 0 && k_offset_ <= end && end <= capacity - seqlen_knew_;
        if (!cache.block_table) valid_ &= static_cast<unsigned>(entry(cache, batch)) < static_cast<unsigned>(cache.entries);
        seqlen_k_cache_ = end - k_offset_;
        if (!valid_) k_offset_ = seqlen_k_cache_ = seqlen_knew_ = 0;
        if (!has_queries_) seqlen_q_ = 0;
    }
    // Whether lengths, and the number of a dense entry, are possible.
    __device__ __forceinline__ bool valid() const { return valid_; }
    // Whether its rows of q are known, even where nothing else is right.
    __device__ __forceinline__ bool has_queries() const { return has_queries_; }
    __device__ __forceinline__ int seqlen_q() const { return seqlen_q_; }
    // Tokens of the attention: with those that this call appends.
    __device__ __forceinline__ int seqlen_k() const { return seqlen_k_cache_ + seqlen_knew_; }
    // Tokens before this call appends.
    __device__ __forceinline__ int seqlen_k_cache() const { return seqlen_k_cache_; }
    // What this call appends, and where that begins among packed tokens.
    __device__ __forceinline__ int seqlen_knew() const { return seqlen_knew_; }
    __device__ __forceinline__ int knew_offset() const { return knew_offset_; }
    // The first row of q, from the batch entry's first.
    __device__ __forceinline__ int q_offset() const { return q_offset_; }
    // Where token 0 lies, from the first row of the sequence's entry or of its pages.
    __device__ __forceinline__ int k_offset() const { return k_offset_; }
    // Where the entry's row of softmax_lse begins, also from what is known of the sequence elsewhere.
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        return lse_row(problem_, lengths_, q_offset_, batch, head);
    }
    __device__ __forceinline__ static long long lse_row(const Problem& problem, const Lengths& lengths, int q_offset, int batch,
                                                        int head) {
        if (lengths.cu_seqlens_q) return static_cast<long long>(head) * lengths.total_q + q_offset;
        return (static_cast<long long>(batch) * problem.nheads + head) * problem.seqlen_q;
    }
    // The entry of a dense cache.
    __device__ __forceinline__ static int entry(const Cache& cache, int batch) {
        return cache.cache_batch_idx ? load_length(cache.cache_batch_idx + batch) : batch;
    }
};

// Page i of a sequence, which has one for its tokens cache.rows * i and on; of a dense cache its entry, whatever i.
__device__ __forceinline__ int page_of(const Cache& cache, int batch, int i) {
    if (!cache.block_table) return CacheSeqlenInfo::entry(cache, batch);
    return load_length(cache.block_table + batch * cache.block_table_stride + i);
}
__device__ __forceinline__ bool has_page(const Cache& cache, int page) {
    return static_cast<unsigned>(page) < static_cast<unsigned>(cache.entries);
}
// The row of K or V, of KV head 0, that is row `row` of a page.
__device__ __forceinline__ const unsigned short* row_of_page(const Operand& x, int page, int row) {
    return x.ptr + page * x.batch_stride + row * x.row_stride;
}
