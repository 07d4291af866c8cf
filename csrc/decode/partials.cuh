// Combines partial results of decode row tiles (split-KV, as FlashDecoding), in a fixed order, so the output is deterministic. Used
// by block.cuh and split_partials.cuh. A row tile is up to BLOCK_ROWS query rows, (query, head) pairs of a sequence that read one
// KV head.
//
// A partial has, for each row, the softmax state (row_max and sum of SoftmaxRow, softmax.cuh) and the unnormalized output over some
// of its tokens. The token groups of a block, warps with different tokens, leave partials in shared memory (SharedPartials). A
// block that shares its row tile with others writes the combined result to global memory (GlobalPartials). The last block to arrive
// combines these and writes the output. No block waits for another: a semaphore tells the last one (semaphore.cuh).
//
// The kernel's row in src/kernels gives BLOCK_ROWS, THREADS (of a block) and HEADDIM_V.
#pragma once

#include "semaphore.cuh"  // is_last_block(): true in the last of the blocks that this launch (launch_id) counts at a semaphore
#include "decode/tile_scheduler.cuh"  // WorkTile: rows from packed row `row` on; quotient(): n / divisor by a multiplication
#include "forward/output.cuh"  // add_sink(): changes max and sum; SoftmaxResult: lse, factor of the output (undoes kPackedOne)

namespace decode {

constexpr int kColumns = 8;  // output columns that a thread combines at a time
// Floats between output rows in shared memory: four more than columns, so that rows begin in different banks.
constexpr int kPartialStride = HEADDIM_V + 4;

// Softmax state of one row: row_max, subtracted from its scores (log2 units), and the sum of its probabilities. row_max is lazy:
// some scores may exceed it, by at most kRescaleThreshold (softmax.cuh). A sum of 0: the row saw no key.
struct RowState {
    float row_max, sum;
};

// How a row's partials are combined: a factor for the output of each, and the joint softmax state. Lies in shared memory at `at`,
// in place of the states of Most (maximum number of) partials, [Most][BLOCK_ROWS], so that columns are combined without a look at
// the states.
template <int Most>
struct RowWeights {
    static constexpr float kUnseen = -1.f;  // instead of a factor: the row saw no key there, and its output may be unwritten
    RowState* at;

    // Sets a row's weights. state_of(i) returns the state of partial i, which may lie in its place at `at`: all are read first.
    // Factor i takes the place of row_max i, the joint state those of sums 0 and 1, so Most is at least 2.
    template <class StateOf>
    __device__ __forceinline__ void set(int count, int row, StateOf state_of) const {
        RowState states[Most];
#pragma unroll
        for (int i = 0; i < Most; i++) states[i] = state_of(min(i, count - 1));
        SoftmaxRow joint;  // begins as the state of a row without keys
#pragma unroll
        for (int i = 0; i < Most; i++) joint.row_max = fmaxf(joint.row_max, states[i].row_max);
#pragma unroll
        for (int i = 0; i < Most; i++) {
            const bool seen = i < count && states[i].sum != 0.f;
            const float factor = exp2_approx(states[i].row_max - joint.row_max);
            if (seen) joint.sum += factor * states[i].sum;
            at[i * BLOCK_ROWS + row].row_max = seen ? factor : kUnseen;
        }
        at[row].sum = joint.sum;
        at[BLOCK_ROWS + row].sum = joint.row_max;
    }
    __device__ __forceinline__ float factor(int i, int row) const { return at[i * BLOCK_ROWS + row].row_max; }
    __device__ __forceinline__ RowState joint(int row) const { return {at[BLOCK_ROWS + row].sum, at[row].sum}; }
};
// The only partial keeps its state.
template <>
struct RowWeights<1> {
    static constexpr float kUnseen = -1.f;
    RowState* at;

    __device__ __forceinline__ float factor(int, int row) const { return at[row].sum != 0.f ? 1.f : kUnseen; }
    __device__ __forceinline__ RowState joint(int row) const { return at[row]; }
};

// Partials in shared memory, one for each token group: the states of all rows, and the outputs of Rows rows. If shared memory lacks
// room for all outputs, Rows is less than BLOCK_ROWS, and outputs come in several parts.
template <int Partials, int Rows>
struct SharedPartials {
    static constexpr int kMost = Partials, kLoadsAtOnce = 1;  // shared memory answers fast
    float* output;  // [Partials][Rows][kPartialStride]
    RowState* state;  // [Partials][BLOCK_ROWS]

    // Returns the partials of the part whose outputs begin with row `first`.
    __device__ __forceinline__ SharedPartials from(int first) const { return {output, state + first}; }

    // Replaces states by weights. All threads of the block call it.
    __device__ __forceinline__ RowWeights<Partials> weights(int count, int rows) const {
        const RowWeights<Partials> found = {state};
        if constexpr (Partials > 1) {
            const int row = remat_thread_index();
            if (row < rows) found.set(count, row, [&](int i) { return state[i * BLOCK_ROWS + row]; });
            __syncthreads();
        }
        return found;
    }
    // Returns where eight columns of a row, from `column` on, lie in partial 0. load() reads those of a partial.
    __device__ __forceinline__ const float* place(int row, int column) const { return output + row * kPartialStride + column; }
    __device__ __forceinline__ void load(int partial, const float* place, float4 (&x)[2]) const {
        for (int half = 0; half < 2; half++)
            x[half] = *reinterpret_cast<const float4*>(place + partial * Rows * kPartialStride + 4 * half);
    }
};

// Maximum partials that one block combines. With more blocks in a row tile the combination is a tree: blocks in groups of kRadix,
// then the groups, each by its last block to arrive. Small where a partial has many floats: the block that combines a group reads
// them at one SM's share of L2's bandwidth, while the groups of a level are read by several SMs.
constexpr int kRadix = BLOCK_ROWS * HEADDIM_V <= 2048 ? 8 : 4;

// Partials in global memory, read with ld.cg because other blocks wrote them and L1 is not coherent.
//
// The buffer has all outputs, then all states. Outputs are combined in place: only the thread that writes an element reads it.
// Each level of the combination (combine_blocks) has states of its own. A slot is the place of one partial.
struct GlobalPartials {
    static constexpr int kMost = kRadix, kLoadsAtOnce = kRadix;  // L2 answers after some 200 cycles
    float* partials;
    RowState* shared;  // memory for weights
    int level, first_block, first, distance;  // partial i is in the slot of block first + i * distance

    // A block has two slots: one for a row tile that begins in an earlier block (first_block), one for one that begins in it.
    __device__ __forceinline__ static int slot(int block, int first_block) { return 2 * block + (block == first_block); }
    __device__ __forceinline__ static float* output_at(float* partials, int slot) {
        return partials + slot * static_cast<long long>(BLOCK_ROWS * HEADDIM_V);
    }
    // Offset of eight columns inside a row: of their first four. The second four follow kHalf later, so warps access whole lines.
    static constexpr int kHalf = HEADDIM_V / 2;
    __device__ __forceinline__ static int offset(int row, int column) { return row * HEADDIM_V + column / 2; }
    // Softmax states of a slot at one level of the tree.
    __device__ __forceinline__ static float2* states_at(float* partials, int level, int slot) {
        const int slots = 2 * gridDim.x;
        return reinterpret_cast<float2*>(output_at(partials, slots)) + (level * slots + slot) * static_cast<long long>(BLOCK_ROWS);
    }
    __device__ __forceinline__ int partial_slot(int i) const { return slot(first + i * distance, first_block); }

    // Loads the states of `count` partials and returns their weights. All threads of the block call it.
    __device__ __forceinline__ RowWeights<kMost> weights(int count, int rows) const {
        const RowWeights<kMost> found = {shared};
        const int row = remat_thread_index();
        if (row < rows)
            found.set(count, row, [&](int i) {
                const float2 x = __ldcg(states_at(partials, level, partial_slot(i)) + row);
                return RowState{x.x, x.y};
            });
        __syncthreads();
        return found;
    }
    __device__ __forceinline__ const float* place(int row, int column) const { return partials + offset(row, column); }
    __device__ __forceinline__ void load(int i, const float* place, float4 (&x)[2]) const {
        const float* from = place + partial_slot(i) * static_cast<long long>(BLOCK_ROWS * HEADDIM_V);
        for (int half = 0; half < 2; half++) x[half] = __ldcg(reinterpret_cast<const float4*>(from + half * kHalf));
    }
};

// Combines `count` partials for rows [0, rows) and all columns. Calls write(row, column, state, output) for every kColumns columns
// of each row. All threads of the block share the work. A thread loads kLoadsAtOnce partials before it waits for the first. It
// reads its index again: what follows from that would else be computed before the loop over work tiles, and spill there.
template <class Partials, class Write>
__device__ __forceinline__ void combine_partials(const DecodeParams& p, const Partials& partials, int count, int rows,
                                                 Write write) {
    constexpr int kAtOnce = Partials::kLoadsAtOnce, kChunks = HEADDIM_V / kColumns;
    const auto weights = partials.weights(count, rows);
#pragma unroll 1
    for (int i = remat_thread_index(); i < rows * kChunks; i += THREADS) {  // rows may be below 1: then there is none
        const int row = static_cast<unsigned>(i) / kChunks, column = static_cast<unsigned>(i) % kChunks * kColumns;
        if (column >= p.problem.headdim_v) continue;
        const float* place = partials.place(row, column);
        float x[kColumns] = {};
#pragma unroll
        for (int first = 0; first < Partials::kMost; first += kAtOnce) {
            float factors[kAtOnce];
            float4 outputs[kAtOnce][2];
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                factors[j] = weights.factor(first + j, row);
                outputs[j][0] = outputs[j][1] = make_float4(0.f, 0.f, 0.f, 0.f);
                if (!(factors[j] < 0.f)) partials.load(first + j, place, outputs[j]);  // else x gets -1 * 0, which changes nothing
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float4 y = outputs[j][half];
                    x[4 * half] += factors[j] * y.x;
                    x[4 * half + 1] += factors[j] * y.y;
                    x[4 * half + 2] += factors[j] * y.z;
                    x[4 * half + 3] += factors[j] * y.w;
                }
        }
        write(row, column, weights.joint(row), x);
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
        const int group = p.group.divisor, packed = s.row + row;  // group: query heads of the KV head, not a group of blocks
        // Batch-invariant kernels divide: those of MLA's latents have no registers for quotient() here, and would spill.
        const int query = kBatchInvariant ? packed / group : quotient(packed, p.group);
        const int head = s.head_k * group + packed - query * group;
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
    __device__ __forceinline__ WritePartial(float* partials, int level, int slot, int first)
        : output(GlobalPartials::output_at(partials, slot) + first * HEADDIM_V),
          states(GlobalPartials::states_at(partials, level, slot) + first) {}
    __device__ __forceinline__ static void store(float* to, const float* x) {
        store_global4(to, make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            store(output + GlobalPartials::offset(row, column) + half * GlobalPartials::kHalf, x + 4 * half);
        if (column == 0) states[row] = make_float2(state.row_max, state.sum);
    }
};

// Combines the partials of a row tile's blocks. Each block calls it after it has written its own partial. The last block of a group
// to arrive combines the group, and goes on a level up. The last of all writes the output. `shared`: kRadix * BLOCK_ROWS of them,
// in memory that the block needs no more.
template <class Write>
__device__ __forceinline__ void combine_blocks(const DecodeParams& p, const WorkTile& s, RowState* shared) {
    // s.blocks blocks, from s.first_block on, share the row tile
    int distance = 1;  // between the blocks whose slots hold this level's partials
    int node = blockIdx.x - s.first_block, nodes = s.blocks;  // this block's partial on the level; partials of the level
    for (int level = 0;; level++) {
        const int group = node / kRadix, count = min(nodes - group * kRadix, kRadix);
        const int first = s.first_block + group * kRadix * distance;
        const int slot = GlobalPartials::slot(first, s.first_block);
        __threadfence();  // this thread's partial is visible before the semaphore counts it
        if (!is_last_block(p.semaphores + level * 2ll * gridDim.x + slot, p.launch_id, count)) return;
        const GlobalPartials partials = {p.partials, shared, level, s.first_block, first, distance};
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
// (cu_seqlens_q_valid), these are the rows after the last sequence. Else each block searches all sequences for each of its rows.
__device__ __forceinline__ void fill_unowned_rows(const DecodeParams& p, bool cu_seqlens_q_valid) {
    const Problem& problem = p.problem;
    const int end = cu_seqlens_q_valid ? load_length(p.lengths.cu_seqlens_q + problem.batch) : 0;
    const int chunks = problem.headdim_v / kColumns;
    for (int row = end + blockIdx.x; row < p.lengths.total_q; row += gridDim.x) {
        bool is_owned = false;  // whether one of this thread's sequences has the row
        for (int batch = threadIdx.x; batch < problem.batch && !cu_seqlens_q_valid; batch += THREADS) {
            const CacheSeqlenInfo sequence(problem, p.lengths, p.cache, batch);
            is_owned |= row >= sequence.q_offset() && row < sequence.q_offset() + sequence.seqlen_q();
        }
        if (__syncthreads_or(is_owned)) continue;
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
