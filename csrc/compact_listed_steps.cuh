// CompactListedSteps: iterates over the steps of a list (block_lists.cuh) with few registers. For turing's generic forward kernels
// (kGeneric, features.cuh) at headdims 128 and 256 (turing/forward/block_mask.cuh), and for those of fp32 tensors
// (forward/split_block_mask.cuh). Members are those of ListedSteps (listed_steps.cuh):
//   has_bits()          the step's block is partial: a bit tile says which of its scores exist
//   tile_after(n)       number of the bit tile of the step n later
//   column_in_tile(n)   first column of that step in its tile
//   number_modulo<N>()  number of the step in the list, modulo N
//
// A list begins with numbers: kPartialBlocks and kFullBlocks (how many blocks of each kind), and kFirstTile (bit tile of the first
// partial block). From kEntries on it names the blocks. block_lists.cuh has all of it.
#pragma once

#include "block_lists.cuh"

// The steps of a list, for kernels that have no registers for ListedSteps: at each block it reads the header and the next entry,
// and waits for them. It looks ahead by as many steps as a block has.
template <int Step>
class CompactListedSteps {
    static_assert(kListedColumns % Step == 0 && Step % 4 == 0, "a step lies in one block; two bits of columns are free");
    const int* list_;
    int position_;  // of this step among listed columns
    int first_, next_block_;  // first column of this step and of the listed block after this step's, with flags

    // Returns the first column of the list's block number `i`, with flags.
    __device__ __forceinline__ int block(const BlockLists& lists, int i) const {
        const int partial = clamped_partial(lists, __ldg(list_ + kPartialBlocks)), full = max(__ldg(list_ + kFullBlocks), 0);
        int entry = -1;
        load_int_if(i < lists.max_entries, entry, list_ + kEntries + i);
        // decoded_entry(), written out: the call costs instructions. A block past the list's last is kNoColumn.
        const unsigned number = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
        if (i >= lists.max_entries || i - partial >= full) return kNoColumn;
        return static_cast<int>(number) * kListedColumns + (i < partial ? kExists + kHasBits : kExists);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    template <class Grid, class Block>
    __device__ __forceinline__ CompactListedSteps(const Grid& grid, const Block& of, int, int end) : list_(of.list), position_(0) {
        first_ = end > 0 ? block(grid.lists(), 0) : kNoColumn;
        next_block_ = block(grid.lists(), 1);
    }
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    __device__ __forceinline__ bool begins_block() const { return position_ % kListedColumns == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // First column of the step `steps` later, at most kListedColumns / Step: in this block or the next.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    __device__ __forceinline__ int tile_after(int steps) const {
        return __ldg(list_ + kFirstTile) + (position_ + steps * Step) / kListedColumns;
    }
    __device__ __forceinline__ unsigned column_in_tile(int steps) const { return (position_ + steps * Step) % kListedColumns; }
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
