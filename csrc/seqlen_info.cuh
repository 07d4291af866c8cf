// The sequences of one batch entry: where they begin in the tensors, and how long they are.
//
// Plain kernels have one length for all, in their parameters; there this costs nothing. Ragged ones read cu_seqlens and
// seqused_k, whose values nobody has checked: a sequence that would reach outside the tensors or beyond max_seqlen has no rows and
// no keys. So no kernel writes what belongs to it, and it keeps the NaN of src/ops/device.rs.
#pragma once

#include "cache.cuh"
#include "lengths.cuh"
#include "mask.cuh"

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
    // Rows of K and V that are there; those from seqlen_k() on do not exist for the attention.
    __device__ __forceinline__ int seqlen_k_allocated() const { return problem_.seqlen_k; }
    // The first row of q and of k, from the batch entry's first.
    __device__ __forceinline__ int q_offset() const { return 0; }
    __device__ __forceinline__ int k_offset() const { return 0; }
    // Where the entry's row of softmax_lse begins.
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

// The keys are the tokens of a KV cache.
template <>
class SeqlenInfo<true, true> : public CacheSeqlenInfo {
    bool is_prefill_;

public:
    __device__ __forceinline__ SeqlenInfo(const FwdParams& p, int batch)
        : CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch),
          is_prefill_(valid() && CacheSeqlenInfo::seqlen_q() * (p.problem.nheads / p.problem.nheads_k) >= p.min_rows) {}
    // Those of fewer rows a key head are another kernel's.
    __device__ __forceinline__ int seqlen_q() const { return is_prefill_ ? CacheSeqlenInfo::seqlen_q() : 0; }
};

// What this kernel is prepared for: FEATURES is its row's in src/kernels, and whoever has one of ragged kernels' has the code of
// all.
constexpr bool kGeneric = FEATURES & (kFeatureSoftcap | kFeatureAlibi | kFeatureBias | kFeatureDropout);
constexpr bool kVarlen = FEATURES & (kFeatureLengths | kFeatureSinks | kFeatureBf16Gradients);
constexpr bool kHasSinks = kVarlen, kHasBf16Gradients = kVarlen;
constexpr bool kPaged = FEATURES & kFeaturePages;
using BlockSeqlenInfo = SeqlenInfo<kVarlen, kPaged>;

__device__ __forceinline__ Mask mask_of(const Problem& problem, const BlockSeqlenInfo& sequence) {
    if (!kVarlen) return Mask(problem);
    return Mask(problem, sequence.seqlen_q(), sequence.seqlen_k());
}
