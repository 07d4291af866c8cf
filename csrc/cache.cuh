// Lengths and addresses of the sequences of a KV cache. A paged cache has cache.entries pages of cache.rows tokens, which a block
// table names; a dense one cache.entries entries, one for a sequence. For decode, paged forward, append and dequantize kernels.
//
// Lengths and page numbers come from GPU memory, unvalidated. A sequence with impossible lengths is not valid(): it has no keys and
// a NaN output, but keeps its queries, so that kernels write that NaN. (If cu_seqlens_q itself is wrong, it has no queries either.)
// has_page() tests page numbers. So no kernel touches memory outside the tensors. Tokens of a sequence are counted from its first,
// which is row k_offset() of its entry (leftpad_k); with pages the operator takes no leftpad_k, so that is 0.
#pragma once

#include "lengths.cuh"  // load_length(), packed_range(): rows of a packed sequence, clamped
#include "volta_fa_params.h"  // generated from src/params: Problem (sizes), Lengths, Cache, Operand (strides in elements)

// Lengths and offsets of one sequence; ..._knew: of its new keys, to append. `batch`: its number in the launch. In packed tensors
// seqlen_q and seqlen_new are maxima.
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
        const int end = cache.cache_seqlens ? load_length(cache.cache_seqlens + batch) : capacity;  // leftpad_k included
        valid_ &= has_queries_ && k_offset_ >= 0 && k_offset_ <= end && end <= capacity - seqlen_knew_;
        if (!cache.block_table) valid_ &= static_cast<unsigned>(entry(cache, batch)) < static_cast<unsigned>(cache.entries);
        seqlen_k_cache_ = end - k_offset_;
        if (!valid_) k_offset_ = seqlen_k_cache_ = seqlen_knew_ = 0;
        if (!has_queries_) seqlen_q_ = 0;
    }
    // Whether the lengths, and the entry number of a dense cache, are possible.
    __device__ __forceinline__ bool valid() const { return valid_; }
    // Whether cu_seqlens_q gives this sequence possible rows of q, even if it is not valid().
    __device__ __forceinline__ bool has_queries() const { return has_queries_; }
    __device__ __forceinline__ int seqlen_q() const { return seqlen_q_; }
    // Tokens of the attention, including those that this call appends.
    __device__ __forceinline__ int seqlen_k() const { return seqlen_k_cache_ + seqlen_knew_; }
    // Tokens before this call appends.
    __device__ __forceinline__ int seqlen_k_cache() const { return seqlen_k_cache_; }
    // Tokens that this call appends.
    __device__ __forceinline__ int seqlen_knew() const { return seqlen_knew_; }
    // First row of the appended tokens in packed k and v, else 0.
    __device__ __forceinline__ int knew_offset() const { return knew_offset_; }
    // First row of the sequence in packed q, else 0.
    __device__ __forceinline__ int q_offset() const { return q_offset_; }
    // Row of token 0, from the first row of the sequence's entry or pages.
    __device__ __forceinline__ int k_offset() const { return k_offset_; }
    // Element offset of query 0 in softmax_lse, (batch, nheads, seqlen_q); packed: (nheads, total_q). Static: for a known q_offset.
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        return lse_row(problem_, lengths_, q_offset_, batch, head);
    }
    __device__ __forceinline__ static long long lse_row(const Problem& problem, const Lengths& lengths, int q_offset, int batch,
                                                        int head) {
        if (lengths.cu_seqlens_q) return static_cast<long long>(head) * lengths.total_q + q_offset;
        return (static_cast<long long>(batch) * problem.nheads + head) * problem.seqlen_q;
    }
    // The sequence's entry in a dense cache.
    __device__ __forceinline__ static int entry(const Cache& cache, int batch) {
        return cache.cache_batch_idx ? load_length(cache.cache_batch_idx + batch) : batch;
    }
};

// Returns the page number of the sequence's page i, which holds its rows from cache.rows * i on. (Rows count from the first page,
// tokens from k_offset().) For a dense cache returns its entry, whatever i.
__device__ __forceinline__ int page_of(const Cache& cache, int batch, int i) {
    if (!cache.block_table) return CacheSeqlenInfo::entry(cache, batch);
    return load_length(cache.block_table + batch * cache.block_table_stride + i);
}
__device__ __forceinline__ bool has_page(const Cache& cache, int page) {
    return static_cast<unsigned>(page) < static_cast<unsigned>(cache.entries);
}
// Address of row `row` of a page of K or V, for KV head 0. batch_stride is from a page to the next.
__device__ __forceinline__ const unsigned short* row_of_page(const Operand& x, int page, int row) {
    return x.ptr + page * x.batch_stride + row * x.row_stride;
}
