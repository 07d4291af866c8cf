// First kernel of the backward pass, except before fused kernels (DqMode::kStore), which do its work themselves. Writes the row
// statistics that main and dq kernels load, -lse / scale and -delta (row_statistics.cuh); delta is rowsum(dout * out). Clears the
// fp32 accumulators of dq (dq_accum_splits): one for atomics, one for each key block of a launch where sums have a fixed order,
// none before a dq kernel or store_scores.cuh (whose gradients kernel stores dq). Bound by memory: reads dout and out once, writes
// the accumulators.
#pragma once

#include "backward/row_statistics.cuh"  // RowStatistics; BwdParams (src/params): tensors and scratch memory

// The kernel, which src/kernels/shared.rs names. A block has BlockRows rows of one head; kLanesPerStatistic (8) lanes share a row.
// all_rows is seqlen_q rounded up to 32 (kRowRounding, scratch.cuh), whole steps of other kernels; the rows added get delta 0 and
// lse +inf, so that their P is 0.
template <int BlockRows, int Threads>
struct BackwardPreprocess {
    static constexpr int kBlockRows = BlockRows, kThreads = Threads;
    static constexpr int kRowsAtOnce = kThreads / kLanesPerStatistic;
    static_assert(kBlockRows % kRowsAtOnce == 0, "the loop has no remainder");

    static __device__ __forceinline__ void run(const BwdParams& p) {
        const int head = blockIdx.y, batch = blockIdx.z;
        const int block_row = blockIdx.x * kBlockRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        const RowStatistics statistics(p, sequence, head, batch);
        const int all_rows = statistics.all_rows;
        if (kVarlen && block_row >= all_rows) return;

        // All lanes of a warp stay in the loop, because statistics.write() shuffles. It ignores rows from all_rows on.
        for (int r = threadIdx.x / kLanesPerStatistic; r < kBlockRows; r += kRowsAtOnce) {
            const int row = block_row + r;
            float delta = 0.f;
            if (row < sequence.seqlen_q()) {
#pragma unroll 2
                for (int d = statistics.first_column(); d < p.problem.headdim_v; d += kLanesPerStatistic * kChunk)
                    delta += statistics.part_of_delta(row, d);
            }
            statistics.write(row, delta);
        }

        // Clears the block's rows linearly: in each accumulator they are rows * headdim_rounded contiguous floats, in any order.
        const int rows = min(kBlockRows, all_rows - block_row);
        float* accum = p.dq_accum + (statistics.first_row + block_row) * p.headdim_rounded;
        for (int split = 0; split < p.dq_accum_splits; split++, accum += p.dq_accum_split_stride)
            for (int i = threadIdx.x; i < rows * (p.headdim_rounded / 4); i += kThreads)
                reinterpret_cast<float4*>(accum)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
};
