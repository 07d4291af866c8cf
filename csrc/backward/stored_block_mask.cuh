// Block-sparse masks in the kernel that stores P and dS of fp32 tensors (store_scores.cuh, block_lists.cuh). The 128 queries of a
// tile are the rows of a list, and a warp's 64 keys are a block of its columns.
#pragma once

#include "backward/store_scores.cuh"
#include "block_lists.cuh"

// The blocks of a list that a tile has.
class ListedScores {
    const BlockLists& lists_;
    enum { kAbsent, kPartial, kFull } kind_ = kAbsent;  // of the warp's block
    int tile_ = -1;  // of bits, if the block is partial
    static_assert(kStoredRows == kListedRows && kStoredRows == 2 * kListedColumns, "a tile is two blocks of one list");

    // Returns the number of the list's entry for a block of columns, -1 if it has none.
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

    // Finds the blocks of a tile in the list of its rows, and returns whether one is there. `row` and `key`: first of the tile.
    // `warp_key`: the warp's first key in the tile.
    __device__ __forceinline__ bool find(const BwdParams& p, int head, int row, int key, int warp_key) {
        const int* list = HeadLists(lists_, p.lengths.first_batch + blockIdx.z, head).of(lists_, row / kListedRows);
        const int partial = clamped_partial(lists_, __ldg(list + kPartialBlocks));
        const int entries = partial + clamped_full(lists_, __ldg(list + kFullBlocks), partial);
        const int own = number_of(list, entries, (key + warp_key) / kListedColumns);
        if (own >= 0) kind_ = own < partial ? kPartial : kFull;
        tile_ = __ldg(list + kFirstTile) + own;
        const int other_key = key + kListedColumns - warp_key;
        return own >= 0 || number_of(list, entries, other_key / kListedColumns) >= 0;
    }
    // Whether none of the warp's scores exist.
    __device__ __forceinline__ bool is_absent() const { return kind_ == kAbsent; }
    // Hides the scores of tile (m, n) of the warp's that do not exist. `row`: the warp's first.
    template <class Layout>
    __device__ __forceinline__ void hide(typename Layout::Tile& x, int row, int m, int n) const {
        if (kind_ == kFull) return;
        const typename Layout::Lane lane(threadIdx.x % 32);
        const bool has_bits = kind_ == kPartial && static_cast<unsigned>(tile_) < static_cast<unsigned>(lists_.tiles);
        const int list_row = row % kListedRows + Layout::kTileQueries * n + Layout::first_query(lane);
        const int column = Layout::kTileKeys * m + Layout::first_key(lane);
#pragma unroll
        for (int r = 0; r < Layout::kRows; r++) {
            int word = 0;
            load_int_if(has_bits, word, bits_of(lists_, tile_, list_row + Layout::row_slot(r), column));
            const unsigned bits = static_cast<unsigned>(word) >> column % 32;
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++)
                if (Layout::row_of(v) == r && !(bits >> Layout::key_slot(v) & 1)) x[v] = negative_infinity();
        }
    }
};
