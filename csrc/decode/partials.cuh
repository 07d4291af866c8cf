// Combines partial results of decode row tiles (split-KV, as FlashDecoding), in a fixed order, so the output is deterministic. Used
// by block.cuh, split_partials.cuh. A row tile is up to BLOCK_ROWS query rows, (query, head) pairs of a sequence and one KV head.
//
// A partial has, for each row, the softmax state (row_max and sum of SoftmaxRow, softmax.cuh) and the unnormalized output over some
// of its tokens. The token groups of a block, warps with different tokens, leave partials in shared memory (SharedPartials). A
// block that shares its row tile with others writes the combined result to global memory (GlobalPartials). The last block to arrive
// combines these and writes the output. No block waits for another: a semaphore tells the last one (semaphore.cuh).
//
// The kernel's row in src/kernels gives BLOCK_ROWS, THREADS (of a block) and HEADDIM_V.
#pragma once

#include "semaphore.cuh"
#include "decode/tile_scheduler.cuh"
#include "forward/output.cuh"

namespace decode {

constexpr int kColumns = 8;  // output columns that a thread combines at a time
// Floats between output rows in shared memory: four more than columns, so that rows begin in different banks.
constexpr int kPartialStride = HEADDIM_V + 4;

// Softmax state of one row: its lazy maximum (log2 units) and the sum of its probabilities, as in SoftmaxRow.
struct RowState {
    float row_max, sum;
};

// Partials in shared memory, one for each token group: the states of all rows, and the outputs of Rows rows. If shared memory lacks
// room for all outputs, Rows is less than BLOCK_ROWS, and outputs come in several parts.
template <int Partials, int Rows>
struct SharedPartials {
    static constexpr int kLoadsAtOnce = 1;  // shared memory answers fast
    float* output;  // [Partials][Rows][kPartialStride]
    RowState* state;  // [Partials][BLOCK_ROWS]

    // Returns the partials of the part whose outputs begin with row `first`.
    __device__ __forceinline__ SharedPartials from(int first) const { return {output, state + first}; }

    __device__ __forceinline__ RowState state_of(int partial, int row) const { return state[partial * BLOCK_ROWS + row]; }
    __device__ __forceinline__ float4 load(int partial, int row, int column) const {
        return *reinterpret_cast<const float4*>(output + (partial * Rows + row) * kPartialStride + column);
    }
};

// Partials in global memory, read with ld.cg because other blocks wrote them and L1 is not coherent.
//
// The buffer has all outputs, then all states. Outputs are combined in place: only the thread that writes an element reads it.
// All threads read states, so each level of the combination (combine_blocks) has its own. A slot is the place of one partial.
struct GlobalPartials {
    static constexpr int kLoadsAtOnce = 4;  // L2 answers after some 200 cycles
    float* partials;
    RowState* states;  // [count][BLOCK_ROWS] in shared memory: load_states() copies them
    int level, first_block, first, distance;  // partial i is in the slot of block first + i * distance

    // A block has two slots: one for a row tile that begins in an earlier block (first_block), one for one that begins in it.
    __device__ __forceinline__ static long long slot(int block, int first_block) { return 2ll * block + (block == first_block); }
    __device__ __forceinline__ static float* output_at(float* partials, long long slot) {
        return partials + slot * (BLOCK_ROWS * HEADDIM_V);
    }
    // Offset of four columns inside a row. The first four of every eight precede all second fours, so warps access whole lines.
    __device__ __forceinline__ static int column_offset(int column) { return (column & 4) * (HEADDIM_V / 8) + column / 8 * 4; }
    // Softmax states of a slot at one level of the tree.
    __device__ __forceinline__ static float2* states_at(float* partials, int level, long long slot) {
        const long long slots = 2ll * gridDim.x;
        return reinterpret_cast<float2*>(output_at(partials, slots)) + (level * slots + slot) * BLOCK_ROWS;
    }
    __device__ __forceinline__ long long slot_of(int i) const { return slot(first + i * distance, first_block); }

    // Copies the states of `count` partials, because each thread of a row reads them. All threads of the block call it.
    __device__ __forceinline__ void load_states(int count, int rows) const {
        for (int i = remat_thread_index(); i < count * BLOCK_ROWS; i += THREADS) {
            const int partial = i / BLOCK_ROWS, row = i % BLOCK_ROWS;
            if (row >= rows) continue;
            const float2 x = __ldcg(states_at(partials, level, slot_of(partial)) + row);
            states[i] = {x.x, x.y};
        }
        __syncthreads();
    }
    __device__ __forceinline__ RowState state_of(int i, int row) const { return states[i * BLOCK_ROWS + row]; }
    __device__ __forceinline__ float4 load(int i, int row, int column) const {
        return __ldcg(reinterpret_cast<const float4*>(output_at(partials, slot_of(i)) + row * HEADDIM_V + column_offset(column)));
    }
};

// Combines `count` partials for rows [0, rows) and all columns. Calls write(row, column, state, output) for every kColumns columns
// of each row. All threads of the block share the work. A thread loads kLoadsAtOnce partials before it waits for the first. It
// reads its index again: what follows from that would else be computed before the loop over work tiles, and spill there.
template <class Partials, class Write>
__device__ __forceinline__ void combine_partials(const DecodeParams& p, const Partials& partials, int count, int rows,
                                                 Write write) {
    constexpr int kAtOnce = Partials::kLoadsAtOnce;
    const int chunks = p.problem.headdim_v / kColumns;
#pragma unroll 1
    for (int i = remat_thread_index(); i < rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * kColumns;
        SoftmaxRow joint;  // begins as the state of a row without keys
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
            float row_max[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) row_max[j] = partials.state_of(min(first + j, count - 1), row).row_max;
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) joint.row_max = fmaxf(joint.row_max, row_max[j]);
        }
        float x[kColumns] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += kAtOnce) {
            RowState states[kAtOnce];
            float4 outputs[kAtOnce][2];
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                const int partial = min(first + j, count - 1);
                states[j] = partials.state_of(partial, row);
                for (int half = 0; half < 2; half++) outputs[j][half] = partials.load(partial, row, column + 4 * half);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                // past the end (the last one again), or the row saw no key there: its output may be unwritten
                if (first + j >= count || states[j].sum == 0.f) continue;
                const float factor = exp2_approx(states[j].row_max - joint.row_max);
                joint.sum += factor * states[j].sum;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float4 y = outputs[j][half];
                    x[4 * half] += factor * y.x;
                    x[4 * half + 1] += factor * y.y;
                    x[4 * half + 2] += factor * y.z;
                    x[4 * half + 3] += factor * y.w;
                }
            }
        }
        write(row, column, RowState{joint.row_max, joint.sum}, x);
    }
}

// A `write` of combine_partials for a finished row tile: normalized output in its dtype, and softmax_lse. Adds the attention sink,
// if there is one. Without LseHasSink (sparse MLA) softmax_lse is that of the keys alone.
template <bool LseHasSink>
struct WriteOutputAs {
    const DecodeParams& p;
    const WorkTile& s;
    int first;  // number in the tile of the caller's row 0

    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
        const Problem& problem = p.problem;
        row += first;
        const int group = problem.nheads / problem.nheads_k;
        const int query = (s.row + row) / group, head = s.head_k * group + (s.row + row) % group;
        const float sum_of_keys = state.sum, max_of_keys = state.row_max;
        const float factor = add_sink(p.score_options, head, state.row_max, state.sum);
        // valid is false for invalid lengths: a sum of NaN makes output and lse NaN
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

// A `write` of combine_partials for a row tile that other blocks share: stores the combined partial to a slot of global memory.
struct WritePartial {
    float* output;
    float2* states;

    // `first`: number in the tile of the caller's row 0.
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

// Maximum partials that one block combines. With more blocks in a row tile the combination is a tree: blocks in groups of kRadix,
// then the groups, each by its last block to arrive. Small where a partial has many floats: one SM reads them at its share of L2's
// bandwidth, while the groups of a level share the SMs.
constexpr int kRadix = BLOCK_ROWS * HEADDIM_V <= 2048 ? 8 : 4;

// Combines the partials of a row tile's blocks. Each block calls it after it has written its own partial. The last block of a group
// to arrive combines the group, and goes on a level up. The last of all writes the output. `states`: kRadix * BLOCK_ROWS of them,
// in shared memory that the block needs no more.
template <class Write>
__device__ __forceinline__ void combine_blocks(const DecodeParams& p, const WorkTile& s, RowState* states) {
    // s.blocks blocks, from s.first_block on, share the row tile
    int distance = 1;  // between the blocks whose slots hold this level's partials
    int node = blockIdx.x - s.first_block, nodes = s.blocks;  // this block's partial on the level; partials of the level
    for (int level = 0;; level++) {
        const int group = node / kRadix, count = min(nodes - group * kRadix, kRadix);
        const int first = s.first_block + group * kRadix * distance;
        const long long slot = GlobalPartials::slot(first, s.first_block);
        __threadfence();  // this thread's partial is visible before the semaphore counts it
        if (!is_last_block(p.semaphores + level * 2ll * gridDim.x + slot, p.launch_id, count)) return;
        const GlobalPartials partials = {p.partials, states, level, s.first_block, first, distance};
        partials.load_states(count, s.rows);
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

// Writes NaN to the output and lse of rows of packed q that belong to no sequence. If cu_seqlens_q is valid for all sequences
// (all_have_queries), these are the rows after the last sequence.
__device__ __forceinline__ void fill_unowned_rows(const DecodeParams& p, bool all_have_queries) {
    const Problem& problem = p.problem;
    const int end = all_have_queries ? load_length(p.lengths.cu_seqlens_q + problem.batch) : 0;
    const int chunks = problem.headdim_v / kColumns;
    for (int row = end + blockIdx.x; row < p.lengths.total_q; row += gridDim.x) {
        bool is_some = false;  // whether a sequence of this thread has the row
        for (int batch = threadIdx.x; batch < problem.batch && !all_have_queries; batch += THREADS) {
            const CacheSeqlenInfo sequence(problem, p.lengths, p.cache, batch);
            is_some |= row >= sequence.q_offset() && row < sequence.q_offset() + sequence.seqlen_q();
        }
        if (__syncthreads_or(is_some)) continue;
        for (int i = threadIdx.x; i < problem.nheads * chunks; i += THREADS) {
            const int head = i / chunks, column = i % chunks * kColumns;
            const unsigned nan = 0x7fff7fff;  // two NaN, as fp16 and as bf16
            unsigned short* out = p.out.ptr + row * p.out.row_stride + head * p.out.head_stride + column;
            *reinterpret_cast<uint4*>(out) = make_uint4(nan, nan, nan, nan);
            if (column == 0) p.softmax_lse[static_cast<long long>(head) * p.lengths.total_q + row] = quiet_nan();
        }
    }
}

}  // namespace decode
