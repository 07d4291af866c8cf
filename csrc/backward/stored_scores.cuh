// P and dS in scratch memory, between the two main kernels of the backward pass for large headdims and for fp32 tensors. The scores
// kernel (store_scores.cuh) stores them for some KV heads and some keys, the gradients kernel (stored_gradients.cuh) multiplies
// them. Then the library launches both for the next heads or keys, so that P and dS take at most 128 MiB, or what one tile of keys
// takes if that is more. Of fp32 tensors they take 257 MiB, or up to four times that where launches would not fill the GPU
// (src/plan/backward/plan.rs).
//
// Both are transposed fp16 matrices in tiles of 128 keys by 128 queries. A tile is contiguous, and its rows are keys. The order of
// tiles is (batch, query heads of the launch, query tiles, key tiles of the launch). Packed sequences share one batch entry. There
// a sequence's first query tile is q_offset / 128 (q_offset: its first row of q) plus one for each sequence before it, because
// each may end in a tile that is not full.
//
// With Split (fp32 tensors in full precision) a number is the sum of two fp16 numbers. A tile has the high parts, then the low
// ones, then the four units of dS, fp32: unit 2 * (key / 64) + query / 64 is the power of two by which those 64 keys by 64 queries
// are divided. With a block mask, kAbsentUnit says that none of these scores exist; if all four say so, the rest is undefined.
#pragma once

#include "seqlen_info.cuh"  // BlockSeqlenInfo: lengths of a sequence; kVarlen: read from GPU memory
#include "volta_fa_params.h"  // generated from src/params: BwdParams, StoredScores (a launch's part of P and dS)

constexpr int kStoredRows = 128;  // keys, and queries, of a tile
constexpr int kStoredElements = kStoredRows * kStoredRows;
// fp16 elements from one tile to the next. The units take one row, because src/ops/device.rs allocates whole rows.
template <bool Split>
constexpr int kStoredTile = Split ? 2 * kStoredElements + kStoredRows : kStoredElements;
constexpr int kStoredUnits = 2 * kStoredElements;  // where the units begin in a tile of dS, fp16 elements
constexpr float kAbsentUnit = 0.f;  // no unit: these are 2^-67 to 2^73, so that they and their inverses are normal fp32 numbers

// Returns the number of a sequence's first query tile for one head. `head`: query head, counted from the launch's first.
__device__ __forceinline__ long long first_stored_tile(const BwdParams& p, const StoredScores& stored,
                                                       const BlockSeqlenInfo& sequence, int batch, int head) {
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * stored.query_tiles + sequence.q_offset() / kStoredRows + batch;
    const int heads = stored.heads * (p.problem.nheads / p.problem.nheads_k);  // of q; stored.heads are KV heads of the launch
    return (static_cast<long long>(batch) * heads + head) * stored.query_tiles;
}
// Returns the offset of a tile in StoredScores::p and ds, elements. `query_tile`: first_stored_tile() plus the tile's number in the
// sequence. `key_tile`: counted from the launch's first.
template <bool Split>
__device__ __forceinline__ long long stored_tile(const StoredScores& stored, long long query_tile, int key_tile) {
    return (query_tile * stored.key_tiles + key_tile) * kStoredTile<Split>;
}
