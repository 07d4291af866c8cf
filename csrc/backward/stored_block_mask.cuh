// Block-sparse masks in the kernel that stores P and dS of fp32 tensors: ListedScores is its template argument Blocks
// (store_scores.cuh). A list (block_lists.cuh) names the blocks of 64 keys that 128 queries see, partial ones first. A partial
// block has a tile of bits, 1 where the score exists. A thread block has the 128 queries of one list, and a warp one block of keys.
#pragma once

#include "backward/store_scores.cuh"  // the kernel; AllScores there has this interface without a mask; kStoredRows: 128
#include "block_lists.cuh"  // BlockLists, HeadLists: lists in memory; ListPart (kEntries etc.): places in one; bits_of(): a word

// What the list says of a thread block's tile, 128 queries by 128 keys.
class ListedScores {
    const BlockLists& lists_;
    enum { kAbsent, kPartial, kFull } kind_ = kAbsent;  // of the warp's block; kAbsent: not in the list, all hidden
    int bit_tile_ = -1;  // number of its tile of bits, if it is partial
    static_assert(kStoredRows == kListedRows && kStoredRows == 2 * kListedColumns, "a tile is two blocks of one list");

    // Returns which of the list's `entries` entries names this block of keys, -1 if none does. 32 lanes compare at a time.
    static __device__ __forceinline__ int number_of(const int* list, int entries, int block) {
        const int lane = threadIdx.x % 32;
        for (int first = 0; first < entries; first += 32) {
            int entry = -1;
            load_int_if(first + lane < entries, entry, list + kEntries + first + lane);
            const unsigned found = __ballot_sync(~0u, entry == block);
            if (found) return first + __ffs(found) - 1;
        }
        return -1;
    }

public:
    static constexpr bool kListed = true;
    __device__ __forceinline__ explicit ListedScores(const BlockLists& lists) : lists_(lists) {}

    // Looks up the tile's two blocks of keys in the list of its rows, and returns whether either is there: else the thread block
    // has nothing to do. `row` and `key`: first of the tile. `warp_key`: the warp's first key in the tile, 0 or 64. Lists count
    // batch entries over all launches of the call (first_batch).
    __device__ __forceinline__ bool find(const BwdParams& p, int head, int row, int key, int warp_key) {
        const int* list = HeadLists(lists_, p.lengths.first_batch + blockIdx.z, head).of(lists_, row / kListedRows);
        // clamped to the entries that a list has: counts come from GPU memory, unvalidated
        const int partial = clamped_partial(lists_, __ldg(list + kPartialBlocks));
        const int entries = partial + clamped_full(lists_, __ldg(list + kFullBlocks), partial);
        const int own = number_of(list, entries, (key + warp_key) / kListedColumns);
        kind_ = kAbsent;
        if (own >= 0) kind_ = own < partial ? kPartial : kFull;
        bit_tile_ = __ldg(list + kFirstTile) + own;  // only partial blocks, which come first, have one
        const int other_key = key + kListedColumns - warp_key;  // of the tile's other block
        return own >= 0 || number_of(list, entries, other_key / kListedColumns) >= 0;
    }
    // Whether none of the warp's scores exist.
    __device__ __forceinline__ bool is_absent() const { return kind_ == kAbsent; }
    // Sets hidden scores to -inf, in the warp's tile (m, n) of keys and queries. `row`: the warp's first. Missing bits count as 0.
    template <class Layout>
    __device__ __forceinline__ void hide(typename Layout::Tile& x, int row, int m, int n) const {
        if (kind_ == kFull) return;
        const typename Layout::Lane lane(threadIdx.x % 32);
        const bool has_bits = kind_ == kPartial && static_cast<unsigned>(bit_tile_) < static_cast<unsigned>(lists_.tiles);
        const int list_row = row % kListedRows + Layout::kTileQueries * n + Layout::first_query(lane);
        const int column = Layout::kTileKeys * m + Layout::first_key(lane);
#pragma unroll
        for (int r = 0; r < Layout::kRows; r++) {
            int word = 0;
            load_int_if(has_bits, word, bits_of(lists_, bit_tile_, list_row + Layout::row_slot(r), column));
            const unsigned bits = static_cast<unsigned>(word) >> column % 32;
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++)
                if (Layout::row_of(v) == r && !(bits >> Layout::key_slot(v) & 1)) x[v] = negative_infinity();
        }
    }
};
