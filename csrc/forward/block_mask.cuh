// Block-sparse masks in the forward kernels: the list of a thread block, bits of partial key blocks, and loads of listed keys. A
// list (block_lists.cuh) names the blocks of 64 keys that 128 query rows (kListedRows) see. A partial block has a tile of bits, two
// 32-bit words a row: 1 where the score exists. The families' BlockMaskGrid ({volta,turing}/forward/block_mask.cuh), a template
// argument of their kernels, is made of these; the kernels of fp32 tensors use MaskBits (split_block_mask.cuh).
#pragma once

#include "block_lists.cuh"  // BlockLists (`blocks` of FwdBlockParams); HeadLists: a head's; bits_of(): address of a word of bits
#include "forward/scores.cuh"  // Scores: a warp's tiles of scores

// The list that a thread block takes, and its first row, heads and batch entry (ForwardBlock, block.cuh). Lists carry a launch
// order of each head's row blocks, longest list first, so that the longest work starts first: launched() returns the row block at
// a place in that order. EitherOrder: the grid may have heads on its first axis.
template <int BlockRows, bool EitherOrder>
struct ListedBlock : ForwardBlock<BlockRows, EitherOrder> {
    static_assert(BlockRows == kListedRows, "a list belongs to the rows of one block");
    const int* list;
    __device__ __forceinline__ explicit ListedBlock(const FwdBlockParams& p)
        : ForwardBlock<BlockRows, EitherOrder>(p.forward.problem) {
        // first_batch: batch entries of the call's earlier launches
        const HeadLists lists(p.blocks, p.forward.lengths.first_batch + this->batch, this->head);
        const bool heads_on_x = heads_first<EitherOrder>(p.forward.problem);
        const int row_block = lists.launched(p.blocks, heads_on_x ? blockIdx.y : blockIdx.x, heads_on_x ? gridDim.y : gridDim.x);
        this->row = row_block * BlockRows;
        list = lists.of(p.blocks, row_block);
    }
};

// Bits of a warp's Rows rows in a step of Step keys. A lane holds the word of one row. load() runs ahead of the step and leaves the
// word as memory has it, because shifting would wait for the load; combine() then makes bit 0 that of the step's first key. `keys`
// is an iterator over the list's steps (ListedSteps, ...; block_lists.cuh). Of the step n later, after(n) is the first key,
// has_bits_after(n) whether its block is partial, tile_after(n) that block's tile, column_in_tile(n) the first key there (0 to 63).
// A Layout (score_layout.cuh) says which scores of a tile a lane has: rows first_query + row_slot(r), keys first_key + key_slot(v).
template <int Rows, int Step>
class MaskBits {
    static_assert(Rows <= 32 && Step <= 32 && 32 % Step == 0, "a word a lane");
    unsigned loaded_ = 0, word_ = 0;  // as loaded; of the current step

    // The lane's row of the list: warp w has rows w * Rows and following. remat_*: reads threadIdx again, to hold no register.
    static __device__ __forceinline__ unsigned list_row() {
        const unsigned thread = remat_thread_index();
        return (Rows == 32 ? thread : thread / 32 * Rows + thread % Rows) % kListedRows;
    }

public:
    static constexpr bool kHidesAll = true;  // the bits also hide what lengths, causal masks and windows hide
    // Loads the bits of the step that comes `steps` after the current one, if that is in a partial block. Tile numbers come from
    // GPU memory, unvalidated: one outside the tensor reads as 0, which hides all.
    template <class Grid, class Keys>
    __device__ __forceinline__ void load(const Grid& grid, const Keys& keys, int steps) {
        load(grid, keys, steps, list_row);
    }
    // The same for the lane's row of the list that row() returns.
    template <class Grid, class Keys, class Row>
    __device__ __forceinline__ void load(const Grid& grid, const Keys& keys, int steps, Row row) {
        if (!keys.has_bits_after(steps)) return;
        const BlockLists& lists = grid.lists();
        const int tile = keys.tile_after(steps);
        int word = 0;
        load_int_if(static_cast<unsigned>(tile) < static_cast<unsigned>(lists.tiles), word,
                    bits_of(lists, tile, row(), keys.column_in_tile(steps)));
        loaded_ = word;
    }
    // Prepares the step that comes `steps` after the current one: takes its loaded bits, or all ones in a full block. With `masked`
    // clears the bits of keys that lengths, causal mask or window hide. So masks and bits share the code that hides scores: it has
    // to fit the instruction cache. `row`: the warp's first. Row i sees keys i + mask.low to i + mask.high.
    template <class Keys>
    __device__ __forceinline__ void combine(const Keys& keys, const Mask& mask, int row, bool masked, int steps = 0) {
        word_ = keys.has_bits_after(steps) ? loaded_ >> keys.column_in_tile(steps) % 32 / Step * Step : ~0u;
        if (!masked) return;
        const int i = row + remat_lane() % Rows, key = keys.after(steps);
        const int first = max(i + mask.low - key, 0), last = min(min(i + mask.high, mask.seqlen_k - 1) - key, 31);
        // keeps bits `first` to `last`, the visible keys of row i in the step
        word_ = first > last ? 0 : word_ >> first << first & ~0u >> (31 - last);
    }
    // Sets the scores without a bit to -inf. `first_key`: first key of the tiles of `s`, counted from the step's.
    template <class Layout, int RowTiles, int KeyTiles>
    __device__ __forceinline__ void apply_to(Scores<Layout, RowTiles, KeyTiles>& s, int first_key = 0) const {
        const typename Layout::Lane lane(remat_lane());
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                const int row = Layout::kTileQueries * mt + Layout::row_slot(r) + Layout::first_query(lane);
                const unsigned bits = __shfl_sync(~0u, word_, row) >> (Layout::first_key(lane) + first_key);
#pragma unroll
                for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                    for (int v = 0; v < Layout::kElements; v++)
                        if (Layout::row_of(v) == r && !(bits >> (Layout::kTileKeys * nt + Layout::key_slot(v)) & 1))
                            s.tile[mt][nt][v] = negative_infinity();
            }
    }
};

// Loads tiles of listed keys: TileStream (tile.cuh), whose load() takes any first row instead of the next tile's. A thread loads
// kChunksPerRow chunks of a row in each of kPasses passes; has_row(row, i) and has_chunk(c) tell which of them the matrix has.
template <int Chunks, int Rows, int Threads>
struct ListedTileStream : TileStream<Chunks, Rows, Threads> {
    using Stream = TileStream<Chunks, Rows, Threads>;
    using Stream::has_chunk, Stream::has_row, Stream::next;
    using Stream::kChunksPerRow, Stream::kPasses, Stream::kRowsPerPass, Stream::kThreadsPerRow;

    // Tiles of the rows before `last`. The unnamed int is TileStream's first row. Here `next`, the thread's chunk, stays at row 0.
    __device__ __forceinline__ ListedTileStream(int thread, const unsigned short* base, long long row_stride, int columns, int,
                                                int last)
        : Stream(thread, base, row_stride, columns, 0, last) {}

    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void load(uint4 (&data)[Passes][ChunksPerRow], unsigned row_stride, int row) const {
        const unsigned short* from = rows_after(next, row, row_stride);
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                load_global_if(has_row(row, i) && has_chunk(c), data[i][c],
                               rows_after(from, i * kRowsPerPass, row_stride) + c * kThreadsPerRow * kChunk);
    }
};
