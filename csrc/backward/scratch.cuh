// Scratch memory of the backward pass: layout of the row statistics (RowStats), and offsets of query rows in them and in the
// accumulator of dq. Included by all backward kernels.
//
// There a sequence's rows are rounded up to a multiple of RowStats::kRowRounding (32): seqlen_q to seqlen_q_rounded. Main kernels
// (dK and dV) whose blocks own keys visit at most as many queries in a step. So each step finds statistics, and room for dq, for
// all of its rows, and needs no bounds test. Blocks that own more queries (dq kernels, store_scores.cuh) test them against
// rounded_rows().
#pragma once

#include "seqlen_info.cuh"  // BlockSeqlenInfo: lengths of a sequence; kVarlen: read from GPU memory
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Memory layout of the row statistics: -lse/scale and -delta of each query row, with scale = |softmax_scale|, lse = softmax_lse and
// delta = rowsum(dO * O). The preprocess kernel or the fused kernel writes them (row_statistics.cuh). Main and dq kernels read
// them: P = exp(scale * S - lse) = exp(scale * (S + -lse/scale)), dS = P * (dP - delta).
//
// The buffer is (batch, nheads, seqlen_q_rounded / kGroupRows, kGroupFloats), of packed sequences (nheads, scratch_rows /
// kGroupRows, kGroupFloats): a group's -lse/scale, then its -delta. Rows without keys and the padding hold -inf and 0: P is 0.
//
// turing: a group is 16 queries. A warp loads it by one instruction: lanes 0 to 15 the -lse/scale, lanes 16 to 31 the -delta of the
// same queries. Each lane gets what its columns of the scores need by shuffles.
//
// volta: a group is four queries, and each statistic is stored twice. The main kernel gets dP^T - delta by loading -delta as
// initial accumulators of the product. In the accumulator layout of m8n8k4 a lane has four queries of two keys, in the order (q0 q1
// | q0 q1 | q2 q3 | q2 q3). The 8 floats of a group's statistic have that order, so that two 16-byte loads fill an accumulator. Of
// -lse/scale a lane loads one copy.
struct RowStats {
    // -D definitions from `Scratch` in src/kernels/{volta,turing}/family.rs: the library allocates the buffer by them.
    static constexpr int kGroupRows = STATS_GROUP_ROWS, kGroupFloats = STATS_GROUP_FLOATS;  // of a group: queries, and floats
    static constexpr int kRowRounding = ROW_ROUNDING;  // 32: rows of a sequence are rounded up to it, so no step reaches past them

    static constexpr int kNegLseAt = 0, kNegDeltaAt = kGroupFloats / 2;  // offset in a group of -lse/scale, and of -delta
    static constexpr int kRowFloats = kGroupFloats / kGroupRows;  // of a query, on average
    // Copies of a statistic of a row; floats from one copy to the next.
    static constexpr int kCopies = kRowFloats / 2, kCopyDistance = kCopies > 1 ? 2 : 0;

    // Offset of the first copy of a row's statistic from that of row 0.
    static __device__ __forceinline__ constexpr int offset(int row) {
        if constexpr (kCopies == 1) return row / kGroupRows * kGroupFloats + row % kGroupRows;
        const int in_group = row % kGroupRows;
        return row / kGroupRows * kGroupFloats + in_group / 2 * 4 + in_group % 2;
    }
};
static_assert(RowStats::kRowRounding % RowStats::kGroupRows == 0, "sequences begin with a group");
// Whether the library's offsets of statistics, in floats, are those of RowStats, for the rows of a group. The build defines both
// macros from `Scratch` in src/kernels, by which the library reads statistics for the gradient of attention sinks.
constexpr __device__ bool library_reads_where_kernels_write() {
    constexpr int neg_lse[] = {STATS_NEG_LSE_OFFSETS}, neg_delta[] = {STATS_NEG_DELTA_OFFSETS};
    for (int row = 0; row < RowStats::kGroupRows; row++)
        if (neg_lse[row] != RowStats::kNegLseAt + RowStats::offset(row) ||
            neg_delta[row] != RowStats::kNegDeltaAt + RowStats::offset(row))
            return false;
    return true;
}
static_assert(library_reads_where_kernels_write(), "Scratch in src/kernels/{volta,turing}/family.rs has these offsets");

// Returns the scratch row of a sequence's first query, counted over all heads. The rows of dense batches are (batch, nheads,
// seqlen_q_rounded). Those of packed sequences (cu_seqlens) are (nheads, scratch_rows), room for all: a sequence begins at its
// q_offset rounded down to kRowRounding, plus kRowRounding for each sequence before it, so that rounded lengths do not overlap.
__device__ __forceinline__ long long rounded_row(const BwdParams& p, const BlockSeqlenInfo& sequence, int batch, int head) {
    constexpr int kRounding = RowStats::kRowRounding;
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * p.lengths.scratch_rows + (sequence.q_offset() / kRounding + batch) * kRounding;
    return (static_cast<long long>(batch) * p.problem.nheads + head) * p.seqlen_q_rounded;
}
// Returns the sequence's rows in the scratch memory: seqlen_q rounded up.
__device__ __forceinline__ int rounded_rows(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    constexpr int kRounding = RowStats::kRowRounding;
    return kVarlen ? (sequence.seqlen_q() + kRounding - 1) / kRounding * kRounding : p.seqlen_q_rounded;
}
