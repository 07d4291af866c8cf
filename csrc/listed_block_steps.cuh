// ListedBlockSteps: iterates over the blocks of a list (block_lists.cuh) and over the steps of each. For turing's forward kernels
// without score features (turing/forward/block_mask.cuh):
//
//   start(); while (exists()) { do step(); while (advance()); advance_block(); }
//
// A list begins with numbers: kPartialBlocks and kFullBlocks (how many blocks of each kind), and kFirstTile (bit tile of the first
// partial block). From kEntries on it names the blocks. kNoColumn: no block (block_lists.cuh).
#pragma once

#include "block_lists.cuh"

// Iterates over a list in two nested loops: blocks, and the steps of a block. A step only counts. Indexed: computes an entry's
// address from its number, else keeps a pointer. ptxas schedules headdim 128 better indexed, headdim 64 better with a pointer.
template <int Step, bool Indexed>
class ListedBlockSteps {
    const int* from_;  // the first entry, or the one that is loaded next
    int entry_ = -1;  // two blocks after this step's, loaded ahead
    int partial_, left_;  // blocks from this step's on: the partial ones, and all
    int tile_;  // of bits, of this step's block
    // First columns of this step's block and of the one after it, with flags. Before start() these hold raw entries.
    int block_ = -1, next_block_ = -1;
    // Of this step: its number, and its first column in the block. Two counters, because ptxas then keeps the number in a uniform
    // register.
    unsigned number_ = 0, column_ = 0;

    // Returns the first column of a block, with flags. `i`: blocks from this step's to it.
    __device__ __forceinline__ int decoded(int entry, int i) const {
        const int first = decoded_entry(entry, i, partial_);
        return i < left_ ? first : kNoColumn;
    }
    // Whether the step `steps` later is in the next block. At most kListedColumns / Step steps.
    __device__ __forceinline__ bool is_beyond(unsigned steps) const {
        return steps * Step >= kListedColumns || (steps > 0 && column_ + steps * Step >= kListedColumns);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // Loads the header and the first three entries at once: none waits for another. start() follows.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedBlockSteps(const Grid& grid, const Block& of, int, int)
        : from_(Indexed ? of.list + kEntries : of.list + kEntries + 3) {
        const int entries = grid.lists().max_entries;
        const int* first = of.list + kEntries;
        load_int_if(true, partial_, of.list + kPartialBlocks);
        load_int_if(true, left_, of.list + kFullBlocks);
        load_int_if(true, tile_, of.list + kFirstTile);
        load_int_if(entries > 0, block_, first);
        load_int_if(entries > 1, next_block_, first + 1);
        load_int_if(entries > 2, entry_, first + 2);
    }
    // Waits for what the constructor loads. `end`: the sequence's columns.
    __device__ __forceinline__ void start(const BlockLists& lists, int end) {
        partial_ = clamped_partial(lists, partial_);
        left_ = end > 0 ? partial_ + clamped_full(lists, left_, partial_) : 0;
        block_ = decoded(block_, 0), next_block_ = decoded(next_block_, 1);
    }
    // Whether this block exists.
    __device__ __forceinline__ bool exists() const { return block_ & kExists; }
    // Whether the block is partial: a bit tile says which of its scores exist.
    __device__ __forceinline__ bool has_bits() const { return block_ & kHasBits; }
    // First column of this step.
    __device__ __forceinline__ int first() const { return after(0); }
    // Of the step `steps` later, in this block or the next.
    __device__ __forceinline__ int after(unsigned steps) const {
        return ((is_beyond(steps) ? next_block_ : block_) & ~kFlags) + column_in_tile(steps);
    }
    __device__ __forceinline__ bool has_bits_after(unsigned steps) const {
        return (is_beyond(steps) ? next_block_ : block_) & kHasBits;
    }
    // Number of that step's bit tile, and its first column there.
    __device__ __forceinline__ int tile_after(unsigned steps) const { return tile_ + is_beyond(steps); }
    __device__ __forceinline__ unsigned column_in_tile(unsigned steps) const { return (column_ + steps * Step) % kListedColumns; }
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
    __device__ __forceinline__ void advance_block() {
        block_ = next_block_;
        partial_--, left_--, tile_++;
        next_block_ = decoded(entry_, 1);
        load_int_if(left_ > 2, entry_, Indexed ? from_ + number_ / (kListedColumns / Step) + 2 : from_++);
    }
};
