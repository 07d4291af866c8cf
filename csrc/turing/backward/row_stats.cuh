// Memory layout of the row statistics on turing: -lse/scale and -delta of each query row, where scale = |softmax_scale| and delta =
// rowsum(dO * O). The preprocess kernel (or a fused one) writes them (backward/row_statistics.cuh), main and dq kernels read them.
// A warp loads those of 16 queries by one instruction: lanes 0 to 15 the -lse/scale, lanes 16 to 31 the -delta of the same queries.
// So these 32 floats are contiguous. Each lane gets what its columns of the scores need by shuffles. The buffer is (batch, nheads,
// rows / kGroupRows, kGroupFloats), where rows is seqlen_q rounded up to kRowRounding. Packed sequences share (nheads, rows / ...):
// there rows is Lengths::scratch_rows, room for all sequences, each rounded up. Rows that see no key, and the padding past
// seqlen_q, hold -inf and 0, so that their P is exp(-inf) = 0. Kernels multiply the first by scale * log2(e), which makes it -lse
// in log2 units (probabilities.cuh).
#pragma once

#include "backward/scratch.cuh"

namespace turing {

// Layout of the statistics; argument of the kernels in backward/.
struct RowStats {
    // -D definitions from `Scratch` in src/kernels/turing/family.rs: the library allocates the buffer by them.
    static constexpr int kGroupRows = STATS_GROUP_ROWS;  // 16: queries of a group
    static constexpr int kGroupFloats = STATS_GROUP_FLOATS;  // 32: two statistics of each
    static constexpr int kNegLseAt = 0, kNegDeltaAt = kGroupRows;  // offset in a group of -lse/scale, and of -delta
    static constexpr int kRowRounding = ROW_ROUNDING;  // 32, the longest step of a main kernel: so no step reaches past the rows

    static constexpr int kRowFloats = kGroupFloats / kGroupRows;  // of a query, on average
    // One copy of each; volta's accumulators need two.
    static constexpr int kCopies = 1, kCopyDistance = 0;

    // Offset, in floats, of a row's statistic from row 0's.
    static __device__ __forceinline__ constexpr int offset(int row) { return row / kGroupRows * kGroupFloats + row % kGroupRows; }
};
static_assert(RowStats::kGroupRows == 16 && RowStats::kGroupFloats == 32, "a warp loads a group");
static_assert(library_reads_where_kernels_write<RowStats>(), "Scratch in src/kernels/turing/family.rs");
static_assert(RowStats::kRowRounding % RowStats::kGroupRows == 0, "sequences begin with a group");

}  // namespace turing
