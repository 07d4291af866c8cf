// Block-sparse masks in the backward kernels (block_lists.cuh). The dkdv kernels walk transposed lists: rows are keys, columns
// queries, and each query head of the group has its own list. The dq kernels walk the lists of the forward pass.
#pragma once

#include "backward/score_coord.cuh"
#include "block_lists.cuh"
#include "remat.cuh"

// Bits of a warp's Rows rows (of the product, and of the list) in a step of at most 32 columns. A lane holds those of one row, bit
// 0 for the first column.
template <class Layout, int Rows>
class ScoreBits {
    static_assert(Rows <= 32, "a word a lane");
    unsigned word_;
    bool any_;

public:
    // Loads the bits of a step. `row`: first of the warp's scores, counted as the list's rows are. `column`: first in the step.
    // Steps from column `columns` on do not exist: all of their scores are hidden.
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks& blocks, const Steps& steps, int row, int column, int columns) {
        any_ = steps.has_bits() || steps.first() >= columns;
        word_ = 0;
        if (!steps.has_bits()) return;
        const BlockLists& lists = blocks.lists();
        const int position = steps.position_after(0) + column, tile = steps.first_tile() + position / kListedColumns;
        const int list_row = row % kListedRows + remat_thread_index() % Rows;
        const unsigned* from =
            lists.bits + static_cast<long long>(tile) * kTileWords + list_row * 2 + position % kListedColumns / 32;
        int word = 0;
        load_int_if(static_cast<unsigned>(tile) < static_cast<unsigned>(lists.tiles), word, reinterpret_cast<const int*>(from));
        word_ = static_cast<unsigned>(word) >> position % 32;
    }
    // Whether the step has scores to hide. Uniform in a warp.
    __device__ __forceinline__ bool any() const { return any_; }
    // Hides the scores without a bit of tile (m, n) of the warp's. All lanes of the warp call it together.
    __device__ __forceinline__ void hide(typename Layout::Tile& s, int m, int n) const {
        constexpr bool kKeyRows = Layout::kKeyRows;
        const typename Layout::Lane lane(remat_thread_index() & 31);
        const int row = (kKeyRows ? Layout::kTileKeys : Layout::kTileQueries) * m +
                        (kKeyRows ? Layout::first_key(lane) : Layout::first_query(lane));
        const int column = (kKeyRows ? Layout::kTileQueries : Layout::kTileKeys) * n +
                           (kKeyRows ? Layout::first_query(lane) : Layout::first_key(lane));
        const auto row_slot = [](int v) { return kKeyRows ? Layout::key_slot(v) : Layout::query_slot(v); };
        unsigned bits[Layout::kElements];
#pragma unroll
        for (int v = 0; v < Layout::kElements; v++) {
            int same = v;  // the first element of this row
#pragma unroll
            for (int u = v - 1; u >= 0; u--)
                if (row_slot(u) == row_slot(v)) same = u;
            bits[v] = same < v ? bits[same] : __shfl_sync(~0u, word_, row + row_slot(v)) >> column;
            if (!(bits[v] >> (kKeyRows ? Layout::query_slot(v) : Layout::key_slot(v)) & 1)) s[v] = negative_infinity();
        }
    }
};

// A block visits the steps of its list.
class ListedBlocks {
    const BlockLists& lists_;

public:
    static constexpr bool kListed = true;
    template <class Layout, int Rows>
    using Bits = ScoreBits<Layout, Rows>;
    __device__ __forceinline__ explicit ListedBlocks(const BlockLists& lists) : lists_(lists) {}
    __device__ __forceinline__ const BlockLists& lists() const { return lists_; }
    // The lists of a query head in the block's batch entry.
    __device__ __forceinline__ HeadLists of_head(const BwdParams& p, int head) const {
        return HeadLists(lists_, p.lengths.first_batch + blockIdx.z, head);
    }
    // The steps of the list that has row `row`. `columns`: of the sequence.
    template <int Step>
    __device__ __forceinline__ ListedSteps<Step> steps(const BwdParams& p, int head, int row, int, int, int columns) const {
        return ListedSteps<Step>(lists_, of_head(p, head).of(lists_, row / kListedRows), columns);
    }
    // First row of a block of Rows queries in the dq kernels: that of the longest list first. Blocks of half a list go by rows.
    template <int Rows>
    __device__ __forceinline__ int first_row(const BwdParams& p) const {
        if (Rows < kListedRows) return blockIdx.x * Rows;
        return of_head(p, blockIdx.y).launched(lists_, blockIdx.x, gridDim.x) * Rows;
    }
};
