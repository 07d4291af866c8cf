// ListedBlockSteps: iterates over the key blocks that a block-sparse mask lists, and over the steps (Step keys) of each. For
// turing's forward kernels without softcap, ALiBi, bias and dropout (turing/forward/block_mask.cuh). "Columns" are keys:
//
//   start(); while (exists()) { do step(); while (advance()); advance_block(); }
//
// A list belongs to 128 query rows. Its header has counts, its entries are numbers of column blocks of kListedColumns (64) keys:
// first the partial blocks, then the full ones. A partial block has a bit tile: a bit for each of its scores, 1 if it exists.
#pragma once

#include "block_lists.cuh"  // a list's layout; kExists, kHasBits, kFlags: low bits of a first column; kNoColumn: past every key

// Iterates over a list in two nested loops: blocks, and the steps of a block. advance() only moves in a block; advance_block() goes
// to the next. Entries are loaded two blocks ahead. Indexed: computes an entry's address from its number, else keeps a pointer.
// ptxas schedules headdim 64 better with a pointer, 128 without.
template <int Step, bool Indexed>
class ListedBlockSteps {
    const int* from_;  // the first entry, or the one that is loaded next
    int entry_ = -1;  // two blocks after this step's, loaded ahead
    int partial_, left_;  // blocks from this step's on: the partial ones, and all
    // Number of the bit tile of this step's block, if that is partial. Partial blocks come first, and their tiles follow each other
    // from kFirstTile on; in full blocks nothing reads it.
    int tile_;
    // First columns of this step's block and of the one after it; low bits are the flags kExists and kHasBits. No block: kNoColumn.
    // Before start() these hold raw entries.
    int block_ = -1, next_block_ = -1;
    // Of this step: its number, and its first column in the block. Two counters: ptxas keeps the number in a uniform register.
    unsigned number_ = 0, column_ = 0;

    // Returns the first column of the block that `entry` names, with flags. `i`: blocks from this step's to it.
    __device__ __forceinline__ int decoded(int entry, int i) const {
        const int first = decoded_entry(entry, i, partial_);
        return i < left_ ? first : kNoColumn;
    }
    // Whether the step `steps` later (at most kListedColumns / Step) is in the next block. Callers pass constants.
    __device__ __forceinline__ bool is_beyond(unsigned steps) const {
        return steps * Step >= kListedColumns || (steps > 0 && column_ + steps * Step >= kListedColumns);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // grid.lists() is the mask, of.list the thread block's list. Loads the header and the first three entries at once: none waits
    // for another. start() follows. Ignores the first and the end column, which constructors of other iterators over steps take.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedBlockSteps(const Grid& grid, const Block& of, int, int)
        : from_(Indexed ? of.list + kEntries : of.list + kEntries + 3) {
        const int entries = grid.lists().max_entries;
        const int* first = of.list + kEntries;
        // true: no condition. As volatile PTX these keep their order.
        load_int_if(true, partial_, of.list + kPartialBlocks);
        load_int_if(true, left_, of.list + kFullBlocks);
        load_int_if(true, tile_, of.list + kFirstTile);
        load_int_if(entries > 0, block_, first);
        load_int_if(entries > 1, next_block_, first + 1);
        load_int_if(entries > 2, entry_, first + 2);
    }
    // Waits for the constructor's loads, and clamps the counts, unvalidated numbers from GPU memory. `end`: the sequence's columns.
    __device__ __forceinline__ void start(const BlockLists& lists, int end) {
        partial_ = clamped_partial(lists, partial_);
        left_ = end > 0 ? partial_ + clamped_full(lists, left_, partial_) : 0;
        block_ = decoded(block_, 0), next_block_ = decoded(next_block_, 1);
    }
    __device__ __forceinline__ bool exists() const { return block_ & kExists; }
    // Whether the block is partial.
    __device__ __forceinline__ bool has_bits() const { return block_ & kHasBits; }
    __device__ __forceinline__ int first() const { return after(0); }
    // First column of the step `steps` later, in this block or the next.
    __device__ __forceinline__ int after(unsigned steps) const {
        return ((is_beyond(steps) ? next_block_ : block_) & ~kFlags) + column_in_tile(steps);
    }
    __device__ __forceinline__ bool has_bits_after(unsigned steps) const {
        return (is_beyond(steps) ? next_block_ : block_) & kHasBits;
    }
    // Number of that step's bit tile, and its first column there.
    __device__ __forceinline__ int tile_after(unsigned steps) const { return tile_ + is_beyond(steps); }
    __device__ __forceinline__ unsigned column_in_tile(unsigned steps) const { return (column_ + steps * Step) % kListedColumns; }
    // Number of this step in the list, modulo N.
    template <unsigned N>
    __device__ __forceinline__ unsigned number_modulo() const {
        return number_ % N;
    }
    // Advances to the next step. Returns whether it is in the same block; else advance_block() follows.
    __device__ __forceinline__ bool advance() {
        number_++;
        column_ = (column_ + Step) % kListedColumns;
        return column_ != 0;
    }
    // Advances to the first step of the next block, and loads the entry two blocks after that one, if there is one.
    __device__ __forceinline__ void advance_block() {
        block_ = next_block_;
        partial_--, left_--, tile_++;
        next_block_ = decoded(entry_, 1);
        load_int_if(left_ > 2, entry_, Indexed ? from_ + number_ / (kListedColumns / Step) + 2 : from_++);
    }
};
