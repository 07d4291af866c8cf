// Block-sparse masks in the backward kernels: ListedBlocks says which steps a thread block visits, and ScoreBits hides single
// scores. A step is the columns that a thread block computes at once. Main kernels compute dK and dV, most also dQ: their thread
// blocks own keys (rows) and visit queries (columns). dq kernels compute dQ: they own queries and visit keys, as in the forward
// pass.
//
// A list (block_lists.cuh) names the blocks of 64 columns that 128 rows see, for each query head. Main kernels take transposed
// lists, whose rows are keys. A partial block has a bit tile, with a bit of 1 for each score that exists.
//
// The kernel tables in src/kernels pass ListedBlocks as template argument Blocks; turing/backward/block_mask.cuh has turing's.
#pragma once

#include "backward/score_coord.cuh"  // Layout: which lane has which score; BwdParams (src/params)
#include "listed_steps.cuh"  // ListedSteps: iterator over a list; HeadLists, BlockLists: lists in memory; kListedRows: 128
#include "ptx.cuh"  // load_int_if(condition, word, address): a predicated load; remat_thread_index()

// Bits of a warp's scores, Rows rows by at most 32 columns of a step: a lane holds the word of one row, and hide() shuffles words
// to the lanes with that row's scores. The Layout (score_coord.cuh) says which these are: an element's slots count from the lane's
// first query and key. kKeyRows: rows are keys. remat_thread_index() (ptx.cuh) reads threadIdx.x again: it then holds no register.
template <class Layout, int Rows>
class ScoreBits {
    static_assert(Rows <= 32, "a word a lane");
    unsigned word_;
    int shift_;  // bit of the warp's first column in word_; applied in hide(), because shifting in load() would wait for the load
    bool any_;

public:
    // Loads the bits of the current step of `steps`. tile_after(n) is the number of the bit tile of the step n later, and
    // column_in_tile(n) its first column there. `row`: the warp's first key (transposed list) or query. `column`: the warp's first
    // column, counted from the step's. `columns`: number of the sequence's. A step past them, and a bit tile outside the mask's
    // tensor, hide all scores: the word stays 0.
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks& blocks, const Steps& steps, int row, int column, int columns) {
        any_ = steps.has_bits() || steps.first() >= columns;
        word_ = 0, shift_ = 0;
        if (!steps.has_bits()) return;
        const BlockLists& lists = blocks.lists();
        const int bit_tile = steps.tile_after(0);
        const unsigned in_tile = steps.column_in_tile(0) + column;
        const unsigned list_row = static_cast<unsigned>(row) % kListedRows + static_cast<unsigned>(remat_thread_index()) % Rows;
        int word = 0;  // stays so if bit_tile is not one of the lists.tiles bit tiles of the tensor
        load_int_if(static_cast<unsigned>(bit_tile) < static_cast<unsigned>(lists.tiles), word,
                    bits_of(lists, bit_tile, list_row, in_tile));
        word_ = word, shift_ = in_tile % 32;
    }
    // Whether the step has scores to hide. Uniform in a warp.
    __device__ __forceinline__ bool any() const { return any_; }
    // Sets the lane's scores s without a bit to -inf, in the warp's tile (m, n) of the product: m counts tiles of rows, n of
    // columns. All lanes call it together, because they shuffle words.
    __device__ __forceinline__ void hide(typename Layout::Tile& s, int m, int n) const {
        hide(reinterpret_cast<typename Layout::Tile(&)[1]>(s), m, n);
    }
    // The same for N tiles side by side in columns, from (m, n) on.
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
            int same = v;  // the lane's first element in the row of v, whose word is already here
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

// A thread block visits the steps of its list. DenseBlocks (dense_blocks.cuh) has the same interface without a block mask. BitsOf:
// ScoreBits, or turing's StepBits, which loads bits one step ahead. Ahead: the iterator also tells the columns of as many later
// steps, for loads.
template <int Ahead, template <class, int> class BitsOf>
class ListedBlocksOf {
    const BlockLists& lists_;

public:
    static constexpr bool kListed = true;  // tells kernels that lists name the steps
    template <class Layout, int Rows>
    using Bits = BitsOf<Layout, Rows>;
    __device__ __forceinline__ explicit ListedBlocksOf(const BlockLists& lists) : lists_(lists) {}
    __device__ __forceinline__ const BlockLists& lists() const { return lists_; }
    // The lists of a query head in the thread block's batch entry (first_batch: the launch's first, of those of the call).
    __device__ __forceinline__ HeadLists of_head(const BwdParams& p, int head) const {
        return HeadLists(lists_, p.lengths.first_batch + blockIdx.z, head);
    }
    // Iterates over the list that has row `row`, Step columns at a time. `columns`: number of the sequence's. Unnamed: first column
    // and end of those that causal masks and windows leave, for DenseBlocks.
    template <int Step>
    __device__ __forceinline__ ListedSteps<Step, Ahead> steps(const BwdParams& p, int head, int row, int, int, int columns) const {
        return ListedSteps<Step, Ahead>(lists_, of_head(p, head).of(lists_, row / kListedRows), columns);
    }
    // Main kernels: which of the sequence's blocks of Keys keys the thread block owns. Grid maps blockIdx to a place in the launch
    // order (number, of count) and a KV head. Lists carry a launch order, longest list first, so that the longest work starts first
    // (HeadLists::launched). A KV head takes the order of its first query head. If two thread blocks share a list (Keys < 128),
    // they start in key order.
    template <int Keys, class Grid>
    __device__ __forceinline__ int key_block(const BwdParams& p, const Grid& grid) const {
        if (Keys < kListedRows) return grid.number(p);
        const int group = p.problem.nheads / p.problem.nheads_k;
        return of_head(p, grid.head(p) * group).launched(lists_, grid.number(p), grid.count(p));
    }
    // First query of a thread block of Rows queries in the dq kernels, in launch order too: blockIdx.x is the place in the order,
    // blockIdx.y the query head.
    template <int Rows>
    __device__ __forceinline__ int first_row(const BwdParams& p) const {
        if (Rows < kListedRows) return blockIdx.x * Rows;
        return of_head(p, blockIdx.y).launched(lists_, blockIdx.x, gridDim.x) * Rows;
    }
};
using ListedBlocks = ListedBlocksOf<1, ScoreBits>;
