// Offsets of query rows in the backward pass's scratch memory: the row statistics (-lse / scale and -delta) and the accumulator of
// dq. Included by all backward kernels. RowStats is a family's layout of the statistics ({volta,turing}/backward/row_stats.cuh).
//
// There a sequence's rows are rounded up to a multiple of RowStats::kRowRounding (32). Main kernels that own keys step over at most
// as many queries. So each step finds statistics, and room for dq, for all of its rows, and needs no bounds test. Blocks that own
// more queries (dq kernels, store_scores.cuh) test them against rounded_rows().
#pragma once

#include "seqlen_info.cuh"  // BlockSeqlenInfo: lengths of a sequence; kVarlen: read from GPU memory
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Returns the scratch row of a sequence's first query, counted over all heads. The rows of dense batches are (batch, nheads,
// seqlen_q_rounded). Those of packed sequences (cu_seqlens) are (nheads, scratch_rows), room for all: a sequence begins at its
// q_offset rounded down to kRowRounding, plus kRowRounding for each sequence before it, so that rounded lengths do not overlap.
template <class RowStats>
__device__ __forceinline__ long long rounded_row(const BwdParams& p, const BlockSeqlenInfo& sequence, int batch, int head) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * p.lengths.scratch_rows + (sequence.q_offset() / kRowRounding + batch) * kRowRounding;
    return (static_cast<long long>(batch) * p.problem.nheads + head) * p.seqlen_q_rounded;
}
// Whether the library's offsets of statistics, in floats, are those of RowStats, for the kGroupRows rows of a group (its unit of
// layout). The build defines both macros from `Scratch` in src/kernels, by which the library reads statistics for the gradient of
// attention sinks. For a static_assert after RowStats.
template <class RowStats>
constexpr __device__ bool library_reads_where_kernels_write() {
    constexpr int neg_lse[] = {STATS_NEG_LSE_OFFSETS}, neg_delta[] = {STATS_NEG_DELTA_OFFSETS};
    for (int row = 0; row < RowStats::kGroupRows; row++)
        if (neg_lse[row] != RowStats::kNegLseAt + RowStats::offset(row) ||
            neg_delta[row] != RowStats::kNegDeltaAt + RowStats::offset(row))
            return false;
    return true;
}
// Returns the sequence's rows in the scratch memory: seqlen_q rounded up.
template <class RowStats>
__device__ __forceinline__ int rounded_rows(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    constexpr int kRowRounding = RowStats::kRowRounding;
    return kVarlen ? (sequence.seqlen_q() + kRowRounding - 1) / kRowRounding * kRowRounding : p.seqlen_q_rounded;
}
