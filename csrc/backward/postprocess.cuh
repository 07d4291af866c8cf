// Last kernel of a backward pass whose main kernel accumulates dq (DqMode::kAtomicAdd): dq = scale * dq_accum, to fp16 or fp32,
// with the caller's strides. A single accumulator is a sum by atomics, in any order. In deterministic mode there are
// dq_accum_splits, and the main kernel has several launches of as many blocks of keys: block n of each launch adds to accumulator
// n. This kernel sums them in a fixed order.
//
// The factor is |softmax_scale|: if it is negative, the main kernel has flipped the signs of K (Problem::sign_flip).
//
// Each family passes DqAccumulator, the layout of dq_accum: row() and column() are offsets in floats (headdim_rounded a row),
// load8() loads eight neighboring columns, row_of() and chunk_of() are the row and the chunk of eight columns that a thread begins
// with, for coalesced loads. headdim is a multiple of eight, rows of dq 16-byte aligned.
#pragma once

#include "backward/gradient_output.cuh"  // gradients_are_fp32(): output dtype; BwdParams (src/params)
#include "backward/scratch.cuh"  // rounded_row(): a query's row in dq_accum
#include "tile.cuh"  // kChunk: 8 columns; rows_of(), fp32_element(): addresses

// The kernel, which src/kernels/shared.rs names. A block converts BlockRows rows of one head.
template <class DqAccumulator, int BlockRows, int Threads>
struct BackwardPostprocess {
    static constexpr int kBlockRows = BlockRows, kThreads = Threads;
    static constexpr int kLanesPerRow = DqAccumulator::kLanesPerRow;
    static constexpr int kRowsAtOnce = kThreads / kLanesPerRow;
    static_assert(kBlockRows % kRowsAtOnce == 0, "the threads' rows do not leave the block");

    // FP32: dq is fp32, else fp16.
    template <bool FP32>
    static __device__ __forceinline__ void convert(const BwdParams& p, const BlockSeqlenInfo& sequence, int head, int batch) {
        const int end = min((static_cast<int>(blockIdx.x) + 1) * kBlockRows, sequence.seqlen_q());
        const float* accum = p.dq_accum + rounded_row(p, sequence, batch, head) * p.headdim_rounded;
        // Addresses of outputs are those of fp16 elements; fp32_element() converts them.
        unsigned short* dq = rows_of(p.dq, batch, head, sequence.q_offset());
        const float scale = p.problem.scale;

        for (int row = blockIdx.x * kBlockRows + DqAccumulator::row_of(threadIdx.x); row < end; row += kRowsAtOnce) {
            const float* from = accum + DqAccumulator::row(static_cast<long long>(row), p.headdim_rounded);
            unsigned short* to = dq + row * p.dq.row_stride;
            for (int d = DqAccumulator::chunk_of(threadIdx.x) * kChunk; d < p.problem.headdim; d += kLanesPerRow * kChunk) {
                const float* chunk = from + DqAccumulator::column(d, p.headdim_rounded);
                float4 a, b;
                DqAccumulator::load8(chunk, a, b);
#pragma unroll 1
                for (int split = 1; split < p.dq_accum_splits; split++) {
                    float4 x, y;
                    DqAccumulator::load8(chunk += p.dq_accum_split_stride, x, y);
                    a = make_float4(a.x + x.x, a.y + x.y, a.z + x.z, a.w + x.w);
                    b = make_float4(b.x + y.x, b.y + y.y, b.z + y.z, b.w + y.w);
                }
                a = make_float4(a.x * scale, a.y * scale, a.z * scale, a.w * scale);
                b = make_float4(b.x * scale, b.y * scale, b.z * scale, b.w * scale);
                if (FP32) {
                    float4* numbers = reinterpret_cast<float4*>(fp32_element(p.dq, to + d));
                    numbers[0] = a, numbers[1] = b;
                } else {
                    *reinterpret_cast<uint4*>(to + d) =
                        make_uint4(to_half2(a.x, a.y), to_half2(a.z, a.w), to_half2(b.x, b.y), to_half2(b.z, b.w));
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const BwdParams& p) {
        const int head = blockIdx.y, batch = blockIdx.z;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        if (gradients_are_fp32(p))
            convert<true>(p, sequence, head, batch);
        else
            convert<false>(p, sequence, head, batch);
    }
};
