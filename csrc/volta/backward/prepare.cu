// Backward, first kernel: delta = rowsum(dout * out), the row statistics, and a zeroed dq accumulator.
//
// Bound by memory: reads dout and out once, writes the accumulator. Eight lanes a row, 16 bytes a lane.
#include "half.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "volta/mma.cuh"
#include "volta/backward/row_stats.cuh"

namespace volta {

constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = THREADS / kLanesPerRow;

// Sum of the products of eight pairs of fp16.
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = to_float2(x[i]), v = to_float2(y[i]);
        sum = fmaf(u.x, v.x, sum);
        sum = fmaf(u.y, v.y, sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) {
    const int head = blockIdx.y, batch = blockIdx.z;
    const int block_row = blockIdx.x * BLOCK_ROWS;
    const int lane = threadIdx.x % kLanesPerRow;
    const BlockSequence sequence(p.problem, p.lengths, batch);
    const int all_rows = rounded_rows(p, sequence);
    if (kRagged && block_row >= all_rows) return;
    const long long first_row = rounded_row(p, sequence, batch, head);
    const unsigned short* dout = rows_of(p.dout, batch, head, sequence.first_q());
    const unsigned short* out = rows_of(p.out, batch, head, sequence.first_q());
    const float* lse = p.softmax_lse + sequence.lse_row(batch, head);
    float* stats = p.row_stats + first_row * kStatsPerRow;
    const float inverse_scale = 1.f / p.problem.scale;

    // All lanes of a warp stay in the loop together, for the shuffles.
    for (int r = threadIdx.x / kLanesPerRow; r < BLOCK_ROWS; r += kRowsAtOnce) {
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
        if (row < all_rows && lane < 2) {
            float* s = stats + stats_offset(row) + lane * kStatsCopyDistance;
            const float row_lse = real ? lse[row] : positive_infinity();
            // lse = +inf says that the row sees no key: whatever delta is (0), its P is 0.
            s[0] = -row_lse * inverse_scale;
            s[kStatsDelta] = -delta;
        }
    }

    // The block's rows of the accumulator are contiguous.
    const int rows = min(BLOCK_ROWS, all_rows - block_row);
    float4* accum = reinterpret_cast<float4*>(p.dq_accum + (first_row + block_row) * p.headdim_rounded);
    for (int i = threadIdx.x; i < rows * (p.headdim_rounded / 4); i += THREADS) accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

}  // namespace volta
