// Row statistics of the backward pass, two floats for each query row: -lse / scale and -delta, from lse (softmax_lse, natural log),
// scale (|softmax_scale|) and fp16 dout and out: delta = rowsum(dout * out) (FlashAttention-2). The exponents of P add the first
// (probabilities.cuh). It has the unit of a product Q K^T, so one factor, scale_log2 = scale * log2(e), turns both into log2 units.
// volta's accumulators of dO V^T begin with the second, so that dP - delta costs nothing; turing's kernels add it in multiply-adds.
// Written by the preprocess kernel, or by the fused kernel (write_row_statistics). Eight lanes compute a row's delta, in loads of
// 16 bytes each. RowStats (scratch.cuh) is their memory layout: kRowFloats floats a query, kCopies copies of each statistic (two
// for volta's accumulators), kCopyDistance floats apart.
#pragma once

#include "backward/scratch.cuh"  // RowStats; rounded_row(), rounded_rows(): rows in scratch memory; BwdParams (src/params)
#include "half.cuh"  // to_float2(): packed fp16 to fp32
#include "softmax.cuh"  // positive_infinity()
#include "tile.cuh"  // kChunk: 8 columns, 16 bytes; rows_of(): address of a row

// Dot product of eight pairs of fp16.
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = to_float2(x[i]), v = to_float2(y[i]);
        sum = fmaf(u.x, v.x, sum);
        sum = fmaf(u.y, v.y, sum);
    }
    return sum;
}

constexpr int kLanesPerStatistic = 8;

// The statistics of one head of one sequence.
struct RowStatistics {
    static_assert(RowStats::kCopies <= kLanesPerStatistic, "a lane stores each copy of a statistic");
    const BwdParams& p;
    const BlockSeqlenInfo& sequence;
    const int lane = threadIdx.x % kLanesPerStatistic;  // of a row's eight
    const int all_rows;  // seqlen_q, rounded up to kRowRounding
    const long long first_row;  // of the sequence and head, in the scratch memory (scratch.cuh)
    const unsigned short *const dout, *const out;  // row 0 of the sequence and head, as is lse
    const float* const lse;
    float* const stats;
    const float inverse_scale;

    __device__ __forceinline__ RowStatistics(const BwdParams& p_, const BlockSeqlenInfo& sequence_, int head, int batch)
        : p(p_), sequence(sequence_), all_rows(rounded_rows(p, sequence)), first_row(rounded_row(p, sequence, batch, head)),
          dout(rows_of(p.dout, batch, head, sequence.q_offset())), out(rows_of(p.out, batch, head, sequence.q_offset())),
          lse(p.softmax_lse + sequence.lse_row(batch, head)), stats(p.row_stats + first_row * RowStats::kRowFloats),
          inverse_scale(1.f / p.problem.scale) {}

    // A row's delta is the sum of part_of_delta (eight columns) over the lane's columns and over the eight lanes. A lane's columns
    // are first_column() and every kLanesPerStatistic * kChunk = 64 columns further.
    __device__ __forceinline__ int first_column() const { return lane * kChunk; }
    __device__ __forceinline__ float part_of_delta(int row, int column) const {
        return dot(load_global(dout + row * p.dout.row_stride + column), load_global(out + row * p.out.row_stride + column));
    }
    // Sums delta over the eight lanes and writes a row's statistics. All lanes of a warp call it together.
    __device__ __forceinline__ void write(int row, float delta) const {
#pragma unroll
        for (int i = 1; i < kLanesPerStatistic; i *= 2) delta += __shfl_xor_sync(~0u, delta, i);
        if (row < all_rows && lane < RowStats::kCopies) {
            float* s = stats + RowStats::offset(row) + lane * RowStats::kCopyDistance;
            const float row_lse = row < sequence.seqlen_q() ? lse[row] : positive_infinity();
            // Padding rows get lse = +inf here; rows that see no key have it from the forward pass. P is then 0, whatever delta is.
            s[RowStats::kNegLseAt] = -row_lse * inverse_scale;
            s[RowStats::kNegDeltaAt] = -delta;
        }
    }
};

// Writes the statistics of all rows of a head, for the fused kernels: the same block reads them after its next __syncthreads().
template <int Headdim, int Threads>
__device__ __forceinline__ void write_row_statistics(const BwdParams& p, const BlockSeqlenInfo& sequence, int head) {
    constexpr int kRowsAtOnce = Threads / kLanesPerStatistic;
    // Rows whose loads are in flight at once. Up to headdim 64, 128 threads do 64 rows in one iteration.
    constexpr int kRows = Headdim <= 64 ? 4 : 2;
    const RowStatistics statistics(p, sequence, head, blockIdx.z);
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
