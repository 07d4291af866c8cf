// The sequences of one batch entry: where they begin in the tensors, and how long they are.
//
// Plain kernels have one length for all, in their parameters; there this costs nothing. Ragged ones read cu_seqlens and
// seqused_k, whose values nobody has checked: a sequence that would reach outside the tensors or beyond max_seqlen has no rows and
// no keys. So no kernel writes what belongs to it, and it keeps the NaN of src/ops/device.rs.
#pragma once

#include "mask.cuh"

template <bool Ragged>
class Sequence;

template <>
class Sequence<false> {
    const Problem& problem_;

public:
    __device__ __forceinline__ Sequence(const Problem& problem, const Lengths&, int) : problem_(problem) {}
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

    // Volatile, so that a Sequence that is made again holds no registers in between.
    __device__ __forceinline__ static int load(const int* p) {
        int x;
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(p));
        return x;
    }
    // Rows cu[batch] .. cu[batch + 1] of `total`, at most `longest` of them. Returns whether that is what cu says.
    __device__ __forceinline__ bool range(const int* cu, int batch, int total, int longest, int& first, int& count) {
        const int begin = load(cu + batch), end = load(cu + batch + 1);
        first = min(max(begin, 0), total);
        count = min(max(min(end, total) - first, 0), longest);
        return first == begin && first + count == end && (lengths_.first_batch + batch > 0 || begin == 0);
    }

public:
    __device__ __forceinline__ Sequence(const Problem& problem, const Lengths& lengths, int batch)
        : problem_(problem), lengths_(lengths), first_q_(0), seqlen_q_(problem.seqlen_q), first_k_(0), stored_k_(problem.seqlen_k) {
        bool valid = true;
        if (lengths.cu_seqlens_q) {
            valid &= range(lengths.cu_seqlens_q, batch, lengths.total_q, problem.seqlen_q, first_q_, seqlen_q_);
            valid &= range(lengths.cu_seqlens_k, batch, lengths.total_k, problem.seqlen_k, first_k_, stored_k_);
        }
        seqlen_k_ = stored_k_;
        if (lengths.seqused_k) {
            const int used = load(lengths.seqused_k + batch);
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

// What this kernel is prepared for: NEEDS is its row's in src/kernels, and whoever has one of ragged kernels' has the code of all.
constexpr bool kGeneral = NEEDS & (kNeedSoftcap | kNeedAlibi | kNeedBias | kNeedDropout);
constexpr bool kRagged = NEEDS & (kNeedLengths | kNeedSinks | kNeedBf16Gradients);
using BlockSequence = Sequence<kRagged>;

__device__ __forceinline__ Mask mask_of(const Problem& problem, const BlockSequence& sequence) {
    if (!kRagged) return Mask(problem);
    return Mask(problem, sequence.seqlen_q(), sequence.seqlen_k());
}
