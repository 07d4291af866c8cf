// ListedSteps: iterates over the column blocks that a block-sparse mask lists, in steps of Step columns, the iterations of a main
// loop. Columns are keys; in main backward kernels, whose blocks own keys, they are queries. For the backward kernels, volta's
// forward kernels and turing's generic one (score features chosen by parameters) of headdim 64.
#pragma once

// a list's layout in memory: first partial blocks, with a bit tile (a bit for each score that exists), then full ones; kExists,
// kHasBits, kFlags: low bits of a first column
#include "block_lists.cuh"

// The blocks of a list, one after the other, and the counts of those left. Loads an entry one block before it decodes it: code that
// decodes at once would wait for the load.
class LoadedEntries {
    const int* next_;  // entry that is loaded next
    int entry_ = -1;  // the entry before, loaded but not decoded
    int partial_, left_;  // entries from entry_ on: the partial ones, and all
    int tile_;  // number of the bit tile of this step's block, if that is partial

    __device__ __forceinline__ void load() { load_int_if(left_ > 0, entry_, next_++); }

public:
    // Clamps the counts, which come from GPU memory, unvalidated. `end`: the sequence's columns.
    __device__ __forceinline__ LoadedEntries(const BlockLists& lists, const int* list, int end) : next_(list + kEntries) {
        partial_ = clamped_partial(lists, __ldg(list + kPartialBlocks));
        left_ = end > 0 ? partial_ + clamped_full(lists, __ldg(list + kFullBlocks), partial_) : 0;
        tile_ = __ldg(list + kFirstTile);
        load();
    }
    // Returns the first column of the next block, with the flags kExists and kHasBits in its low bits; kNoColumn, without flags, if
    // none.
    __device__ __forceinline__ int take() {
        const int first = decoded_entry(entry_, 0, partial_);  // 0: entry_ is the first of those that partial_ counts
        const bool exists = left_ > 0;
        partial_--, left_--;
        load();
        return exists ? first : kNoColumn;
    }
    __device__ __forceinline__ int tile() const { return tile_; }
    // `leaves`: the next step is in another block.
    __device__ __forceinline__ void advance(bool leaves) { tile_ += leaves; }
};

// Iterates over a list in steps of Step columns. Kernels load ahead of use, so it also tells the columns of steps up to Ahead
// later. Registers and instructions are scarce. So columns have two flags in their low bits (kExists, kHasBits), and in a block
// advance() only adds to first_ and ahead_. The compiler leaves out members that a kernel does not use, for example number_.
template <int Step, int Ahead>
class ListedSteps {
    static_assert(kListedColumns % Step == 0 && Step % 4 == 0, "a step lies in one block; two bits of columns are free");
    static_assert(Ahead * Step <= kListedColumns, "steps ahead lie in this block or the next");
    LoadedEntries entries_;
    int first_, ahead_;  // first column of this step and of that Ahead steps later, with flags
    unsigned number_ = 0;  // of this step

    static __device__ __forceinline__ unsigned column_in_block(int first) { return first & (kListedColumns - Step); }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // Takes the list of a thread block, Block::list. `end`: the sequence's columns. Unnamed: the first column of a range, for the
    // iterator without lists (DenseSteps), whose interface this is. Likewise advance() ignores the grid.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedSteps(const Grid& grid, const Block& block, int, int end)
        : ListedSteps(grid.lists(), block.list, end) {}
    __device__ __forceinline__ ListedSteps(const BlockLists& lists, const int* list, int end) : entries_(lists, list, end) {
        first_ = entries_.take();
        ahead_ = Ahead * Step < kListedColumns ? first_ + Ahead * Step : entries_.take();
    }
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    // Whether its block is partial.
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    // Whether this step is a listed block's first.
    __device__ __forceinline__ bool begins_block() const { return column_in_block(first_) == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // First column of the step `steps` later, at most Ahead, and whether that step's block is partial.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    // Number of that step's bit tile, if its block is partial, and its first column in the tile.
    __device__ __forceinline__ int tile_after(int steps) const { return entries_.tile() + is_beyond(steps); }
    __device__ __forceinline__ unsigned column_in_tile(int steps) const {
        return (column_in_block(first_) + steps * Step) % kListedColumns;
    }
    // Number of this step, modulo N.
    template <unsigned N>
    __device__ __forceinline__ unsigned number_modulo() const {
        return (kListedColumns / Step % N == 0 ? column_in_block(first_) / Step : number_) % N;
    }
    template <class Grid>
    __device__ __forceinline__ void advance(const Grid&) {
        const int next = with_flags_after(1);
        entries_.advance(is_beyond(1));
        // A vote, although all lanes agree: it tells the compiler that no warp diverges.
        const bool ends = __any_sync(~0u, column_in_block(ahead_) == kListedColumns - Step);
        ahead_ = ends ? entries_.take() : ahead_ + Step;
        first_ = next;
        number_++;
    }

private:
    // Whether the step `steps` later is in the next block. At most kListedColumns / Step steps.
    __device__ __forceinline__ bool is_beyond(int steps) const { return column_in_block(first_) + steps * Step >= kListedColumns; }
    __device__ __forceinline__ int with_flags_after(int steps) const {
        if (steps == 0) return first_;
        if (steps == Ahead) return ahead_;
        return is_beyond(steps) ? ahead_ - (Ahead - steps) * Step : first_ + steps * Step;
    }
};
