// Row statistics: what the backward pass needs of each query row besides the row itself.
//
// The main kernel computes S^T - lse/scale and dP^T - delta by loading -lse/scale and -delta as the
// initial accumulators of the two products. In the accumulator layout of m8n8k4 a lane holds four
// queries of two keys, in the order (q0 q1 | q0 q1 | q2 q3 | q2 q3): one group of four queries is
// stored in just that order, 8 floats, so that two 16-byte loads fill an accumulator.
//
// The buffer is (batch, nheads, seqlen_q_rounded / 4, 2, 8) floats: a group's -lse/scale, then its -delta.
// A row that sees no key, and the padding beyond seqlen_q, hold -inf and 0: their P is exp(-inf) = 0.
#pragma once

#include "sequence.cuh"
#include "volta_fa_params.h"

namespace volta {

constexpr int kStatsGroup = 4;   // queries that lie together
constexpr int kStatsDelta = 8;   // from a group's -lse/scale to its -delta
constexpr int kStatsPerRow = 4;  // two statistics, each twice

// Where the first copy of a row's -lse/scale lies, and how far behind it the second.
__device__ __forceinline__ int stats_offset(int row) {
    const int in_group = row % kStatsGroup;
    return row / kStatsGroup * (kStatsGroup * kStatsPerRow) + in_group / 2 * 4 + in_group % 2;
}
constexpr int kStatsCopyDistance = 2;

// First query row of one head of one batch entry, in the arrays of seqlen_q_rounded rows a head. Packed sequences lie one
// behind the other in the rows of a head, each from a multiple of kRowRounding on.
constexpr int kRowRounding = 32;
__device__ __forceinline__ long long rounded_row(const BwdParams& p, const BlockSequence& sequence, int batch, int head) {
    if (kRagged && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * p.lengths.scratch_rows + (sequence.first_q() / kRowRounding + batch) * kRowRounding;
    return (static_cast<long long>(batch) * p.problem.nheads + head) * p.seqlen_q_rounded;
}
// Its rows there: seqlen_q rounded up.
__device__ __forceinline__ int rounded_rows(const BwdParams& p, const BlockSequence& sequence) {
    return kRagged ? (sequence.seqlen_q() + kRowRounding - 1) / kRowRounding * kRowRounding : p.seqlen_q_rounded;
}

}  // namespace volta
