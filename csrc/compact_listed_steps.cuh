// CompactListedSteps: iterates over the key blocks that a block-sparse mask lists, in steps of Step columns, with few registers.
// For turing's generic forward kernels (score features chosen by parameters) at headdims 128 and 256
// (turing/forward/block_mask.cuh), and for the forward kernels of fp32 tensors (forward/split_block_mask.cuh). Columns are keys.
#pragma once

// a list's layout in memory: first partial blocks, with a bit tile (a bit for each score that exists), then full ones; kExists,
// kHasBits, kFlags: low bits of a first column
#include "block_lists.cuh"

// The steps of a list, for kernels without registers for ListedSteps, which keeps the counts and loads entries ahead of use. At
// each block this class reads the header and the next entry, and waits for them.
template <int Step>
class CompactListedSteps {
    static_assert(kListedColumns % Step == 0 && Step % 4 == 0, "a step lies in one block; two bits of columns are free");
    const int* list_;
    int position_;  // of this step among listed columns
    // First column of this step, and of the listed block after this step's; low bits: kExists, and kHasBits of partial blocks.
    int first_, next_block_;

    // Returns the first column of the list's block number `i`, with flags. Past the list's last block it returns kNoColumn, a
    // multiple of kListedColumns past every sequence, without flags: the block does not exist. An invalid entry
    // (lists are not validated) gives kNoColumn with flags: its steps run, and are masked.
    __device__ __forceinline__ int block(const BlockLists& lists, int i) const {
        const int partial = clamped_partial(lists, __ldg(list_ + kPartialBlocks)), full = max(__ldg(list_ + kFullBlocks), 0);
        int entry = -1;
        load_int_if(i < lists.max_entries, entry, list_ + kEntries + i);
        // decoded_entry(), written out: the call costs instructions.
        const unsigned number = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
        if (i >= lists.max_entries || i - partial >= full) return kNoColumn;
        return static_cast<int>(number) * kListedColumns + (i < partial ? kExists + kHasBits : kExists);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // grid.lists() is the mask. `of`: the thread block, for its list. Unnamed: the first column, which other iterators take; here
    // the list has it. `end`: the end of the columns that exist; 0: no step exists.
    template <class Grid, class Block>
    __device__ __forceinline__ CompactListedSteps(const Grid& grid, const Block& of, int, int end) : list_(of.list), position_(0) {
        first_ = end > 0 ? block(grid.lists(), 0) : kNoColumn;
        next_block_ = block(grid.lists(), 1);
    }
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    // Whether its block is partial.
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    // Whether this step is a listed block's first.
    __device__ __forceinline__ bool begins_block() const { return position_ % kListedColumns == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // Of the step `steps` later (at most kListedColumns / Step), in this block or the next: first column, and whether it has bits.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    // Number of that step's bit tile, and its first column there.
    __device__ __forceinline__ int tile_after(int steps) const {
        return __ldg(list_ + kFirstTile) + (position_ + steps * Step) / kListedColumns;
    }
    __device__ __forceinline__ unsigned column_in_tile(int steps) const { return (position_ + steps * Step) % kListedColumns; }
    // Number of this step in the list, modulo N.
    template <unsigned N>
    __device__ __forceinline__ unsigned number_modulo() const {
        return static_cast<unsigned>(position_) / Step % N;
    }
    template <class Grid>
    __device__ __forceinline__ void advance(const Grid& grid) {
        position_ += Step;
        first_ += Step;
        if (position_ % kListedColumns == 0) {
            first_ = next_block_;
            next_block_ = block(grid.lists(), position_ / kListedColumns + 1);
        }
    }

private:
    __device__ __forceinline__ int with_flags_after(int steps) const {
        const int offset = position_ % kListedColumns + steps * Step;
        return offset < kListedColumns ? first_ + steps * Step : next_block_ + (offset - kListedColumns);
    }
};
