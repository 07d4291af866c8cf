// Block-sparse masks in the turing backward kernels: loads the mask's bits, and hides (sets to -inf) the scores whose bit is 0. A
// list names the blocks of 64 columns that 128 rows have scores in. A partial block has a bit for each score, in a bit tile of 128
// rows by 64 columns (block_lists.cuh). In main kernels (dK, dV) rows are keys and columns queries, in dq kernels the reverse.
// ListedBlocks is the template argument Blocks of the kernels in warp_specialized.cuh, dq.cuh and dq_warp_specialized.cuh.
#pragma once

#include "backward/block_mask.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Bits of a warp's Rows rows in a step: at most 32 columns that the kernel computes at once. A lane holds the bits of one row.
// Kernels call load() one step ahead, to hide its latency. It does not shift the word, which would wait for it: combine() does.
//
//   Layout            KeysLayout or QueriesLayout (fragments.cuh): tiles of scores, kTileQueries queries by kTileKeys keys. A lane
//                     has kElements elements v of a tile: at its first row and column plus the slots of v
//   lists             the mask in memory: `tiles` bit tiles; bits_of(): address of the word of a row and column of one
//   kListedRows       128, rows of a list
//   steps             iterator over the list's steps (ListedSteps, listed_steps.cuh): first() is the step's first column,
//                     has_bits() whether its block is partial. For the step n later, has_bits_after(n) tells that, tile_after(n)
//                     the number of its bit tile, column_in_tile(n) its first column (0 to 63) there
template <class Layout, int Rows>
class StepBits {
    static_assert(Rows <= 32, "a word a lane");
    // Whether the rows of the product, and of the list, are keys.
    static constexpr bool kKeyRows = Layout::kKeyRows;
    static constexpr int kTileRows = kKeyRows ? Layout::kTileKeys : Layout::kTileQueries;
    static constexpr int kTileColumns = kKeyRows ? Layout::kTileQueries : Layout::kTileKeys;
    using Tile = typename Layout::Tile;
    unsigned loaded_ = 0;  // the lane's row in a bit tile, as in memory: 32 columns, with the step's among them
    unsigned word_ = 0;  // of the present step: bit 0 is its first column, 0 where the score is hidden

    static __device__ __forceinline__ constexpr int row_slot(int v) {
        return kKeyRows ? Layout::key_slot(v) : Layout::query_slot(v);
    }
    static __device__ __forceinline__ constexpr int column_slot(int v) {
        return kKeyRows ? Layout::query_slot(v) : Layout::key_slot(v);
    }
    static __device__ __forceinline__ int first_row(const Lane& l) {
        return kKeyRows ? Layout::first_key(l) : Layout::first_query(l);
    }
    static __device__ __forceinline__ int first_column(const Lane& l) {
        return kKeyRows ? Layout::first_query(l) : Layout::first_key(l);
    }

public:
    // Loads the bits of the step `ahead` steps after this one (0 or 1), if its block is partial. `row`: the warp's first, in the
    // sequence. (remat_thread(): threadIdx.x, read again to hold no register.)
    template <class Blocks, class Steps>
    __device__ __forceinline__ void load(const Blocks& blocks, const Steps& steps, int row, int ahead) {
        if (!steps.has_bits_after(ahead)) return;
        const BlockLists& lists = blocks.lists();
        const int tile = steps.tile_after(ahead);
        const unsigned list_row = static_cast<unsigned>(row) % kListedRows + remat_thread() % Rows;
        int word = 0;
        // Predicated, without a branch. A tile that does not exist reads as zeros: its scores are hidden.
        load_int_if(static_cast<unsigned>(tile) < static_cast<unsigned>(lists.tiles), word,
                    bits_of(lists, tile, list_row, steps.column_in_tile(ahead)));
        loaded_ = word;
    }
    // Takes this step's bits, or all bits in a full block, and keeps of them bits `first` to `last`, which lengths, causal mask and
    // window do not hide. So masks and bits share the code that hides scores. Query i sees keys i + mask.low to i + mask.high,
    // inclusive. `row`: the warp's first.
    template <class Steps>
    __device__ __forceinline__ void combine(const Steps& steps, const Mask& mask, int row) {
        const int i = row + static_cast<int>(remat_thread() % Rows);
        int first = i - mask.high, last = min(i - mask.low, mask.seqlen_q - 1);
        if (!kKeyRows) first = i + mask.low, last = min(i + mask.high, mask.seqlen_k - 1);
        first = max(first - steps.first(), 0), last = min(last - steps.first(), 31);
        word_ = steps.has_bits() ? loaded_ >> steps.column_in_tile(0) % 32 : ~0u;
        word_ = first > last || (kKeyRows && i >= mask.seqlen_k) ? 0 : word_ >> first << first & ~0u >> (31 - last);
    }
    // Sets to -inf the scores whose bit is 0 in N neighboring tiles: those of row tile m, from `column` of the step on. tile(n):
    // the lane's scores of the n-th. All lanes of the warp call it together: they shuffle words.
    template <int N, class TileOf>
    __device__ __forceinline__ void hide(int m, int column, TileOf tile) const {
        const Lane lane = remat_lane();
        const int row = kTileRows * m + first_row(lane);
        column += first_column(lane);
#pragma unroll
        for (int v = 0; v < Layout::kElements; v += 2) {  // a row's two scores
            static_assert(row_slot(0) == row_slot(1), "a lane has two scores of a row in a tile");
            const unsigned bits = __shfl_sync(~0u, word_, row + row_slot(v)) >> column;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int u = v; u < v + 2; u++)
                    if (!(bits >> (kTileColumns * n + column_slot(u)) & 1)) tile(n)[u] = negative_infinity();
        }
    }
};

// A thread block visits the steps of its list. 2: the iterator tells the columns of up to two steps ahead, for loads.
using ListedBlocks = ::ListedBlocksOf<2, StepBits>;

}  // namespace turing
