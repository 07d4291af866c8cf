// Row statistics: what the backward pass needs of each query row besides the row itself.
//
// The main kernel computes S^T - lse/scale and dP^T - delta by loading -lse/scale and -delta as the
// initial accumulators of the two products. In the accumulator layout of m8n8k4 a lane holds four
// queries of two keys, in the order (q0 q1 | q0 q1 | q2 q3 | q2 q3): one group of four queries is
// stored in just that order, 8 floats, so that two 16-byte loads fill an accumulator.
//
// The buffer is (batch, nheads, seqlen_q_rounded / kGroupRows, kGroupFloats): a group's -lse/scale, then its -delta.
// A row that sees no key, and the padding beyond seqlen_q, hold -inf and 0: their P is exp(-inf) = 0.
#pragma once

namespace volta {

struct RowStats {
    // The family's numbers (`Scratch` in src/kernels/volta/mod.rs): the library allocates the buffer by them.
    static constexpr int kGroupRows = STATS_GROUP_ROWS;  // queries that lie together
    static constexpr int kGroupFloats = STATS_GROUP_FLOATS;  // two statistics of each, each twice
    static constexpr int kLseAt = 0, kDeltaAt = kGroupFloats / 2;  // where a group's -lse/scale begin, and its -delta
    static constexpr int kRowRounding = ROW_ROUNDING;  // a sequence's rows there are a multiple: no step reaches beyond

    static constexpr int kRowFloats = kGroupFloats / kGroupRows;
    static constexpr int kCopies = 2, kCopyDistance = 2;

    // Where the first copy of a row's statistic lies; the second is kCopyDistance behind it.
    static __device__ __forceinline__ constexpr int offset(int row) {
        const int in_group = row % kGroupRows;
        return row / kGroupRows * kGroupFloats + in_group / 2 * 4 + in_group % 2;
    }
};
static_assert(RowStats::kDeltaAt - RowStats::kLseAt == RowStats::kGroupRows * RowStats::kCopies &&
                  RowStats::kGroupFloats == 2 * (RowStats::kDeltaAt - RowStats::kLseAt),
              "a group is its -lse/scale, then its -delta");
// The gradient of sinks reads the statistics where prepare writes them.
constexpr __device__ bool library_reads_where_kernels_write() {
    constexpr int neg_lse[] = {STATS_MINUS_LSE_AT}, neg_delta[] = {STATS_MINUS_DELTA_AT};
    for (int row = 0; row < RowStats::kGroupRows; row++)
        if (neg_lse[row] != RowStats::kLseAt + RowStats::offset(row) ||
            neg_delta[row] != RowStats::kDeltaAt + RowStats::offset(row))
            return false;
    return true;
}
static_assert(library_reads_where_kernels_write(), "Scratch in src/kernels/volta/mod.rs");
static_assert(RowStats::kRowRounding % RowStats::kGroupRows == 0, "sequences begin with a group");

}  // namespace volta
