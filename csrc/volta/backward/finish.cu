// Backward, last kernel: dq = scale * dq_accum in fp16 or bf16, into the caller's strides.
//
// The factor is the positive scale: where softmax_scale is negative, the keys that the accumulator was
// computed with carry the sign (Problem::sign_flip).
#include "tile.cuh"
#include "volta/backward/gradients.cuh"
#include "volta/backward/row_stats.cuh"

namespace volta {

constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = THREADS / kLanesPerRow;

template <bool BF16>
__device__ __forceinline__ void convert(const BwdParams& p, const BlockSequence& sequence, int head, int batch) {
    const int end = min((static_cast<int>(blockIdx.x) + 1) * BLOCK_ROWS, sequence.seqlen_q());
    const float* accum = p.dq_accum + rounded_row(p, sequence, batch, head) * p.headdim_rounded;
    unsigned short* dq = rows_of(p.dq, batch, head, sequence.first_q());
    const float scale = p.problem.scale;

    for (int row = blockIdx.x * BLOCK_ROWS + threadIdx.x / kLanesPerRow; row < end; row += kRowsAtOnce) {
        const float* from = accum + static_cast<long long>(row) * p.headdim_rounded;
        unsigned short* to = dq + row * p.dq.row_stride;
        for (int d = threadIdx.x % kLanesPerRow * kChunk; d < p.problem.headdim; d += kLanesPerRow * kChunk) {
            const float4 a = *reinterpret_cast<const float4*>(from + d), b = *reinterpret_cast<const float4*>(from + d + 4);
            *reinterpret_cast<uint4*>(to + d) =
                make_uint4(to_gradient2<BF16>(a.x * scale, a.y * scale), to_gradient2<BF16>(a.z * scale, a.w * scale),
                           to_gradient2<BF16>(b.x * scale, b.y * scale), to_gradient2<BF16>(b.z * scale, b.w * scale));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) {
    const int head = blockIdx.y, batch = blockIdx.z;
    const BlockSequence sequence(p.problem, p.lengths, batch);
    if (gradients_are_bf16(p))
        convert<true>(p, sequence, head, batch);
    else
        convert<false>(p, sequence, head, batch);
}

}  // namespace volta
