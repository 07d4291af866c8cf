// Lists of the blocks of a block-sparse mask: what lies in memory, and how entries are decoded. Included by the iterators over
// lists (table below), and by forward/block_mask.cuh, backward/block_mask.cuh and backward/stored_block_mask.cuh.
//
// A list belongs to kListedRows rows of a query head: queries, whose listed columns are keys, or transposed keys, whose columns are
// queries. After its header come the partial blocks, whose scores exist where the bit tile has a 1, and the full ones. Batch entry
// and head index the lists modulo their sizes. Causal and window masks and the sequence's lengths apply as without lists, so a step
// across one of their edges is masked in full blocks too.
//
// Lists come from GPU memory, unvalidated. Counts are clamped to the entries that a list has. An entry outside the matrix becomes
// kNoColumn, past every sequence: its columns are not loaded, and masked. Bit tiles outside the tensor read as 0.
//
// Main loops are written once for all iterators over steps. Iterators have:
//
//                                      DenseSteps  ListedSteps  CompactListedSteps  ListedBlockSteps
//   first(), after(n), exists()        yes         yes          yes                 yes; exists() of the block
//   has_bits()                         false       yes          yes                 yes
//   has_bits_after(n), tile_after(n),
//   column_in_tile(n), number_modulo   -           yes          yes                 yes
//   advance(grid)                      yes         yes          yes                 advance(), advance_block(), start()
//   begins_block()                     -           yes          yes                 -
//   largest n                          any         Ahead        a block's steps     a block's steps
//
// Their constructors take (grid, block, first column, end of columns). ListedSteps loads an entry one block before use.
// CompactListedSteps holds three registers fewer and waits for loads at each block. ListedBlockSteps is for kernels that loop over
// a block's steps. The file of each has its name.
#pragma once

#include "tile.cuh"
#include "volta_fa_params.h"

constexpr int kListedRows = 128;  // rows of a list
constexpr int kListedColumns = 64;  // columns of a listed block
constexpr int kTileWords = kListedRows * kListedColumns / 32;  // of a bit tile: two a row
constexpr int kNoColumn = 1 << 30;  // past every sequence

// What the numbers of a list are: a header, unvalidated, then entries.
enum ListPart : int {
    kPartialBlocks,  // number of partial column blocks
    kFullBlocks,  // number of full ones
    kFirstTile,  // bit tile of the first partial block
    kRowBlock,  // row block that block i of the grid takes: a field of list i, but not about its rows
    kEntries,  // where the column blocks begin
};

// Address of the word that has the bit of (row, column) of a tile: bit column % 32. `row` is below kListedRows, `column` below
// kListedColumns.
__device__ __forceinline__ const int* bits_of(const BlockLists& lists, int tile, unsigned row, unsigned column) {
    const unsigned* from = lists.bits + (row * 2 + column / 32);
    return reinterpret_cast<const int*>(from + static_cast<unsigned long long>(static_cast<unsigned>(tile)) * kTileWords);
}

// The lists of one head of one batch entry.
struct HeadLists {
    const int* first;
    __device__ __forceinline__ HeadLists(const BlockLists& lists, int batch, int head)
        : first(lists.lists + batch % lists.batch * lists.batch_stride + head % lists.heads * lists.head_stride) {}
    // The list of a block of rows.
    __device__ __forceinline__ const int* of(const BlockLists& lists, int row_block) const {
        return first + row_block * lists.row_stride;
    }
    // The row block that number `i` of `row_blocks` in the grid takes, clamped to those that exist.
    __device__ __forceinline__ int launched(const BlockLists& lists, int i, int row_blocks) const {
        return min(max(__ldg(of(lists, i) + kRowBlock), 0), row_blocks - 1);
    }
};

// Clamp a header's counts of partial and of full blocks to the entries that the list has. `partial`: clamped.
__device__ __forceinline__ int clamped_partial(const BlockLists& lists, int count) { return min(max(count, 0), lists.max_entries); }
__device__ __forceinline__ int clamped_full(const BlockLists& lists, int count, int partial) {
    return min(max(count, 0), lists.max_entries - partial);
}

// Iterators keep columns as the first column of a block or step, with flags in the low bits, which columns leave free: whether the
// block exists (else it is kNoColumn), and whether it is partial.
constexpr int kExists = 1, kHasBits = 2, kFlags = 3;

// Returns the first column of the block of an entry, with flags. It is number i of some entries that begin with `partial` partial
// ones.
__device__ __forceinline__ int decoded_entry(int entry, int i, int partial) {
    const unsigned block = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
    return static_cast<int>(block) * kListedColumns + (i < partial ? kExists + kHasBits : kExists);
}
