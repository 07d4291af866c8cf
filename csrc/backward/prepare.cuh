// Backward, first kernel: delta = rowsum(dout * out), the row statistics, and a zeroed dq accumulator.
//
// Bound by memory: reads dout and out once, writes the accumulator. Eight lanes a row, 16 bytes a lane.
//
// The same for every family but for RowStats, the layout of the statistics: kRowFloats, kRowRounding, kLseAt, kDeltaAt, and
// offset(row) of the first of a row's kCopies, which lie kCopyDistance apart.
#pragma once

#include "backward/scratch.cuh"
#include "half.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// Sum of the products of eight pairs of fp16.
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

template <class RowStats, int BlockRows, int Threads>
struct BackwardPrepare {
    static constexpr int kBlockRows = BlockRows, kThreads = Threads;
    static constexpr int kLanesPerRow = 8;
    static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
    static_assert(RowStats::kCopies <= kLanesPerRow && kBlockRows % kRowsAtOnce == 0,
                  "each copy has a lane, and the loop no remainder");

    static __device__ __forceinline__ void run(const BwdParams& p) {
        const int head = blockIdx.y, batch = blockIdx.z;
        const int block_row = blockIdx.x * kBlockRows;
        const int lane = threadIdx.x % kLanesPerRow;
        const BlockSequence sequence(p.problem, p.lengths, batch);
        const int all_rows = rounded_rows<RowStats>(p, sequence);
        if (kRagged && block_row >= all_rows) return;
        const long long first_row = rounded_row<RowStats>(p, sequence, batch, head);
        const unsigned short* dout = rows_of(p.dout, batch, head, sequence.first_q());
        const unsigned short* out = rows_of(p.out, batch, head, sequence.first_q());
        const float* lse = p.softmax_lse + sequence.lse_row(batch, head);
        float* stats = p.row_stats + first_row * RowStats::kRowFloats;
        const float inverse_scale = 1.f / p.problem.scale;

        // All lanes of a warp stay in the loop together, for the shuffles.
        for (int r = threadIdx.x / kLanesPerRow; r < kBlockRows; r += kRowsAtOnce) {
            const int row = block_row + r;
            const bool real = row < sequence.seqlen_q();
            float delta = 0.f;
            if (real) {
#pragma unroll 2
                for (int d = lane * kChunk; d < p.problem.headdim_v; d += kLanesPerRow * kChunk)
                    delta += dot(load_global(dout + row * p.dout.row_stride + d), load_global(out + row * p.out.row_stride + d));
            }
#pragma unroll
            for (int i = 1; i < kLanesPerRow; i *= 2) delta += __shfl_xor_sync(~0u, delta, i);
            if (row < all_rows && lane < RowStats::kCopies) {
                float* s = stats + RowStats::offset(row) + lane * RowStats::kCopyDistance;
                const float row_lse = real ? lse[row] : positive_infinity();
                // lse = +inf says that the row sees no key: whatever delta is (0), its P is 0.
                s[RowStats::kLseAt] = -row_lse * inverse_scale;
                s[RowStats::kDeltaAt] = -delta;
            }
        }

        // The block's rows of an accumulator are contiguous, in whatever order it has inside.
        const int rows = min(kBlockRows, all_rows - block_row);
        float* accum = p.dq_accum + (first_row + block_row) * p.headdim_rounded;
        for (int sum = 0; sum < p.dq_sums; sum++, accum += p.dq_sum_stride)
            for (int i = threadIdx.x; i < rows * (p.headdim_rounded / 4); i += kThreads)
                reinterpret_cast<float4*>(accum)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
};
