// Loop bounds of the backward kernels under causal and window masks (mask.cuh). QueryRange: the query rows that a block of keys
// visits, in main kernels, which compute dK and dV. KeyRange: the keys that a block of queries visits, in dq kernels and in dQ of
// stored_gradients.cuh. Both also tell which steps need no mask. A step is the Step rows or keys that a kernel computes at once.
//
// Registers are scarce: remat_* reads a special register again where it is needed, and keep_in_register keeps the compiler from
// computing a bound again in every step. kVarlen kernels (features.cuh) read each sequence's lengths from memory.
#pragma once

#include "mask.cuh"  // Mask: row_first(), row_end(): rows that see any of some keys; key_first(), key_end(): keys that rows see
#include "ptx.cuh"
#include "seqlen_info.cuh"  // kVarlen; BwdParams (src/params)

// Query rows that a block of Keys keys visits in steps of Step.
template <int Keys, int Step>
struct QueryRange {
    int end;  // one past the last row that sees one of the keys
    // mask.cuh: steps that begin at rows unmasked.first to unmasked.first + unmasked.span (inclusive) need no mask
    UnmaskedRows<Step> unmasked;

    // all_rows: sets `end` to the sequence's rows, for the fused kernels (DqMode::kStore), one launch for dq, dk and dv. They store
    // dq of all rows, so they also visit rows that see no key. Their loop begins at row 0 instead of first().
    __device__ __forceinline__ QueryRange(const Mask& mask, int first_key, bool all_rows = false)
        : end(keep_in_register(all_rows ? mask.seqlen_q : end_of_seen(mask, first_key))),
          unmasked(mask, first_key, min(Keys, mask.seqlen_k - first_key)) {
        unmasked.first = keep_in_register(unmasked.first);
        unmasked.span = keep_in_register(unmasked.span);
    }
    // Returns `end`; 0 for a block that begins past the sequence's last key, which only varlen grids have.
    static __device__ __forceinline__ int end_of_seen(const Mask& mask, int first_key) {
        return kVarlen && first_key >= mask.seqlen_k ? 0 : mask.row_end(first_key, Keys);
    }
    // Returns the first row of the first step, a multiple of Step, for block of keys number blockIdx.x.
    static __device__ __forceinline__ int first(const Mask& mask) { return first(mask, remat_block_x()); }
    // The same for block of keys number `block`.
    static __device__ __forceinline__ int first(const Mask& mask, int block) { return mask.row_first(block * Keys) / Step * Step; }
    // Returns the number of rows of Q and dO that loads may read. Varlen kernels, which lack a register for seqlen_q, take `end`:
    // rows from there on, which see none of the keys, count as missing.
    __device__ __forceinline__ int rows(const BwdParams& p) const { return kVarlen ? end : p.problem.seqlen_q; }
    // Returns the first row of the step after `row`. After the last step it returns one whose row statistics (lse and delta) may
    // still be loaded ahead: these exist for seqlen_q_rounded rows.
    __device__ __forceinline__ int next_step(const BwdParams& p, int row) const {
        // (end - 1) & -Step: the first row of the last step. A block without steps (end = 0) does not call this.
        return min(row + Step, kVarlen ? (end - 1) & -Step : p.seqlen_q_rounded - Step);
    }
};

// Keys that a block of Rows query rows visits in steps of Step.
template <int Rows, int Step>
struct KeyRange {
    UnmaskedKeys<Step> unmasked;  // steps that begin at keys unmasked.first to unmasked.first + span (inclusive) need no mask
    int first, end;  // first key of the first step, a multiple of Step; one past the last key that one of the rows sees

    __device__ __forceinline__ KeyRange(const Mask& mask, int first_row)
        : unmasked(mask, first_row, Rows), first(mask.key_first(first_row) / Step * Step), end(mask.key_end(first_row, Rows)) {}
};
