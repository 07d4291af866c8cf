// Block-sparse masks in the backward kernels (block_lists.cuh). The dkdv kernels walk transposed lists: rows are keys, columns
// queries, and each query head of the group has its own list. A partial block has a tile of bits, one for each score. The dq
// kernels walk the lists of the forward pass. Rows in src/kernels name ListedBlocks as the template argument Blocks of such
// kernels; turing/backward/block_mask.cuh derives from it.
#pragma once

#include "backward/score_coord.cuh"
#include "listed_steps.cuh"
#include "ptx.cuh"

// Bits of a warp's Rows rows (of the product, and of the list) in a step of at most 32 columns. A lane holds those of one row, bit
// 0 for the first column.
template <class Layout, int Rows>
class ScoreBits {
    static_assert(Rows <= 32, "a word a lane");
    unsigned word_;
    int shift_;  // where used, because it waits for the load
    bool any_;

public:
    // Loads the bits of a step. `row`: first of the warp's scores, counted as the list's rows are. `column`: first in the step.
    // Steps from column `columns` on do not exist: all of their scores are hidden.
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks& blocks, const Steps& steps, int row, int column, int columns) {
        any_ = steps.has_bits() || steps.first() >= columns;
        word_ = 0, shift_ = 0;
        if (!steps.has_bits()) return;
        const BlockLists& lists = blocks.lists();
        const int tile = steps.tile_after(0);
        const unsigned in_tile = steps.column_in_tile(0) + column;
        const unsigned list_row = static_cast<unsigned>(row) % kListedRows + static_cast<unsigned>(remat_thread_index()) % Rows;
        int word = 0;
        load_int_if(static_cast<unsigned>(tile) < static_cast<unsigned>(lists.tiles), word,
                    bits_of(lists, tile, list_row, in_tile));
        word_ = word, shift_ = in_tile % 32;
    }
    // Whether the step has scores to hide. Uniform in a warp.
    __device__ __forceinline__ bool any() const { return any_; }
    // Hides the scores without a bit of tile (m, n) of the warp's. All lanes of the warp call it together.
    __device__ __forceinline__ void hide(typename Layout::Tile& s, int m, int n) const {
        hide(reinterpret_cast<typename Layout::Tile(&)[1]>(s), m, n);
    }
    // The same of the neighboring tiles from (m, n) on.
    template <int N>
    __device__ __forceinline__ void hide(typename Layout::Tile (&s)[N], int m, int n = 0) const {
        constexpr bool kKeyRows = Layout::kKeyRows;
        constexpr int kTileColumns = kKeyRows ? Layout::kTileQueries : Layout::kTileKeys;
        const typename Layout::Lane lane(remat_thread_index() & 31);
        const int row = (kKeyRows ? Layout::kTileKeys : Layout::kTileQueries) * m +
                        (kKeyRows ? Layout::first_key(lane) : Layout::first_query(lane));
        const int column = kTileColumns * n + (kKeyRows ? Layout::first_query(lane) : Layout::first_key(lane));
        const auto row_slot = [](int v) { return kKeyRows ? Layout::key_slot(v) : Layout::query_slot(v); };
        const auto column_slot = [](int v) { return kKeyRows ? Layout::query_slot(v) : Layout::key_slot(v); };
        unsigned bits[Layout::kElements];
#pragma unroll
        for (int v = 0; v < Layout::kElements; v++) {
            int same = v;  // the first element of this row
#pragma unroll
            for (int u = v - 1; u >= 0; u--)
                if (row_slot(u) == row_slot(v)) same = u;
            bits[v] = same < v ? bits[same] : __shfl_sync(~0u, word_, row + row_slot(v)) >> (column + shift_);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (!(bits[v] >> (kTileColumns * i + column_slot(v)) & 1)) s[i][v] = negative_infinity();
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
    __device__ __forceinline__ ListedSteps<Step, 1> steps(const BwdParams& p, int head, int row, int, int, int columns) const {
        return ListedSteps<Step, 1>(lists_, of_head(p, head).of(lists_, row / kListedRows), columns);
    }
    // Number of the thread block's block of Keys keys in the main kernels: that of the longest list first, for the group's first
    // query head. Blocks of half a list go by rows.
    template <int Keys, class Grid>
    __device__ __forceinline__ int key_block(const BwdParams& p, const Grid& grid) const {
        if (Keys < kListedRows) return grid.number(p);
        const int group = p.problem.nheads / p.problem.nheads_k;
        return of_head(p, grid.head(p) * group).launched(lists_, grid.number(p), grid.count(p));
    }
    // First row of a block of Rows queries in the dq kernels: that of the longest list first. Blocks of half a list go by rows.
    template <int Rows>
    __device__ __forceinline__ int first_row(const BwdParams& p) const {
        if (Rows < kListedRows) return blockIdx.x * Rows;
        return of_head(p, blockIdx.y).launched(lists_, blockIdx.x, gridDim.x) * Rows;
    }
};
