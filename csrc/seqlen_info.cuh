// Lengths and offsets of one batch entry, in rows, for the forward, backward and cast kernels.
//
// SeqlenInfo<false>: one length for all, from the parameters; costs nothing. SeqlenInfo<true>: varlen, from cu_seqlens (packed
// tensors) and seqused_k in GPU memory, unvalidated. An invalid sequence, one that would reach outside the tensors or past
// max_seqlen (problem.seqlen_q and seqlen_k), has no rows and no keys. No kernel writes its rows: the host fills them with NaN
// before the launch. SeqlenInfo<true, true>: the keys are the tokens of a KV cache (paged prefill). Kernels use BlockSeqlenInfo.
#pragma once

#include "cache.cuh"  // CacheSeqlenInfo: lengths of a sequence with a KV cache
#include "features.cuh"  // kVarlen, kPaged: compiled features
#include "lengths.cuh"  // packed_range(): rows of a packed sequence; Problem, Lengths, FwdParams (src/params)
#include "mask.cuh"  // Mask: which keys a row sees

template <bool Varlen, bool Paged = false>
class SeqlenInfo;

template <>
class SeqlenInfo<false> {
    const Problem& problem_;

public:
    __device__ __forceinline__ SeqlenInfo(const Problem& problem, const Lengths&, int) : problem_(problem) {}
    __device__ __forceinline__ SeqlenInfo(const FwdParams& p, int) : problem_(p.problem) {}
    __device__ __forceinline__ int seqlen_q() const { return problem_.seqlen_q; }
    __device__ __forceinline__ int seqlen_k() const { return problem_.seqlen_k; }
    // Rows of K and V in the tensor. Attention ignores those from seqlen_k() on, but dk and dv have them (as 0).
    __device__ __forceinline__ int seqlen_k_allocated() const { return problem_.seqlen_k; }
    // First row of the sequence in q and in k, from the batch entry's row 0; in packed tensors from the whole tensor's.
    __device__ __forceinline__ int q_offset() const { return 0; }
    __device__ __forceinline__ int k_offset() const { return 0; }
    // Element offset of the sequence's row 0 in softmax_lse, (batch, nheads, seqlen_q); packed: (nheads, total_q).
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        return (static_cast<long long>(batch) * problem_.nheads + head) * problem_.seqlen_q;
    }
};

template <>
class SeqlenInfo<true> {
    const Problem& problem_;
    const Lengths& lengths_;
    int q_offset_, seqlen_q_, k_offset_, seqlen_k_allocated_, seqlen_k_;

public:
    __device__ __forceinline__ SeqlenInfo(const FwdParams& p, int batch) : SeqlenInfo(p.problem, p.lengths, batch) {}
    __device__ __forceinline__ SeqlenInfo(const Problem& problem, const Lengths& lengths, int batch)
        : problem_(problem), lengths_(lengths), q_offset_(0), seqlen_q_(problem.seqlen_q), k_offset_(0),
          seqlen_k_allocated_(problem.seqlen_k) {
        bool valid = true;
        if (lengths.cu_seqlens_q) {
            valid &= packed_range(lengths_, lengths.cu_seqlens_q, batch, lengths.total_q, problem.seqlen_q, q_offset_, seqlen_q_);
            valid &= packed_range(lengths_, lengths.cu_seqlens_k, batch, lengths.total_k, problem.seqlen_k, k_offset_,
                                  seqlen_k_allocated_);
        }
        seqlen_k_ = seqlen_k_allocated_;
        if (lengths.seqused_k) {
            const int used = load_length(lengths.seqused_k + batch);
            seqlen_k_ = min(max(used, 0), seqlen_k_allocated_);
            valid &= seqlen_k_ == used;
        }
        if (!valid) seqlen_q_ = seqlen_k_allocated_ = seqlen_k_ = 0;
    }
    __device__ __forceinline__ int seqlen_q() const { return seqlen_q_; }
    __device__ __forceinline__ int seqlen_k() const { return seqlen_k_; }
    __device__ __forceinline__ int seqlen_k_allocated() const { return seqlen_k_allocated_; }
    __device__ __forceinline__ int q_offset() const { return q_offset_; }
    __device__ __forceinline__ int k_offset() const { return k_offset_; }
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        if (lengths_.cu_seqlens_q) return static_cast<long long>(head) * lengths_.total_q + q_offset_;
        return (static_cast<long long>(batch) * problem_.nheads + head) * problem_.seqlen_q;
    }
};

// Lengths of a KV cache, for paged forward kernels ("prefill"). p.min_rows divides a mixed batch between these and decode kernels.
template <>
class SeqlenInfo<true, true> : public CacheSeqlenInfo {
    bool is_prefill_;

public:
    __device__ __forceinline__ SeqlenInfo(const FwdParams& p, int batch)
        : CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch),
          is_prefill_(valid() && CacheSeqlenInfo::seqlen_q() * (p.problem.nheads / p.problem.nheads_k) >= p.min_rows) {}
    // Zero for sequences with fewer than min_rows rows (queries times query heads) per KV head: the decode kernel computes these.
    __device__ __forceinline__ int seqlen_q() const { return is_prefill_ ? CacheSeqlenInfo::seqlen_q() : 0; }
};

using BlockSeqlenInfo = SeqlenInfo<kVarlen, kPaged>;

// Returns the causal and window mask of a sequence.
__device__ __forceinline__ Mask mask_of(const Problem& problem, const BlockSeqlenInfo& sequence) {
    if (!kVarlen) return Mask(problem);
    return Mask(problem, sequence.seqlen_q(), sequence.seqlen_k());
}
