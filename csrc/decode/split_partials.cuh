// Joins the partial results of batch-invariant calls (a row's bits depend on no other row or sequence), in the order of their
// tokens. Used by block.cuh. A row tile is up to BLOCK_ROWS (query, head) pairs of one KV head. A split is kSplitTokens of the
// tokens that a row tile sees.
//
// RowPart::join joins two partials wherever that happens, so a row has the same bits whether one block computed all of its splits
// or each split had a block of its own. Splits that the row does not see change nothing.
//
// The kernel's row in src/kernels gives BLOCK_ROWS, THREADS (of a block) and HEADDIM_V (columns of the kernel, at least the
// problem's headdim_v; a slot has room for all).
#pragma once

#include "decode/partials.cuh"  // RowState: a row's row_max and sum; kColumns; WriteOutput
#include "decode/split_scheduler.cuh"  // SplitTile: a split of a row tile, as work of a block

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

// Partials in global memory. A slot, the place of one partial, has all rows that a sequence can have in a tile, one after the
// other: of a row first the first four of every eight columns, then the second four, so a warp accesses whole lines. After the rows
// come two states of each. The first alone is used, except in a slot that serves all splits of a row tile, one after the other.
// There splits with an even number write the first state, and the others the second (`odd`). Each reads the state that the split
// before has written: all threads of a row read it, while one already writes the new one.
struct SplitSlots {
    float4* base;
    int rows;  // of a slot

    // make_opaque (ptx.cuh): else the compiler keeps this number in a register throughout, and kernels that use all would spill.
    __device__ __forceinline__ explicit SplitSlots(const DecodeParams& p)
        : base(reinterpret_cast<float4*>(p.partials)),
          rows(min(p.problem.seqlen_q * (p.problem.nheads / p.problem.nheads_k), BLOCK_ROWS)) {
        make_opaque(rows);
    }
    static constexpr int kHalf = HEADDIM_V / kColumns;  // float4 of a row's first fours, and of its second
    // Size of a slot in float4 (src/plan/decode.rs plans as many).
    __device__ __forceinline__ int size() const { return rows * (2 * kHalf + 1); }

    // Addresses of eight output columns of a row, and of the row's two states.
    struct Place {
        float4* output;
        float2* states;

        // Returns the same place in a slot `distance` float4 further.
        __device__ __forceinline__ Place further(int distance) const { return {output + distance, states + 2 * distance}; }
        __device__ __forceinline__ RowPart load(bool odd) const {
            const float4 lo = __ldcg(output), hi = __ldcg(output + kHalf);
            const float2 state = __ldcg(states + odd);
            return {{state.x, state.y}, {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
        }
        __device__ __forceinline__ void store(bool odd, bool has_state, const RowPart& part) const {
            __stcg(output, make_float4(part.x[0], part.x[1], part.x[2], part.x[3]));
            __stcg(output + kHalf, make_float4(part.x[4], part.x[5], part.x[6], part.x[7]));
            if (has_state) __stcg(states + odd, make_float2(part.state.row_max, part.state.sum));
        }
    };
    __device__ __forceinline__ Place at(long long slot, int row, int column) const {
        float4* first = base + slot * size();
        return {first + row * (2 * kHalf) + column / kColumns, reinterpret_cast<float2*>(first + rows * (2 * kHalf) + row)};
    }
};

// Takes a split's result for eight columns of a row (a `write` of combine_partials). Writes the output if it is the row tile's only
// split, or the last of a block that takes all, one after the other (`whole`). Until then, that block keeps the joint result in its
// one slot, which serves all of its splits. Other blocks store each split's partial in a slot of its own, for the last to arrive.
// SplitTile is a WorkTile, as WriteOutput takes: there `first_block` is the split's number among `blocks` splits.
struct WriteSplit {
    const DecodeParams& p;
    const SplitTile& s;
    int first;  // the tile's number of the row that the caller calls row 0

    __device__ __forceinline__ void operator()(int row, int column, RowState state, const float (&x)[kColumns]) const {
        RowPart part = {state, {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]}};
        const SplitSlots::Place place = SplitSlots(p).at(s.slot, first + row, column);
        const bool is_last = s.first_block == s.blocks - 1, odd = s.whole && s.first_block % 2;
        if (s.whole && s.first_block > 0) {
            RowPart before = place.load(!odd);
            before.join(part);
            part = before;
        }
        if (s.blocks == 1 || (s.whole && is_last))
            WriteOutput{p, s, first}(row, column, part.state, part.x);
        else
            place.store(odd, column == 0, part);
    }
};

// Called by each block after it has stored a split's partial. The last to arrive joins all splits of the row tile and writes the
// output. A semaphore holds the launch's id too, so each launch counts from 0 (semaphore.cuh).
__device__ __forceinline__ void join_splits(const DecodeParams& p, const SplitTile& s) {
    const long long begin = s.slot - s.first_block;  // slot of the row tile's first split
    __threadfence();  // this thread's partial is visible before the semaphore counts it
    if (!is_last_block(p.semaphores + begin, p.launch_id, s.blocks)) return;
    const SplitSlots slots(p);
    constexpr int kChunks = HEADDIM_V / kColumns, kAhead = 8;  // parts of a row; parts that a thread loads at once
#pragma unroll 1
    for (int i = remat_thread_index(); i < s.rows * kChunks; i += THREADS) {  // remat_: threadIdx read again, to hold no register
        const int row = i / kChunks, column = i % kChunks * kColumns;
        if (column >= p.problem.headdim_v) continue;
        SplitSlots::Place place = slots.at(begin, row, column);
        const SoftmaxRow none;
        RowPart joint = {{none.row_max, none.sum}, {}};  // of a row that sees no key
#pragma unroll 1
        for (int left = s.blocks; left > 0; left -= kAhead) {
            RowPart parts[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; j++) parts[j] = place.further(min(j, left - 1) * slots.size()).load(false);
#pragma unroll
            for (int j = 0; j < kAhead; j++)
                if (j < left) joint.join(parts[j]);
            place = place.further(kAhead * slots.size());
        }
        WriteOutput{p, s, 0}(row, column, joint.state, joint.x);
    }
}

}  // namespace decode
