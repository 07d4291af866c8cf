// Which rows of the other kind a block meets on its walk: queries where it owns keys, keys where it owns queries.
#pragma once

#include "backward/memory.cuh"
#include "mask.cuh"
#include "seqlen_info.cuh"

// Which query rows a block of Keys keys meets in steps of Step, and for which of them it needs the mask.
template <int Keys, int Step>
struct QueryRange {
    int end;  // behind the last row that sees one of the keys
    UnmaskedRows<Step> unmasked;

    // all_rows: whether the walk has rows that see none of the keys too.
    __device__ __forceinline__ QueryRange(const Mask& mask, int first_key, bool all_rows = false)
        : end(keep_in_register(all_rows ? mask.seqlen_q : end_of_seen(mask, first_key))),
          unmasked(mask, first_key, min(Keys, mask.seqlen_k - first_key)) {
        unmasked.first = keep_in_register(unmasked.first);
        unmasked.span = keep_in_register(unmasked.span);
    }
    static __device__ __forceinline__ int end_of_seen(const Mask& mask, int first_key) {
        return kVarlen && first_key >= mask.seqlen_k ? 0 : mask.row_end(first_key, Keys);
    }
    // First row of the first step: once a head, so it is not kept.
    static __device__ __forceinline__ int first(const Mask& mask) { return first(mask, remat_block_index()); }
    // ... of a block of keys that is not its blockIdx.x.
    static __device__ __forceinline__ int first(const Mask& mask, int block) { return mask.row_first(block * Keys) / Step * Step; }
    // Rows of Q and dO, for loads. Ragged kernels have no register for seqlen_q: rows behind `end`, which the mask hides,
    // may as well not exist.
    __device__ __forceinline__ int rows(const BwdParams& p) const { return kVarlen ? end : p.problem.seqlen_q; }
    // The next step, or, behind the last, one whose statistics may be loaded.
    __device__ __forceinline__ int next_step(const BwdParams& p, int row) const {
        return min(row + Step, kVarlen ? (end - 1) & -Step : p.seqlen_q_rounded - Step);
    }
};

// Which keys a block of Rows query rows meets in steps of Step, and for which of them it needs the mask.
template <int Rows, int Step>
struct KeyRange {
    UnmaskedKeys<Step> unmasked;
    int first, end;  // of the first step, and behind the last key that one of the rows sees

    __device__ __forceinline__ KeyRange(const Mask& mask, int first_row)
        : unmasked(mask, first_row, Rows), first(mask.key_first(first_row) / Step * Step), end(mask.key_end(first_row, Rows)) {}
};
