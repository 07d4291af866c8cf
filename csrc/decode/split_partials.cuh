// Joins the partial results of batch-invariant calls (a row's bits depend on no other row or sequence), in the order of their
// tokens. Used by block.cuh. A row tile is up to BLOCK_ROWS (query, head) pairs of one KV head. A split is kSplitTokens of the
// tokens that it sees.
//
// RowPart::join joins two partials wherever that happens, so a row has the same bits whether one block computed all of its splits
// or each split had a block of its own. Splits that the row does not see change nothing.
//
// The kernel's row in src/kernels gives BLOCK_ROWS, THREADS (of a block) and HEADDIM_V (columns of the kernel, at least the
// problem's headdim_v; a slot has room for all).
#pragma once

#include "decode/partials.cuh"
#include "decode/split_scheduler.cuh"

namespace decode {

// A part of a partial: softmax state of one row (row_max in log2 units), and its unnormalized outputs in kColumns (eight) columns.
struct RowPart {
    RowState state;
    float x[kColumns];

    // Adds the part of later tokens. Explicit operations, because the same products must fuse wherever this is inlined.
    __device__ __forceinline__ void join(const RowPart& later) {
        if (later.state.sum == 0.f) return;  // saw no key
        if (state.sum == 0.f) {
            *this = later;
            return;
        }
        const float joint = fmaxf(state.row_max, later.state.row_max);
        const float own = exp2_approx(state.row_max - joint), other = exp2_approx(later.state.row_max - joint);
        state = {joint, __fmaf_rn(later.state.sum, other, __fmul_rn(state.sum, own))};
#pragma unroll
        for (int i = 0; i < kColumns; i++) x[i] = __fmaf_rn(later.x[i], other, __fmul_rn(x[i], own));
    }
};

// Parts in global memory. A slot, the place of one partial, has parts of all rows that a sequence can have in a tile. A part is
// three float4. The first ones of all parts lie together, then the second, then the third, so a warp accesses whole lines.
struct SplitSlots {
    static constexpr int kChunks = 3;  // float4 of a part: eight outputs, then the state
    float* partials;
    int parts;  // of a slot

    __device__ __forceinline__ explicit SplitSlots(const DecodeParams& p)
        : partials(p.partials),
          parts(min(p.problem.seqlen_q * (p.problem.nheads / p.problem.nheads_k), BLOCK_ROWS) * (HEADDIM_V / kColumns)) {}
    __device__ __forceinline__ float4* at(long long slot, int row, int column) const {
        return reinterpret_cast<float4*>(partials) + slot * kChunks * parts + row * (HEADDIM_V / kColumns) + column / kColumns;
    }
    __device__ __forceinline__ RowPart load(long long slot, int row, int column) const {
        const float4* from = at(slot, row, column);
        const float4 lo = __ldcg(from), hi = __ldcg(from + parts), state = __ldcg(from + 2 * parts);
        return {{state.x, state.y}, {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    }
    __device__ __forceinline__ void store(long long slot, int row, int column, const RowPart& part) const {
        float4* to = at(slot, row, column);
        __stcg(to, make_float4(part.x[0], part.x[1], part.x[2], part.x[3]));
        __stcg(to + parts, make_float4(part.x[4], part.x[5], part.x[6], part.x[7]));
        __stcg(to + 2 * parts, make_float4(part.state.row_max, part.state.sum, 0.f, 0.f));
    }
};

// Takes a split's result for eight columns of a row (a `write` of combine_partials). Writes the output if it is the row tile's only
// split, or the last of a block that takes all, one after the other (`whole`). Until then, that block keeps the joint result in its
// one slot, which serves all of its splits. Other blocks store each split's partial in a slot of its own, for the last to arrive.
// In SplitTile `first_block` is the split's number among `blocks` splits.
struct WriteSplit {
    const DecodeParams& p;
    const SplitTile& s;
    int first;  // the tile's number of the row that the caller calls row 0

    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
        const SplitSlots slots(p);
        RowPart part = {state, {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]}};
        const bool is_last = s.first_block == s.blocks - 1;
        if (s.whole && s.first_block > 0) {
            RowPart before = slots.load(s.slot, first + row, column);
            before.join(part);
            part = before;
        }
        if (s.blocks == 1 || (s.whole && is_last))
            WriteOutput{p, s, first}(row, column, part.state, part.x);
        else
            slots.store(s.slot, first + row, column, part);
    }
};

// Called by each block after it has stored a split's partial. The last to arrive joins all splits of the row tile and writes the
// output. A semaphore holds the launch's id too, so each launch counts from 0 (semaphore.cuh).
__device__ __forceinline__ void join_splits(const DecodeParams& p, const SplitTile& s) {
    const long long begin = s.slot - s.first_block;  // slot of the row tile's first split
    __threadfence();  // this thread's partial is visible before the semaphore counts it
    if (!is_last_block(p.semaphores + begin, p.launch_id, s.blocks)) return;
    const SplitSlots slots(p);
    const int chunks = p.problem.headdim_v / kColumns;  // parts of a row, of eight columns each
    constexpr int kAhead = 8;  // parts that a thread loads at once
#pragma unroll 1
    for (int i = threadIdx.x; i < s.rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * kColumns;
        RowPart joint = slots.load(begin, row, column);
#pragma unroll 1
        for (int split = 1; split < s.blocks; split += kAhead) {
            RowPart parts[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; j++) parts[j] = slots.load(begin + min(split + j, s.blocks - 1), row, column);
#pragma unroll
            for (int j = 0; j < kAhead; j++)
                if (split + j < s.blocks) joint.join(parts[j]);
        }
        WriteOutput{p, s, 0}(row, column, joint.state, joint.x);
    }
}

}  // namespace decode
