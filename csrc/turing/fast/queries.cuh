// Queries of the fast forward kernel (`volta_fa::fwd_fast`: Q K^T of int8 codes; forward.cuh), which calls load_queries() once,
// before its loop. Each warp quantizes its own rows, and keeps the codes in registers. A number is code * scale: codes are integers
// up to 127 in magnitude, four in a word, and each row has a scale. butterfly(a, b) replaces a and b by a + b and a - b;
// butterfly_lanes() does so with the lane whose number differs in one bit (codes.cuh). K's codes are made so too (prepare.cuh).
#pragma once

#include "turing/fast/codes.cuh"
#include "turing/fast/mma.cuh"

namespace turing {

// One row of queries: operand A of m8n8k16, where a lane has bytes 4t to 4t + 3 (t = lane % 4) of each 16 columns. The four lanes
// of a row call its functions together.
template <int Headdim>
struct QueryRow {
    static constexpr int kColumns = 16, kProducts = Headdim / kColumns;  // columns of a product; products of a row
    uint2 data[kProducts];  // the lane's four fp16 or bf16 of each

    // The lane's first column of product c.
    __device__ __forceinline__ static int column(int c) { return c * kColumns + 4 * (threadIdx.x & 3); }

    __device__ __forceinline__ void load(const FastParams& p, const unsigned short* row, bool exists) {
#pragma unroll
        for (int c = 0; c < kProducts; c++) {
            data[c] = make_uint2(0, 0);
            if (exists && column(c) < p.problem.headdim) data[c] = __ldg(reinterpret_cast<const uint2*>(row + column(c)));
        }
    }

    // Makes codes of the loaded row. Returns their scale times |softmax_scale| * log2(e), at least kSmallestScale (1e-18): its
    // product with a scale of K is then a normal number. `mean`: K's mean, which the prepare kernel subtracted from keys (option
    // smooth_k; else 0). So each of the row's scores lacks mean_score, the score of `mean`, log2 units: only lse depends on it.
    __device__ __forceinline__ float quantize(u32 (&codes)[kProducts], float& mean_score, const FastParams& p,
                                              const float* mean) const {
        // `poison` is 0, or NaN if an element is not finite: added to the scale, it makes scores NaN. mean_dot: row . mean
        float x[kProducts][4], poison = 0.f, mean_dot = 0.f;
#pragma unroll
        for (int c = 0; c < kProducts; c++) {
            unpack4(x[c], data[c], p.element == ElementType::Bf16);
            const float4 of_keys = *reinterpret_cast<const float4*>(mean + column(c));
            const float means[4] = {of_keys.x, of_keys.y, of_keys.z, of_keys.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                poison = fmaf(x[c][i], 0.f, poison);
                mean_dot = fmaf(x[c][i], means[i], mean_dot);
            }
        }
        float score_scale = p.problem.scale_log2;  // |softmax_scale| * log2(e). The codes take softmax_scale's sign (sign_flip)
        if (p.rotate) {
            // A Hadamard transform spreads outliers over all columns. Q and K both get it, which multiplies products by Headdim.
            score_scale *= 1.f / Headdim;
            // first the lane's four columns, then the four lanes (1, 2: bits of their numbers), last the products
#pragma unroll
            for (int c = 0; c < kProducts; c++) {
                butterfly(x[c][0], x[c][1]), butterfly(x[c][2], x[c][3]);
                butterfly(x[c][0], x[c][2]), butterfly(x[c][1], x[c][3]);
#pragma unroll
                for (int i = 0; i < 4; i++) x[c][i] = butterfly_lanes(butterfly_lanes(x[c][i], 1), 2);
            }
#pragma unroll
            for (int step = 1; step < kProducts; step *= 2)
#pragma unroll
                for (int c = 0; c < kProducts; c++)
                    if (!(c & step))
#pragma unroll
                        for (int i = 0; i < 4; i++) butterfly(x[c][i], x[c + step][i]);
        }
        float largest = 0.f;
#pragma unroll
        for (int c = 0; c < kProducts; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[c][i]));
#pragma unroll
        for (int lane_mask = 1; lane_mask <= 2; lane_mask *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane_mask));
            poison += __shfl_xor_sync(~0u, poison, lane_mask);
            mean_dot += __shfl_xor_sync(~0u, mean_dot, lane_mask);
        }
        const float sign = p.problem.sign_flip ? -1.f : 1.f, factor = sign * code_factor(largest);
#pragma unroll
        for (int c = 0; c < kProducts; c++) codes[c] = to_codes(x[c], factor);
        mean_score = sign * mean_dot * p.problem.scale_log2;
        return fmaxf(code_scale(largest) * score_scale, kSmallestScale) + poison;
    }
};

// Loads the warp's queries as codes q, of Rows rows of a lane, one row at a time: unrolled code costs more time in the instruction
// cache than the moves of codes to their registers. `rows`: address of row 0 of the head; warp_row: the warp's first. `state` gets
// the rows' scales (push_scale(), state.cuh). `lse`, the address of row 0 in softmax_lse, gets their mean_score. CodeChunks: words
// of a row, one for 16 columns.
template <int Headdim, int Rows, int CodeChunks, class State>
__device__ __forceinline__ void load_queries(u32 (&q)[Rows][CodeChunks], State& state, const FastParams& p,
                                             const unsigned short* rows, int warp_row, int seqlen_q, const float* mean,
                                             float* lse) {
    const Lane lane(threadIdx.x & 31);
    // A lane has rows lane / 4 + 8 * r (group: lane / 4, quad: lane % 4). The loop loads one row ahead: r = -1 loads row 0 alone.
    int row = warp_row + lane.group - 8;
    QueryRow<Headdim> next = {};
#pragma unroll 1
    for (int r = -1; r < Rows; r++) {
        const QueryRow<Headdim> loaded = next;
        if (r + 1 < Rows) next.load(p, rows + (row + 8) * p.q.row_stride, row + 8 < seqlen_q);
        if (r >= 0) {
            // the last is appended, and those before move up: rolled loops cannot index registers
#pragma unroll
            for (int i = 0; i + 1 < Rows; i++)
#pragma unroll
                for (int c = 0; c < CodeChunks; c++) q[i][c] = q[i + 1][c];
            float mean_score;
            state.push_scale(loaded.quantize(q[Rows - 1], mean_score, p, mean), r);
            // softmax_lse, an output, holds it until write_output() (forward.cuh) adds it to the row's lse: no register is free
            if (lane.quad == 0 && row < seqlen_q) lse[row] = mean_score;
        }
        row += 8;
    }
}

}  // namespace turing
