// Block-sparse masks: iteration over the listed blocks of a row block. DenseSteps (dense_steps.cuh) has the same interface without
// a mask. Used by the forward and backward kernels.
//
// A list belongs to kListedRows rows of a query head: queries, whose listed columns are keys, or transposed keys, whose columns are
// queries. Its header has the number of partial and of full column blocks, the first bit tile, and the row block that the i-th
// block of the grid takes. Then come the partial blocks, whose scores exist where the bit tile has a 1, and the full ones. Batch
// entry and head index the lists modulo their sizes. Causal and window masks and the sequence's lengths apply as without lists, so
// a step across one of their edges is masked in full blocks too.
//
// Lists come from GPU memory, unvalidated. Counts are clamped to the entries that a list has. An entry outside the matrix becomes
// kNoColumn, past every sequence: its columns are not loaded, and masked. Bit tiles outside the tensor read as 0.
#pragma once

#include "volta_fa_params.h"

constexpr int kListedRows = 128;  // rows of a list
constexpr int kListedColumns = 64;  // columns of a listed block
constexpr int kListHeader = 4;  // numbers before a list's entries
constexpr int kTileWords = kListedRows * kListedColumns / 32;  // of a bit tile: two a row
constexpr int kNoColumn = 1 << 30;  // past every sequence

// Loads *from if `inside`; x keeps its value otherwise. Predicated, because a branch would stop ptxas from interleaving.
__device__ __forceinline__ void load_int_if(bool inside, int& x, const int* from) {
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.s32 inside, %2, 0;\n"
        "@inside ld.global.nc.s32 %0, [%1];}"
        : "+r"(x)
        : "l"(from), "r"(static_cast<int>(inside)));
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
        return min(max(__ldg(of(lists, i) + 3), 0), row_blocks - 1);
    }
};

// Iterates over a list in steps of Step columns. Positions count listed columns: position x is in the list's block x /
// kListedColumns.
//
// Registers are short, so the iterator keeps two flags in the low bits of columns, and reads the header again at each block.
template <int Step>
class ListedSteps {
    static_assert(kListedColumns % Step == 0 && Step % 4 == 0, "a step lies in one block; two bits of columns are free");
    enum Flag { kExists = 1, kHasBits = 2, kFlags = 3 };
    const int* list_;
    int position_;  // of this step
    int first_, next_block_;  // first column of this step and of the listed block after this step's, with flags

    // Returns the first column of the list's block number `i`, with flags.
    __device__ __forceinline__ int block(const BlockLists& lists, int i) const {
        const int partial = min(max(__ldg(list_), 0), lists.max_entries), full = max(__ldg(list_ + 1), 0);
        int entry = -1;
        load_int_if(i < lists.max_entries, entry, list_ + kListHeader + i);
        const unsigned number = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
        if (i >= lists.max_entries || i - partial >= full) return kNoColumn;
        return static_cast<int>(number) * kListedColumns + (i < partial ? kExists + kHasBits : kExists);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // The list of a block (Block::list). `end`: the sequence's columns.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedSteps(const Grid& grid, const Block& block, int, int end)
        : ListedSteps(grid.lists(), block.list, end) {}
    __device__ __forceinline__ ListedSteps(const BlockLists& lists, const int* list, int end) : list_(list), position_(0) {
        first_ = end > 0 ? block(lists, 0) : kNoColumn;
        next_block_ = block(lists, 1);
    }
    // Whether this step exists.
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    // Whether this step is a listed block's first.
    __device__ __forceinline__ bool begins_block() const { return position_ % kListedColumns == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // At most kListedColumns / Step steps later.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    // Number of this step.
    __device__ __forceinline__ unsigned number() const { return static_cast<unsigned>(position_) / Step; }
    __device__ __forceinline__ int position_after(int steps) const { return position_ + steps * Step; }
    template <class Grid>
    __device__ __forceinline__ void advance(const Grid& grid) {
        position_ += Step;
        first_ += Step;
        if (position_ % kListedColumns == 0) {
            first_ = next_block_;
            next_block_ = block(grid.lists(), position_ / kListedColumns + 1);
        }
    }
    // The list's first bit tile.
    __device__ __forceinline__ int first_tile() const { return __ldg(list_ + 2); }

private:
    __device__ __forceinline__ int with_flags_after(int steps) const {
        const int offset = position_ % kListedColumns + steps * Step;
        return offset < kListedColumns ? first_ + steps * Step : next_block_ + (offset - kListedColumns);
    }
};
