// What a main kernel does with dq, and what it does besides where nothing else is launched.
#pragma once

#include "backward/row_statistics.cuh"

enum class QueryGradients {
    kOfOthers,  // another kernel computes them
    kAdded,     // to their accumulator, by atomics
    // Stored, since the block has all keys of its heads. Then it is the whole backward pass: it makes the statistics of its rows
    // before it begins with a head, and walks over all rows of queries, since those that see no key have a gradient too, 0.
    kStored,
};

// The statistics of all rows of a head, for this block alone, behind the next __syncthreads().
template <class RowStats, int Headdim, int Threads>
__device__ __forceinline__ void write_row_statistics(const BwdParams& p, const BlockSeqlenInfo& sequence, int head) {
    constexpr int kRowsAtOnce = Threads / kLanesPerStatistic;
    // so many rows' loads are in flight: 64 rows are one round of 128 threads up to headdim 64
    constexpr int kRows = Headdim <= 64 ? 4 : 2;
    const RowStatistics<RowStats> statistics(p, sequence, head, blockIdx.z);
#pragma unroll 1
    for (int first = threadIdx.x / kLanesPerStatistic; first < statistics.all_rows; first += kRows * kRowsAtOnce) {
        float delta[kRows];
#pragma unroll
        for (int i = 0; i < kRows; i++) {
            delta[i] = 0.f;
#pragma unroll
            for (int c = 0; c < Headdim; c += kLanesPerStatistic * kChunk) {
                const int row = first + i * kRowsAtOnce, column = statistics.first_column() + c;
                if (row < sequence.seqlen_q() && column < p.problem.headdim_v) delta[i] += statistics.part_of_delta(row, column);
            }
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) statistics.write(first + i * kRowsAtOnce, delta[i]);
    }
}
