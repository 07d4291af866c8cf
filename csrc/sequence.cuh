// The sequences of one batch entry: where they begin in the tensors, and how long they are.
//
// Plain kernels have one length for all, in their parameters; there this costs nothing. Ragged ones read cu_seqlens and
// seqused_k, whose values nobody has checked: a sequence that would reach outside the tensors or beyond max_seqlen has no rows and
// no keys. So no kernel writes what belongs to it, and it keeps the NaN of src/ops/device.rs.
#pragma once

#include "cache.cuh"
#include "lengths.cuh"
#include "mask.cuh"

template <bool Ragged, bool Paged = false>
class Sequence;

template <>
class Sequence<false> {
    const Problem& problem_;

public:
    __device__ __forceinline__ Sequence(const Problem& problem, const Lengths&, int) : problem_(problem) {}
    __device__ __forceinline__ Sequence(const FwdParams& p, int) : problem_(p.problem) {}
    __device__ __forceinline__ int seqlen_q() const { return problem_.seqlen_q; }
    __device__ __forceinline__ int seqlen_k() const { return problem_.seqlen_k; }
    // Rows of K and V that are there; those from seqlen_k() on do not exist for the attention.
    __device__ __forceinline__ int stored_k() const { return problem_.seqlen_k; }
    // The first row of q and of k, from the batch entry's first.
    __device__ __forceinline__ int first_q() const { return 0; }
    __device__ __forceinline__ int first_k() const { return 0; }
    // Where the entry's row of softmax_lse begins.
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        return (static_cast<long long>(batch) * problem_.nheads + head) * problem_.seqlen_q;
    }
};

template <>
class Sequence<true> {
    const Problem& problem_;
    const Lengths& lengths_;
    int first_q_, seqlen_q_, first_k_, stored_k_, seqlen_k_;

public:
    __device__ __forceinline__ Sequence(const FwdParams& p, int batch) : Sequence(p.problem, p.lengths, batch) {}
    __device__ __forceinline__ Sequence(const Problem& problem, const Lengths& lengths, int batch)
        : problem_(problem), lengths_(lengths), first_q_(0), seqlen_q_(problem.seqlen_q), first_k_(0), stored_k_(problem.seqlen_k) {
        bool valid = true;
        if (lengths.cu_seqlens_q) {
            valid &= packed_range(lengths_, lengths.cu_seqlens_q, batch, lengths.total_q, problem.seqlen_q, first_q_, seqlen_q_);
            valid &= packed_range(lengths_, lengths.cu_seqlens_k, batch, lengths.total_k, problem.seqlen_k, first_k_, stored_k_);
        }
        seqlen_k_ = stored_k_;
        if (lengths.seqused_k) {
            const int used = load_length(lengths.seqused_k + batch);
            seqlen_k_ = min(max(used, 0), stored_k_);
            valid &= seqlen_k_ == used;
        }
        if (!valid) seqlen_q_ = stored_k_ = seqlen_k_ = 0;
    }
    __device__ __forceinline__ int seqlen_q() const { return seqlen_q_; }
    __device__ __forceinline__ int seqlen_k() const { return seqlen_k_; }
    __device__ __forceinline__ int stored_k() const { return stored_k_; }
    __device__ __forceinline__ int first_q() const { return first_q_; }
    __device__ __forceinline__ int first_k() const { return first_k_; }
    __device__ __forceinline__ long long lse_row(int batch, int head) const {
        if (lengths_.cu_seqlens_q) return static_cast<long long>(head) * lengths_.total_q + first_q_;
        return (static_cast<long long>(batch) * problem_.nheads + head) * problem_.seqlen_q;
    }
};

// The keys are the tokens of a KV cache.
template <>
class Sequence<true, true> : public CachedSequence {
    bool is_mine_;

public:
    __device__ __forceinline__ Sequence(const FwdParams& p, int batch)
        : CachedSequence(p.problem, p.lengths, p.cache, batch),
          is_mine_(valid() && CachedSequence::seqlen_q() * (p.problem.nheads / p.problem.nheads_k) >= p.least_rows) {}
    // Those of fewer rows a key head are another kernel's.
    __device__ __forceinline__ int seqlen_q() const { return is_mine_ ? CachedSequence::seqlen_q() : 0; }
};

// What this kernel is prepared for: NEEDS is its row's in src/kernels, and whoever has one of ragged kernels' has the code of all.
constexpr bool kGeneral = NEEDS & (kNeedSoftcap | kNeedAlibi | kNeedBias | kNeedDropout);
constexpr bool kRagged = NEEDS & (kNeedLengths | kNeedSinks | kNeedBf16Gradients);
constexpr bool kPaged = NEEDS & kNeedPages;
using BlockSequence = Sequence<kRagged, kPaged>;

__device__ __forceinline__ Mask mask_of(const Problem& problem, const BlockSequence& sequence) {
    if (!kRagged) return Mask(problem);
    return Mask(problem, sequence.seqlen_q(), sequence.seqlen_k());
}
