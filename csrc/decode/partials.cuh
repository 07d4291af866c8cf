// What becomes of a row set's rows: a block's warps find out about parts of its keys, and parts are merged, in a fixed order.
//
// A part is, for each row, what softmax.cuh's SoftmaxRow has (reference and sum) and the accumulated output that belongs to it.
#pragma once

#include "semaphore.cuh"
#include "decode/tile_scheduler.cuh"
#include "forward/output.cuh"

namespace decode {

constexpr int kColumns = 8;  // that a thread takes at a time
// Rows of parts in shared memory: four floats more than columns, so that rows begin in different banks.
constexpr int kPartialStride = HEADDIM_V + 4;

struct RowState {
    float row_max, sum;
};

// Parts in shared memory, one for each group of warps that shares tokens.
template <int Partials, int Rows>
struct SharedPartials {
    float* output;  // [Parts][Rows][kPartStride]: of so many rows at a time
    RowState* state;  // [Parts][BLOCK_ROWS]

    // Where outputs begin with row `first`.
    __device__ __forceinline__ SharedPartials from(int first) const { return {output, state + first}; }

    __device__ __forceinline__ RowState state_of(int partial, int row) const { return state[partial * BLOCK_ROWS + row]; }
    __device__ __forceinline__ float4 load(int partial, int row, int column) const {
        return *reinterpret_cast<const float4*>(output + (partial * Rows + row) * kPartialStride + column);
    }
};

// Parts in global memory: what other blocks wrote, so past the first cache. All outputs, then the states, which each level of the
// merge has for itself: outputs are merged in place, since whoever writes an element is the one that has read it, but all read
// states.
struct GlobalPartials {
    float* partials;
    int level, first_block, first, distance;  // part i is of the block first + i * distance

    // A block has two places: for a row set that began before it, and for one that begins in it.
    __device__ __forceinline__ static long long slot(int block, int first_block) { return 2ll * block + (block == first_block); }
    __device__ __forceinline__ static float* output_at(float* partials, long long slot) {
        return partials + slot * (BLOCK_ROWS * HEADDIM_V);
    }
    // Where four columns of a row are: of eight the first, then the others of all eights, so that a warp writes and reads lines.
    __device__ __forceinline__ static int column_offset(int column) { return (column & 4) * (HEADDIM_V / 8) + column / 8 * 4; }
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

// Merges parts of all rows and columns that there are. write(row, column, state, output) is told eight columns at a time.
template <class Partials, class Write>
__device__ __forceinline__ void combine_partials(const DecodeParams& p, const Partials& partials, int count, int rows,
                                                 Write write) {
    const int chunks = p.problem.headdim_v / kColumns;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * kColumns;
        SoftmaxRow joint;  // the reference of no keys at all
#pragma unroll 1
        for (int partial = 0; partial < count; partial++)
            joint.row_max = fmaxf(joint.row_max, partials.state_of(partial, row).row_max);
        float x[kColumns] = {};
#pragma unroll 1
        for (int partial = 0; partial < count; partial++) {
            const RowState state = partials.state_of(partial, row);
            if (state.sum == 0.f) continue;  // no key, and perhaps nothing written
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

// A finished row set: outputs in their type, and lse.
struct WriteOutput {
    const DecodeParams& p;
    const WorkTile& s;
    int first;  // row of the set that rows are counted from

    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
        const Problem& problem = p.problem;
        row += first;
        const int group = problem.nheads / problem.nheads_k;
        const int query = (s.row + row) / group, head = s.head_k * group + (s.row + row) % group;
        const float factor = add_sink(p.score_options, head, state.row_max, state.sum);
        const SoftmaxResult result(state.row_max, s.valid ? state.sum : quiet_nan());
        const float scale = result.output_scale * factor;
        unsigned words[kColumns / 2];
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) {
            const float lo = x[2 * i] * scale, hi = x[2 * i + 1] * scale;
            words[i] = kBf16 ? to_bf16x2(lo, hi) : to_half2(lo, hi);
        }
        unsigned short* out =
            p.out.ptr + s.batch * p.out.batch_stride + (s.q_offset + query) * p.out.row_stride + head * p.out.head_stride + column;
        *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
        if (column == 0) {
            const long long lse_row = CacheSeqlenInfo::lse_row(problem, p.lengths, s.q_offset, s.batch, head);
            p.softmax_lse[lse_row + query] = result.lse;
        }
    }
};

// A part for others to merge.
struct WritePartial {
    float* output;
    float2* states;

    // `first`: row of the set that rows are counted from
    __device__ __forceinline__ WritePartial(float* partials, int level, long long slot, int first)
        : output(GlobalPartials::output_at(partials, slot) + first * HEADDIM_V),
          states(GlobalPartials::states_at(partials, level, slot) + first) {}
    // (the compiler takes a float4 apart where other values have the registers)
    __device__ __forceinline__ static void store(float* to, const float* x) {
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
    }
    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
#pragma unroll
        for (int i = 0; i < kColumns; i += 4) store(output + row * HEADDIM_V + GlobalPartials::column_offset(column + i), x + i);
        if (column == 0) states[row] = make_float2(state.row_max, state.sum);
    }
};

// How many parts one block merges. A row set of many is merged by a tree: its blocks in groups of so many, then the groups, each by
// the block that comes last. Few where parts are large, so that no block has long to read.
constexpr int kRadix = BLOCK_ROWS * HEADDIM_V <= 2048 ? 16 : BLOCK_ROWS * HEADDIM_V <= 8192 ? 8 : 4;

// Called by a block that has written its part of a row set. Where it is the last of its group, it merges that, and so on; what is
// left in the end is written as output. `is_last` is in shared memory.
__device__ __forceinline__ void combine_blocks(const DecodeParams& p, const WorkTile& s, bool& is_last) {
    int distance = 1;  // between the blocks whose places have what is to be merged
    int node = blockIdx.x - s.first_block, nodes = s.blocks;
    for (int level = 0;; level++) {
        const int group = node / kRadix, count = min(nodes - group * kRadix, kRadix);
        const int first = s.first_block + group * kRadix * distance;
        const long long slot = GlobalPartials::slot(first, s.first_block);
        __threadfence();  // what this thread has written comes before the arrival
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = arrive_is_last(p.semaphores + level * 2ll * gridDim.x + slot, p.launch_id, count);
            __threadfence();  // ... and that before what others have written is read
        }
        __syncthreads();
        if (!is_last) return;
        const GlobalPartials partials = {p.partials, level, s.first_block, first, distance};
        if (nodes <= kRadix) {
            combine_partials(p, partials, count, s.rows, WriteOutput{p, s, 0});
            return;
        }
        combine_partials(p, partials, count, s.rows, WritePartial(p.partials, level + 1, slot, 0));
        node = group;
        nodes = (nodes + kRadix - 1) / kRadix;
        distance *= kRadix;
    }
}

// Rows of packed q that no sequence has are nobody's to compute, and NaN. Where every sequence's are possible, they lie behind the
// last.
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
            const unsigned nan = 0x7fff7fff;
            unsigned short* out = p.out.ptr + row * p.out.row_stride + head * p.out.head_stride + column;
            *reinterpret_cast<uint4*>(out) = make_uint4(nan, nan, nan, nan);
            if (column == 0) p.softmax_lse[static_cast<long long>(head) * p.lengths.total_q + row] = quiet_nan();
        }
    }
}

}  // namespace decode
