// P and dS in scratch memory, between the two main kernels of the backward pass for large headdims. The scores kernel stores
// them for some KV heads and some keys, the gradients kernel multiplies them. The library launches both for the next heads or
// keys, so P and dS take at most 128 MiB (of fp32 tensors 257 to 1,028), or what one key tile takes (src/plan/backward/tiles.rs).
//
// Both are transposed fp16 matrices in tiles of 128 keys by 128 queries. A tile is contiguous, and its rows are keys. The order of
// tiles is (batch, query heads of the launch, query tiles, key tiles of the launch). Packed sequences share one batch entry: a
// sequence begins at its q_offset / 128, plus one tile for each sequence before it.
//
// With Split (fp32 tensors in full precision, forward/split.cuh) a number is the sum of two fp16 numbers. A tile has the high
// parts, then the low ones, then the units of dS (store_scores.cuh), fp32, number 2 * (key / 64) + query / 64. Beside a block mask
// a unit of kAbsentUnit says that none of these scores exist. If this holds for all units of a tile, the rest of it is undefined.
#pragma once

#include "seqlen_info.cuh"
#include "volta_fa_params.h"

constexpr int kStoredRows = 128;  // keys, and queries, of a tile
constexpr int kStoredElements = kStoredRows * kStoredRows;
// From one tile to the next. Whole rows, as src/ops/stored_scores.rs allocates them.
template <bool Split>
constexpr int kStoredTile = Split ? 2 * kStoredElements + kStoredRows : kStoredElements;
constexpr int kStoredUnits = 2 * kStoredElements;  // where the units of a tile of dS are, fp16 elements
constexpr float kAbsentUnit = 0.f;  // no unit: units are at least 2^-67

// Returns the number of a head's first query tile. `head`: query head, counted from the launch's first.
__device__ __forceinline__ long long first_stored_tile(const BwdParams& p, const StoredScores& stored,
                                                       const BlockSeqlenInfo& sequence, int batch, int head) {
    if (kVarlen && p.lengths.cu_seqlens_q)
        return static_cast<long long>(head) * stored.query_tiles + sequence.q_offset() / kStoredRows + batch;
    const int heads = stored.heads * (p.problem.nheads / p.problem.nheads_k);
    return (static_cast<long long>(batch) * heads + head) * stored.query_tiles;
}
// Returns the offset of a tile in p and ds, elements. `query_tile`: counted as first_stored_tile. `key_tile`: counted from the
// launch's first.
template <bool Split>
__device__ __forceinline__ long long stored_tile(const StoredScores& stored, long long query_tile, int key_tile) {
    return (query_tile * stored.key_tiles + key_tile) * kStoredTile<Split>;
}
