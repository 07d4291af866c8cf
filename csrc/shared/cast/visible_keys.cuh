// Tests whether any query sees a key, under causal and window masks, block lists and a bias. Used by the cast kernel (cast.cuh),
// which makes fp16 of bf16 or fp32. It chooses powers of two for keys and values by the largest magnitudes that a query sees.
#pragma once

#include "block_lists.cuh"  // HeadLists: lists in memory; clamped_...(): counts; a listed block: 128 queries by 64 keys
#include "half.cuh"  // to_float2(): packed fp16 to fp32
#include "seqlen_info.cuh"  // Mask: row_first(key), row_end(key, keys): queries that see keys; SeqlenInfo; CastParams

namespace cast {

// A bias of at most this value hides a key, as -inf does: in fp32, bias + score is the bias, unless the score is as large.
constexpr float kHidingBias = -1e30f;

// The keys that the query heads [head, end_head) of one sequence see.
class VisibleKeys {
    static constexpr int kRowLanes = 8;  // lanes that share a key: each tests every eighth query

    const CastParams& p_;
    Mask mask_;
    int batch_, head_, end_head_, lane_;

    __device__ __forceinline__ float bias(int head, int row, int key) const {
        const ScoreOptions& o = p_.score_options;
        const long long at = batch_ * o.bias_batch_stride + head * o.bias_head_stride + row * o.bias_row_stride + key;
        if (o.bias_is_fp32) return __ldg(reinterpret_cast<const float*>(o.bias) + at);
        return to_float2(__ldg(o.bias + at)).x;
    }
    // Results of find_tile() but bit tiles: the block is not in the list (hidden), or full (hidden by other masks alone).
    enum NoTile : int { kAbsent = -2, kFull = -1 };
    // Returns the number of the bit tile (a bit for each score of a partial block) of row block `row_block` and the column block
    // that holds `key`. A list has the two counts, its first tile's number, then its partial blocks and its full ones
    // (block_lists.cuh). Lists are of the whole call, so the batch index counts from the call's first entry.
    __device__ __forceinline__ int find_tile(int head, int row_block, int key) const {
        if (!p_.blocks.lists) return kFull;
        const int* list = HeadLists(p_.blocks, p_.lengths.first_batch + batch_, head).of(p_.blocks, row_block);
        const int partial = clamped_partial(p_.blocks, __ldg(list + kPartialBlocks));
        const int all = partial + clamped_full(p_.blocks, __ldg(list + kFullBlocks), partial);
        for (int i = 0; i < all; i++) {
            if (__ldg(list + kEntries + i) == key / kListedColumns) return i < partial ? __ldg(list + kFirstTile) + i : kFull;
        }
        return kAbsent;
    }
    // Returns whether the block mask lets query `row` see `key`. Tiles outside the tensor of bits have zeros.
    __device__ __forceinline__ bool has_bit(int tile, int row, int key) const {
        if (tile == kFull) return true;
        if (static_cast<unsigned>(tile) >= static_cast<unsigned>(p_.blocks.tiles)) return false;
        return __ldg(bits_of(p_.blocks, tile, row % kListedRows, key % kListedColumns)) >> (key % 32) & 1;
    }

public:
    __device__ __forceinline__ VisibleKeys(const CastParams& p, const SeqlenInfo<true>& sequence, int batch, int head, int end_head)
        : p_(p), mask_(p.problem, sequence.seqlen_q(), sequence.seqlen_k()), batch_(batch), head_(head), end_head_(end_head),
          lane_(threadIdx.x % kRowLanes) {}

    // Returns whether any query sees `key`; false, without a test, unless `exists`. A warp calls it together, with one key for each
    // kRowLanes (8) lanes. Tests the eight queries up to the key's position first, where most masks let one see it, then all, eight
    // at a time, from the last down.
    __device__ __forceinline__ bool contains(int key, bool exists) const {
        const ScoreOptions& o = p_.score_options;
        const bool has_lists = p_.blocks.lists;
        const int last = mask_.row_end(key, 1) - 1;
        // Queries that may see the key. Without lists, and without a bias of each query (stride not 0), the last one decides:
        // causal mask and window let it see the key if any does. Without a bias of each head, one head decides for all.
        const int first = has_lists || (o.bias && o.bias_row_stride) ? mask_.row_first(key) : max(mask_.row_first(key), last);
        const int end_head = has_lists || (o.bias && o.bias_head_stride) ? end_head_ : head_ + 1;
        const int position = min(key - (mask_.seqlen_k - mask_.seqlen_q), last);  // query at the key's position: the ends align
        bool found = false;
        for (int head = head_; head < end_head; head++) {
            int row_block = -1, tile = kFull;  // of the lane's latest query
            int row = position - lane_, next = last - lane_;
            do {
                bool sees = exists && !found && row >= first && row <= last;
                if (sees && row / kListedRows != row_block) {
                    row_block = row / kListedRows;
                    tile = find_tile(head, row_block, key);
                }
                sees = sees && tile != kAbsent && has_bit(tile, row, key) && !(o.bias && bias(head, row, key) <= kHidingBias);
                const unsigned key_lanes = ((1u << kRowLanes) - 1) << (threadIdx.x % 32 / kRowLanes * kRowLanes);
                const unsigned votes = __ballot_sync(~0u, sees);  // by all lanes, also those that have found one
                found = found || (votes & key_lanes);
                row = next;
                next -= kRowLanes;
            } while (__any_sync(~0u, exists && !found && row + lane_ >= first));  // row + lane_: the latest of the eight
        }
        return found;
    }
};

}  // namespace cast
