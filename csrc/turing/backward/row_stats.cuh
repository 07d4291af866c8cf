// Row statistics: what the backward pass needs of each query row besides the row itself.
//
// A step loads those of 16 queries by one instruction of a warp: lanes 0 to 15 the -lse/scale of a query each, the others the
// -delta of the same queries. So these 32 numbers lie together, and each lane gets by shuffles what its columns of the scores need.
//
// The buffer is (batch, nheads, seqlen_q_rounded / kGroupRows, kGroupFloats). A row that sees no key, and the padding beyond
// seqlen_q, hold -inf and 0: their P is exp(-inf) = 0.
#pragma once

namespace turing {

struct RowStats {
    // The family's numbers (`Scratch` in src/kernels/turing/mod.rs): the library allocates the buffer by them.
    static constexpr int kGroupRows = STATS_GROUP_ROWS;
    static constexpr int kGroupFloats = STATS_GROUP_FLOATS;
    static constexpr int kLseAt = 0, kDeltaAt = kGroupRows;  // where a group's -lse/scale begin, and its -delta
    static constexpr int kRowRounding = ROW_ROUNDING;  // a sequence's rows there are a multiple: no step reaches beyond

    static constexpr int kRowFloats = kGroupFloats / kGroupRows;
    static constexpr int kCopies = 1, kCopyDistance = 0;

    static __device__ __forceinline__ constexpr int offset(int row) { return row / kGroupRows * kGroupFloats + row % kGroupRows; }
};
static_assert(RowStats::kGroupRows == 16 && RowStats::kGroupFloats == 32, "a warp loads a group");
// The gradient of sinks reads the statistics where prepare writes them.
constexpr __device__ bool library_reads_where_kernels_write() {
    constexpr int neg_lse[] = {STATS_MINUS_LSE_AT}, neg_delta[] = {STATS_MINUS_DELTA_AT};
    for (int row = 0; row < RowStats::kGroupRows; row++)
        if (neg_lse[row] != RowStats::kLseAt + RowStats::offset(row) ||
            neg_delta[row] != RowStats::kDeltaAt + RowStats::offset(row))
            return false;
    return true;
}
static_assert(library_reads_where_kernels_write(), "Scratch in src/kernels/turing/mod.rs");
static_assert(RowStats::kRowRounding % RowStats::kGroupRows == 0, "sequences begin with a group");

}  // namespace turing
