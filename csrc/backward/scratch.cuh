// Where a sequence's query rows lie in the scratch memory of the backward pass: the row statistics and dq's accumulator.
//
// A sequence's rows are rounded up there to a multiple of RowStats::kRowRounding, so that each step of a kernel finds statistics,
// and room for dq, for all of its rows. RowStats is the family's layout of the statistics.
#pragma once

#include "seqlen_info.cuh"
#include "volta_fa_params.h"

// First query row of one head of one batch entry, in the arrays of seqlen_q_rounded rows a head. Packed sequences lie one
// behind the other in the rows of a head, each from a multiple of kRowRounding on.
template <class RowStats>
__device__ __forceinline__ long long rounded_row(const BwdParams& p, const BlockSeqlenInfo& sequence, int batch, int head) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * p.lengths.scratch_rows + (sequence.q_offset() / kRowRounding + batch) * kRowRounding;
    return (static_cast<long long>(batch) * p.problem.nheads + head) * p.seqlen_q_rounded;
}
// Its rows there: seqlen_q rounded up.
template <class RowStats>
__device__ __forceinline__ int rounded_rows(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    return kVarlen ? (sequence.seqlen_q() + kRowRounding - 1) / kRowRounding * kRowRounding : p.seqlen_q_rounded;
}
