// Loop bounds of the backward kernels under causal and window masks (mask.cuh). QueryRange: the query rows that a block of keys
// visits (main kernels). KeyRange: the keys that a block of queries visits (dq kernels). Both also tell which steps need no
// mask.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"
#include "seqlen_info.cuh"

// Query rows that a block of Keys keys visits in steps of Step.
template <int Keys, int Step>
struct QueryRange {
    int end;  // after the last row that sees one of the keys
    // steps that need no mask
    UnmaskedRows<Step> unmasked;

    // all_rows: moves `end` to the last row, for the fused kernels (DqMode::kStore). They store dq of all rows, so they also visit
    // rows that see no key: they begin at row 0 instead of first().
    __device__ __forceinline__ QueryRange(const Mask& mask, int first_key, bool all_rows = false)
        : end(keep_in_register(all_rows ? mask.seqlen_q : end_of_seen(mask, first_key))),
          unmasked(mask, first_key, min(Keys, mask.seqlen_k - first_key)) {
        unmasked.first = keep_in_register(unmasked.first);
        unmasked.span = keep_in_register(unmasked.span);
    }
    // Returns the end of the rows that see one of the keys. In varlen kernels a block can begin past the sequence's last key: 0.
    // Other kernels have no such block.
    static __device__ __forceinline__ int end_of_seen(const Mask& mask, int first_key) {
        return kVarlen && first_key >= mask.seqlen_k ? 0 : mask.row_end(first_key, Keys);
    }
    // Returns the first row of the first step. Computed once per head, so it is not kept.
    static __device__ __forceinline__ int first(const Mask& mask) { return first(mask, remat_block_x()); }
    // The same for a block of keys whose number is not blockIdx.x.
    static __device__ __forceinline__ int first(const Mask& mask, int block) { return mask.row_first(block * Keys) / Step * Step; }
    // Returns how many rows of Q and dO loads may touch. Varlen kernels have no register for seqlen_q, so they count rows from
    // `end` on as absent: the mask hides these.
    __device__ __forceinline__ int rows(const BwdParams& p) const { return kVarlen ? end : p.problem.seqlen_q; }
    // Returns the next step, or, after the last, one whose statistics may be loaded.
    __device__ __forceinline__ int next_step(const BwdParams& p, int row) const {
        // (end - 1) & -Step: the first row of the last step
        return min(row + Step, kVarlen ? (end - 1) & -Step : p.seqlen_q_rounded - Step);
    }
};

// Keys that a block of Rows query rows visits in steps of Step.
template <int Rows, int Step>
struct KeyRange {
    UnmaskedKeys<Step> unmasked;
    int first, end;  // first key of the first step; after the last key that one of the rows sees

    __device__ __forceinline__ KeyRange(const Mask& mask, int first_row)
        : unmasked(mask, first_row, Rows), first(mask.key_first(first_row) / Step * Step), end(mask.key_end(first_row, Rows)) {}
};
