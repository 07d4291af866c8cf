// Combines partial results of decode row tiles (split-KV, as FlashDecoding), in a fixed order, so the output is deterministic. Used
// by block.cuh.
//
// A partial has, for each row, the softmax state (row_max and sum of SoftmaxRow, softmax.cuh) and the unnormalized output. The
// token groups of a block leave partials in shared memory (SharedPartials). A block that shares its row tile with others writes
// the combined result to global memory (GlobalPartials). The last block to arrive combines these and writes the output. No
// block waits for another: a semaphore tells the last one (semaphore.cuh).
//
// The kernel's row in src/kernels gives BLOCK_ROWS (packed query rows of a work tile) and THREADS (of a block).
#pragma once

#include "semaphore.cuh"
#include "decode/tile_scheduler.cuh"
#include "forward/output.cuh"

namespace decode {

constexpr int kColumns = 8;  // columns that a thread combines at a time
// Floats between output rows in shared memory: four more than columns, so that rows begin in different banks.
constexpr int kPartialStride = HEADDIM_V + 4;

// Softmax state of one row: its lazy maximum and the sum of its probabilities, as in SoftmaxRow.
struct RowState {
    float row_max, sum;
};

// Partials in shared memory, one for each token group. Rows: output rows that are there at a time.
template <int Partials, int Rows>
struct SharedPartials {
    float* output;  // [Partials][Rows][kPartialStride]
    RowState* state;  // [Partials][BLOCK_ROWS]

    // The same partials, with states counted from row `first`, where the outputs begin.
    __device__ __forceinline__ SharedPartials from(int first) const { return {output, state + first}; }

    __device__ __forceinline__ RowState state_of(int partial, int row) const { return state[partial * BLOCK_ROWS + row]; }
    __device__ __forceinline__ float4 load(int partial, int row, int column) const {
        return *reinterpret_cast<const float4*>(output + (partial * Rows + row) * kPartialStride + column);
    }
};

// Partials in global memory, read with ld.cg because other blocks wrote them and L1 is not coherent.
//
// The buffer has all outputs, then all states. Outputs are combined in place: only the thread that writes an element reads it.
// All threads read states, so each level of the combination has its own.
struct GlobalPartials {
    float* partials;
    int level, first_block, first, distance;  // partial i belongs to block first + i * distance

    // A block has two slots: one for a row tile that began in an earlier block, one for a row tile that begins in it.
    __device__ __forceinline__ static long long slot(int block, int first_block) { return 2ll * block + (block == first_block); }
    __device__ __forceinline__ static float* output_at(float* partials, long long slot) {
        return partials + slot * (BLOCK_ROWS * HEADDIM_V);
    }
    // Offset of four columns inside a row. The first four of every eight columns come first, then the second four: a warp then
    // reads and writes whole lines.
    __device__ __forceinline__ static int column_offset(int column) { return (column & 4) * (HEADDIM_V / 8) + column / 8 * 4; }
    // Softmax states of a slot at one level of the tree.
    __device__ __forceinline__ static float2* states_at(float* partials, int level, long long slot) {
        const long long slots = 2ll * gridDim.x;
        return reinterpret_cast<float2*>(output_at(partials, slots)) + (level * slots + slot) * BLOCK_ROWS;
    }
    __device__ __forceinline__ long long slot_of(int i) const { return slot(first + i * distance, first_block); }

    __device__ __forceinline__ RowState state_of(int i, int row) const {
        const float2 x = __ldcg(states_at(partials, level, slot_of(i)) + row);
        return {x.x, x.y};
    }
    __device__ __forceinline__ float4 load(int i, int row, int column) const {
        return __ldcg(reinterpret_cast<const float4*>(output_at(partials, slot_of(i)) + row * HEADDIM_V + column_offset(column)));
    }
};

// Combines `count` partials for rows [0, rows) and all columns. Calls write(row, column, state, output) for every eight
// columns.
template <class Partials, class Write>
__device__ __forceinline__ void combine_partials(const DecodeParams& p, const Partials& partials, int count, int rows,
                                                 Write write) {
    const int chunks = p.problem.headdim_v / kColumns;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * kColumns;
        SoftmaxRow joint;  // begins as the state of a row without keys
#pragma unroll 1
        for (int partial = 0; partial < count; partial++)
            joint.row_max = fmaxf(joint.row_max, partials.state_of(partial, row).row_max);
        float x[kColumns] = {};
#pragma unroll 1
        for (int partial = 0; partial < count; partial++) {
            const RowState state = partials.state_of(partial, row);
            if (state.sum == 0.f) continue;  // saw no key; its output may be unwritten
            const float factor = exp2_approx(state.row_max - joint.row_max);
            joint.sum += factor * state.sum;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 y = partials.load(partial, row, column + 4 * half);
                x[4 * half] += factor * y.x;
                x[4 * half + 1] += factor * y.y;
                x[4 * half + 2] += factor * y.z;
                x[4 * half + 3] += factor * y.w;
            }
        }
        write(row, column, RowState{joint.row_max, joint.sum}, x);
    }
}

// Writes a finished row tile: normalized output in its dtype, and softmax_lse. Joins the attention sink, if there is one. Without
// LseHasSink softmax_lse is that of the keys alone.
template <bool LseHasSink>
struct WriteOutputAs {
    const DecodeParams& p;
    const WorkTile& s;
    int first;  // row of the tile that row 0 is

    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
        const Problem& problem = p.problem;
        row += first;
        const int group = problem.nheads / problem.nheads_k;
        const int query = (s.row + row) / group, head = s.head_k * group + (s.row + row) % group;
        const float sum_of_keys = state.sum, max_of_keys = state.row_max;
        const float factor = add_sink(p.score_options, head, state.row_max, state.sum);
        const SoftmaxResult result(state.row_max, s.valid ? state.sum : quiet_nan());
        const float scale = result.output_scale * factor;
        unsigned words[kColumns / 2];
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) {
            const float lo = x[2 * i] * scale, hi = x[2 * i + 1] * scale;
            words[i] = pack2(lo, hi, kBf16);
        }
        unsigned short* out =
            p.out.ptr + s.batch * p.out.batch_stride + (s.q_offset + query) * p.out.row_stride + head * p.out.head_stride + column;
        *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
        if (column == 0) {
            const long long lse_row = CacheSeqlenInfo::lse_row(problem, p.lengths, s.q_offset, s.batch, head);
            p.softmax_lse[lse_row + query] =
                LseHasSink ? result.lse : SoftmaxResult(max_of_keys, s.valid ? sum_of_keys : quiet_nan()).lse;
        }
    }
};
using WriteOutput = WriteOutputAs<true>;

// Writes a combined partial to a slot of global memory.
struct WritePartial {
    float* output;
    float2* states;

    // `first`: row of the tile that row 0 is.
    __device__ __forceinline__ WritePartial(float* partials, int level, long long slot, int first)
        : output(GlobalPartials::output_at(partials, slot) + first * HEADDIM_V),
          states(GlobalPartials::states_at(partials, level, slot) + first) {}
    __device__ __forceinline__ static void store(float* to, const float* x) {
        store_global4(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) store(output + row * HEADDIM_V + GlobalPartials::column_offset(column + i), x + i);
        if (column == 0) states[row] = make_float2(state.row_max, state.sum);
    }
};

// Partials that one block combines. With more blocks in a row tile the combination is a tree: blocks in groups of kRadix, then
// the groups, each by its last block. Small where partials are large, so that no block reads for long.
constexpr int kRadix = BLOCK_ROWS * HEADDIM_V <= 2048 ? 16 : BLOCK_ROWS * HEADDIM_V <= 8192 ? 8 : 4;

// Combines the partials of a row tile's blocks. Each block calls it after it has written its own partial. The last block of a
// group combines the group, and goes on a level up. The last of all writes the output. `is_last` is in shared memory.
template <class Write>
__device__ __forceinline__ void combine_blocks(const DecodeParams& p, const WorkTile& s, bool& is_last) {
    int distance = 1;  // between the blocks whose slots hold this level's partials
    int node = blockIdx.x - s.first_block, nodes = s.blocks;
    for (int level = 0;; level++) {
        const int group = node / kRadix, count = min(nodes - group * kRadix, kRadix);
        const int first = s.first_block + group * kRadix * distance;
        const long long slot = GlobalPartials::slot(first, s.first_block);
        __threadfence();  // this thread's partial is visible before the semaphore counts it
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = arrive_is_last(p.semaphores + level * 2ll * gridDim.x + slot, p.launch_id, count);
            __threadfence();  // other blocks' partials are read after the count
        }
        __syncthreads();
        if (!is_last) return;
        const GlobalPartials partials = {p.partials, level, s.first_block, first, distance};
        if (nodes <= kRadix) {
            combine_partials(p, partials, count, s.rows, Write{p, s, 0});
            return;
        }
        combine_partials(p, partials, count, s.rows, WritePartial(p.partials, level + 1, slot, 0));
        node = group;
        nodes = (nodes + kRadix - 1) / kRadix;
        distance *= kRadix;
    }
}

// Writes NaN to rows of packed q that belong to no sequence. If all cu_seqlens_q are valid, only rows after the last sequence
// are.
__device__ __forceinline__ void fill_unowned_rows(const DecodeParams& p, bool all_have_queries) {
    const Problem& problem = p.problem;
    const int end = all_have_queries ? load_length(p.lengths.cu_seqlens_q + problem.batch) : 0;
    const int chunks = problem.headdim_v / kColumns;
    for (int row = end + blockIdx.x; row < p.lengths.total_q; row += gridDim.x) {
        bool is_some = false;
        for (int batch = threadIdx.x; batch < problem.batch && !all_have_queries; batch += THREADS) {
            const CacheSeqlenInfo sequence(problem, p.lengths, p.cache, batch);
            is_some |= row >= sequence.q_offset() && row < sequence.q_offset() + sequence.seqlen_q();
        }
        if (__syncthreads_or(is_some)) continue;
        for (int i = threadIdx.x; i < problem.nheads * chunks; i += THREADS) {
            const int head = i / chunks, column = i % chunks * kColumns;
            const unsigned nan = 0x7fff7fff;  // two of fp16, and of bf16
            unsigned short* out = p.out.ptr + row * p.out.row_stride + head * p.out.head_stride + column;
            *reinterpret_cast<uint4*>(out) = make_uint4(nan, nan, nan, nan);
            if (column == 0) p.softmax_lse[static_cast<long long>(head) * p.lengths.total_q + row] = quiet_nan();
        }
    }
}

}  // namespace decode
