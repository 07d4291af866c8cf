// Block-sparse masks: iteration over the listed blocks of a row block. DenseSteps (dense_steps.cuh) has the interface of
// ListedSteps without a mask. Used by the forward and backward kernels.
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

// Address of the word with a row's bits of a tile, from column `column` % 32 on.
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
        return min(max(__ldg(of(lists, i) + 3), 0), row_blocks - 1);
    }
};

constexpr int kExists = 1, kHasBits = 2, kFlags = 3;  // flags in the low bits of columns

// The blocks of a list, one after the other. Loads an entry one block before it decodes it, because code that decodes at once waits
// for the load, and keeps the counts.
class LoadedEntries {
    const int* next_;  // entry that is loaded next
    int entry_ = -1, partial_, left_;  // the entry before; entries from that on, the partial ones and all
    int tile_;  // of bits, of this step's block

    __device__ __forceinline__ void load() { load_int_if(left_ > 0, entry_, next_++); }

public:
    __device__ __forceinline__ LoadedEntries(const BlockLists& lists, const int* list, int end) : next_(list + kListHeader) {
        partial_ = min(max(__ldg(list), 0), lists.max_entries);
        left_ = end > 0 ? partial_ + min(max(__ldg(list + 1), 0), lists.max_entries - partial_) : 0;
        tile_ = __ldg(list + 2);
        load();
    }
    // Returns the first column of the next block, with flags.
    __device__ __forceinline__ int take() {
        const unsigned block = min(static_cast<unsigned>(entry_), static_cast<unsigned>(kNoColumn / kListedColumns));
        const int first = static_cast<int>(block) * kListedColumns + (partial_ > 0 ? kExists + kHasBits : kExists);
        const bool exists = left_ > 0;
        partial_--, left_--;
        load();
        return exists ? first : kNoColumn;
    }
    // The bit tile of this step's block.
    __device__ __forceinline__ int tile() const { return tile_; }
    // `leaves`: the next step is in another block.
    __device__ __forceinline__ void advance(bool leaves) { tile_ += leaves; }
};

// Iterates over a list in steps of Step columns, with a look at those up to Ahead steps later. Registers and instructions are
// short, so two flags are in the low bits of columns, and a step only adds to two of them. What a kernel never asks for, such as
// number_, the compiler leaves out.
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
    // The list of a block (Block::list). `end`: the sequence's columns.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedSteps(const Grid& grid, const Block& block, int, int end)
        : ListedSteps(grid.lists(), block.list, end) {}
    __device__ __forceinline__ ListedSteps(const BlockLists& lists, const int* list, int end) : entries_(lists, list, end) {
        first_ = entries_.take();
        ahead_ = Ahead * Step < kListedColumns ? first_ + Ahead * Step : entries_.take();
    }
    // Whether this step exists.
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    // Whether this step is a listed block's first.
    __device__ __forceinline__ bool begins_block() const { return column_in_block(first_) == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // Of the step `steps` later, at most Ahead.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    // Its tile of bits, if it has some, and its first column in the tile.
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

// The same with three registers fewer, for kernels that have no more: at each block it reads the header and the next entry, and
// waits for them. It looks at all steps of the next block.
template <int Step>
class ListedSteps<Step, 0> {
    static_assert(kListedColumns % Step == 0 && Step % 4 == 0, "a step lies in one block; two bits of columns are free");
    const int* list_;
    int position_;  // of this step among listed columns
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
    template <class Grid, class Block>
    __device__ __forceinline__ ListedSteps(const Grid& grid, const Block& of, int, int end) : list_(of.list), position_(0) {
        first_ = end > 0 ? block(grid.lists(), 0) : kNoColumn;
        next_block_ = block(grid.lists(), 1);
    }
    __device__ __forceinline__ bool exists() const { return first_ & kExists; }
    __device__ __forceinline__ bool has_bits() const { return first_ & kHasBits; }
    __device__ __forceinline__ bool begins_block() const { return position_ % kListedColumns == 0; }
    __device__ __forceinline__ int first() const { return first_ & ~kFlags; }
    // At most kListedColumns / Step steps later.
    __device__ __forceinline__ int after(int steps) const { return with_flags_after(steps) & ~kFlags; }
    __device__ __forceinline__ bool has_bits_after(int steps) const { return with_flags_after(steps) & kHasBits; }
    __device__ __forceinline__ int tile_after(int steps) const {
        return __ldg(list_ + 2) + (position_ + steps * Step) / kListedColumns;
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

// Iterates over a list in two nested loops: blocks, and the steps of a block. A step only counts. Indexed: computes an entry's
// address from its number, else keeps a pointer. ptxas schedules headdim 128 better indexed, headdim 64 better with a pointer.
template <int Step, bool Indexed>
class ListedBlockSteps {
    const int* from_;  // the list, or the entry that is loaded next
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
        const unsigned block = min(static_cast<unsigned>(entry), static_cast<unsigned>(kNoColumn / kListedColumns));
        const int first = static_cast<int>(block) * kListedColumns + (i < partial_ ? kExists + kHasBits : kExists);
        return i < left_ ? first : kNoColumn;
    }
    // Whether the step `steps` later is in the next block. At most kListedColumns / Step steps.
    __device__ __forceinline__ bool is_beyond(unsigned steps) const {
        return steps * Step >= kListedColumns || (steps > 0 && column_ + steps * Step >= kListedColumns);
    }

public:
    static constexpr int kBlockColumns = kListedColumns;
    // Loads the header and the first entries at once: none waits for another. start() follows.
    template <class Grid, class Block>
    __device__ __forceinline__ ListedBlockSteps(const Grid& grid, const Block& of, int, int)
        : from_(of.list + (Indexed ? 0 : kListHeader + 3)) {
        const int entries = grid.lists().max_entries;
        load_int_if(true, partial_, of.list);
        load_int_if(true, left_, of.list + 1);
        load_int_if(true, tile_, of.list + 2);
        load_int_if(entries > 0, block_, of.list + kListHeader);
        load_int_if(entries > 1, next_block_, of.list + kListHeader + 1);
        load_int_if(entries > 2, entry_, of.list + kListHeader + 2);
    }
    // Waits for what the constructor loads. `end`: the sequence's columns.
    __device__ __forceinline__ void start(const BlockLists& lists, int end) {
        partial_ = min(max(partial_, 0), lists.max_entries);
        left_ = end > 0 ? partial_ + min(max(left_, 0), lists.max_entries - partial_) : 0;
        block_ = decoded(block_, 0), next_block_ = decoded(next_block_, 1);
    }
    // Whether this block exists.
    __device__ __forceinline__ bool exists() const { return block_ & kExists; }
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
        load_int_if(left_ > 2, entry_, Indexed ? from_ + kListHeader + number_ / (kListedColumns / Step) + 2 : from_++);
    }
};
