// Grid policy of the volta forward kernels (register_q.cuh, shared_q.cuh: their template argument Grid) under a block-sparse mask.
// A grid policy tells a thread block its query rows, its steps of keys (the iterations of the main loop) and how it loads them. A
// list (block_lists.cuh) names the key blocks, of 64 keys, that 128 query rows of a head see: in part, with a bit for each score
// (1: it exists), or in full.
#pragma once

#include "forward/block_mask.cuh"  // ListedBlock: a block's list and rows; MaskBits; ListedTileStream
#include "listed_steps.cuh"
#include "volta/forward/required_features.cuh"  // layout.cuh: DataParallelGrid, ForwardLayout

namespace volta {

// One thread block for each list: its 128 rows, head and batch entry. The longest list of a head is launched first. The base class
// has the rest of the policy: combine_splits(), which does nothing because no other block has the same rows; remat_head() and
// remat_batch(), which read blockIdx again to hold no register; kHasHeadAndBatchAxes.
class BlockMaskGrid : public DataParallelGrid {
    const FwdBlockParams& params_;

public:
    // Iterator over the list's steps of Step keys. Its second argument is how many steps the kernel's loads run ahead: three in
    // register_q.cuh (16 keys a step), one in shared_q.cuh (more keys).
    template <int Step>
    using Steps = ListedSteps<Step, Step == 16 ? 3 : 1>;
    // Loads the bits of partial blocks for a warp's Rows rows, a word a lane, and hides the scores that do not exist. These bits
    // also hide what lengths, causal masks and windows hide (kHidesAll), so that kernels need no second mask.
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;
    // Loads tiles of K and V, Rows keys by Chunks chunks of eight columns, by Threads threads.
    template <int Chunks, int Rows, int Threads>
    using Stream = ListedTileStream<Chunks, Rows, Threads>;

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }  // for Steps and Bits

    // First row, head, batch entry and list of a thread block. kEitherOrder: the grid may have heads on its first axis
    // (forward/block.cuh).
    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        using Base = ListedBlock<BlockRows, ForwardLayout::kEitherOrder>;
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid) : Base(grid.params_) {}
        // Range of keys that may be loaded: all of the sequence, because the list chooses. Unnamed: keys of a step.
        template <int>
        __device__ __forceinline__ int key_first(const Mask&) const {
            return 0;
        }
        template <int>
        __device__ __forceinline__ int key_end(const Mask& mask) const {
            return mask.seqlen_k;
        }
    };
};

}  // namespace volta
