// Memory layout of the row statistics on volta: -lse/scale and -delta of each query row, with lse = softmax_lse and delta =
// rowsum(dO * O). The preprocess kernel or the fused kernel writes them (backward/row_statistics.cuh). Main kernels and dq.cuh read
// them: P = exp(scale * S - lse) = exp(scale * (S + -lse/scale)), dS = P * (dP - delta).
//
// The main kernel gets dP^T - delta by loading -delta as initial accumulators of the product. In the accumulator layout of m8n8k4 a
// lane has four queries of two keys, in the order (q0 q1 | q0 q1 | q2 q3 | q2 q3). Each statistic of a group of four queries is
// stored in that order, 8 floats, so that two 16-byte loads fill an accumulator. Of -lse/scale a lane loads one copy.
//
// The buffer is (batch, nheads, seqlen_q_rounded / kGroupRows, kGroupFloats), of packed sequences (nheads, scratch_rows /
// kGroupRows, kGroupFloats): a group's -lse/scale, then its -delta. Rows without keys and the padding hold -inf and 0: P is 0.
#pragma once

#include "backward/scratch.cuh"

namespace volta {

// Layout of the statistics; template argument of the kernels in backward/.
struct RowStats {
    // -D definitions from `Scratch` in src/kernels/volta/family.rs: the library allocates the buffer by them.
    static constexpr int kGroupRows = STATS_GROUP_ROWS;  // 4: queries of a group
    static constexpr int kGroupFloats = STATS_GROUP_FLOATS;  // 16: two statistics of each, each stored twice
    static constexpr int kNegLseAt = 0, kNegDeltaAt = kGroupFloats / 2;  // offset in a group of -lse/scale, and of -delta
    static constexpr int kRowRounding = ROW_ROUNDING;  // 32: rows of a sequence are rounded up to it, so no step reaches past them

    static constexpr int kRowFloats = kGroupFloats / kGroupRows;
    static constexpr int kCopies = 2, kCopyDistance = 2;  // of a statistic of a row; floats from one copy to the next

    // Offset of the first copy of a row's statistic; the second is kCopyDistance further.
    static __device__ __forceinline__ constexpr int offset(int row) {
        const int in_group = row % kGroupRows;
        return row / kGroupRows * kGroupFloats + in_group / 2 * 4 + in_group % 2;
    }
};
static_assert(RowStats::kNegDeltaAt - RowStats::kNegLseAt == RowStats::kGroupRows * RowStats::kCopies &&
                  RowStats::kGroupFloats == 2 * (RowStats::kNegDeltaAt - RowStats::kNegLseAt),
              "a group is its -lse/scale, then its -delta");
static_assert(library_reads_where_kernels_write<RowStats>(), "Scratch in src/kernels/volta/family.rs has these offsets");
static_assert(RowStats::kRowRounding % RowStats::kGroupRows == 0, "sequences begin with a group");

}  // namespace volta
