// Lists of the blocks of a block-sparse mask: what lies in memory, and how entries are decoded. Included by the iterators over
// lists (table below), and by the block masks of the forward, backward and cast kernels.
//
// A list belongs to kListedRows rows of a query head: queries, whose listed columns are keys, or transposed keys, whose columns are
// queries. After its header come the numbers of column blocks: first the partial blocks, then the full ones. A partial block has a
// bit tile, with a bit for each score: the score exists if it is 1. Batch entry and head index the lists modulo their sizes, so
// that a mask can be broadcast. Causal and window masks and the sequence's lengths apply as without lists, also in full blocks.
//
// Lists come from GPU memory, unvalidated. Counts are clamped to the entries that a list has. An entry outside the matrix becomes
// kNoColumn, past every sequence: its columns are not loaded, and masked. Bit tiles outside the tensor read as 0.
//
// A step is an iteration of a kernel's main loop: STEP columns, at most 64, inside one listed block. Main loops are written once
// for four iterators over steps; DenseSteps reads no lists. An iterator stands at a step; n counts steps from there. first()
// and after(n) return a step's first column, begins_block() whether the step is its block's first; advance() moves to the next
// step. The other functions tell whether a step's block is partial, the number of its bit tile, the step's first column there, and
// the step's number modulo a constant:
//
//                                      DenseSteps  ListedSteps  CompactListedSteps  ListedBlockSteps
//   first(), after(n), exists()        yes         yes          yes                 yes; exists() of the block
//   has_bits()                         false       yes          yes                 yes
//   has_bits_after(n), tile_after(n),
//   column_in_tile(n), number_modulo   -           yes          yes                 yes
//   advance(grid)                      yes         yes          yes                 advance(), advance_block(), start()
//   begins_block()                     -           yes          yes                 -
//   largest n                          any         Ahead        64 / Step           64 / Step
//
// `grid`, a policy of the kernel, has the lists: CompactListedSteps reads them in advance() too, the others ignore it there.
// Constructors take (grid, thread block, first column, end of columns); that of ListedSteps in backward kernels takes (block lists,
// address of a list, end of columns). ListedSteps loads an entry one block before use; its template parameter Ahead is the largest
// n. CompactListedSteps holds three registers fewer and waits for loads at each block. ListedBlockSteps is for kernels that loop
// over a block's steps: advance_block() goes to the next block, start() waits for the constructor's loads. The file of each has its
// name.
#pragma once

#include "tile.cuh"  // for includers: load_int_if() of its ptx.cuh
#include "volta_fa_params.h"  // generated from src/params: BlockLists, whose strides count ints

constexpr int kListedRows = 128;  // rows of a list
constexpr int kListedColumns = 64;  // columns of a listed block
constexpr int kTileWords = kListedRows * kListedColumns / 32;  // 32-bit words of a bit tile: two a row
constexpr int kNoColumn = 1 << 30;  // past every sequence

// Where a list, an array of int, has what: a header, unvalidated, then entries.
enum ListPart : int {
    kPartialBlocks,  // number of partial column blocks
    kFullBlocks,  // number of full column blocks
    kFirstTile,  // bit tile of the first partial block; the others' follow
    kRowBlock,  // in list i: the row block that block i of the grid takes, because long lists are launched first
    kEntries,  // first entry
};

// Address of the word with the bit of (row, column) of a tile: bit column % 32. row < kListedRows, column < kListedColumns.
__device__ __forceinline__ const int* bits_of(const BlockLists& lists, int tile, unsigned row, unsigned column) {
    const unsigned* from = lists.bits + (row * 2 + column / 32);
    return reinterpret_cast<const int*>(from + static_cast<unsigned long long>(static_cast<unsigned>(tile)) * kTileWords);
}

// The lists of a query head of a batch entry of the call. BlockLists::lists: int32 (batch, heads, row blocks, 4 + max_entries).
struct HeadLists {
    const int* first;
    __device__ __forceinline__ HeadLists(const BlockLists& lists, int batch, int head)
        : first(lists.lists + batch % lists.batch * lists.batch_stride + head % lists.heads * lists.head_stride) {}
    // The list of a block of rows.
    __device__ __forceinline__ const int* of(const BlockLists& lists, int row_block) const {
        return first + row_block * lists.row_stride;
    }
    // The row block that block `i` of the grid takes, clamped to the `row_blocks` that exist.
    __device__ __forceinline__ int launched(const BlockLists& lists, int i, int row_blocks) const {
        return min(max(__ldg(of(lists, i) + kRowBlock), 0), row_blocks - 1);
    }
};

// Clamp a header's counts of partial and of full blocks to the entries that the list has. `partial`: that count, clamped.
__device__ __forceinline__ int clamped_partial(const BlockLists& lists, int count) { return min(max(count, 0), lists.max_entries); }
__device__ __forceinline__ int clamped_full(const BlockLists& lists, int count, int partial) {
    return min(max(count, 0), lists.max_entries - partial);
}

// Iterators keep the first column of a block or step with two flags in its low bits, which are 0 in multiples of 4: whether the
// block exists (if not, the word is kNoColumn), and whether it is partial.
constexpr int kExists = 1, kHasBits = 2, kFlags = 3;

// Returns the first column of an entry's block, with flags. The entry has number i, and the first `partial` entries are partial.
__device__ __forceinline__ int decoded_entry(int entry, int i, int partial) {
    const unsigned block = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
    return static_cast<int>(block) * kListedColumns + (i < partial ? kExists + kHasBits : kExists);
}
