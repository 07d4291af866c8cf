// Offsets of query rows in the backward pass's scratch memory: row statistics and dq accumulator.
//
// There a sequence's rows are rounded up to a multiple of RowStats::kRowRounding. So each step of a kernel finds statistics,
// and room for dq, for all of its rows.
#pragma once

#include "seqlen_info.cuh"
#include "volta_fa_params.h"

// Returns the scratch row of a sequence's first query. The rows of dense batches are (batch, nheads, seqlen_q_rounded). Those of
// packed sequences (cu_seqlens) are (nheads, scratch_rows): a sequence begins at its q_offset rounded down to kRowRounding, plus
// kRowRounding for each sequence before it, so that rounded lengths do not overlap.
template <class RowStats>
__device__ __forceinline__ long long rounded_row(const BwdParams& p, const BlockSeqlenInfo& sequence, int batch, int head) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * p.lengths.scratch_rows + (sequence.q_offset() / kRowRounding + batch) * kRowRounding;
    return (static_cast<long long>(batch) * p.problem.nheads + head) * p.seqlen_q_rounded;
}
// Returns the sequence's rows in the scratch memory: seqlen_q rounded up.
template <class RowStats>
__device__ __forceinline__ int rounded_rows(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    return kVarlen ? (sequence.seqlen_q() + kRowRounding - 1) / kRowRounding * kRowRounding : p.seqlen_q_rounded;
}
