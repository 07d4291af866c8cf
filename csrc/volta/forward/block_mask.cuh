// Grid of the volta forward kernels under a block-sparse mask (forward/block_mask.cuh). A grid tells a kernel's block its rows, its
// steps of keys and how it loads them. A list names the blocks of 64 keys that 128 query rows see (block_lists.cuh).
#pragma once

#include "forward/block_mask.cuh"
#include "listed_steps.cuh"
#include "volta/forward/required_features.cuh"

namespace volta {

// One block for each list: its rows, head and batch entry, the longest list of a head first.
class BlockMaskGrid : public DataParallelGrid {
    const FwdBlockParams& params_;

public:
    // With 16 keys a step, Q in registers, loads run three steps ahead.
    template <int Step>
    using Steps = ListedSteps<Step, Step == 16 ? 3 : 1>;
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;
    template <int Chunks, int Rows, int Threads>
    using Stream = ListedTileStream<Chunks, Rows, Threads>;

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }

    // kEitherOrder: the grid may have heads on its first axis (forward/block.cuh).
    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        using Base = ListedBlock<BlockRows, ForwardLayout::kEitherOrder>;
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid) : Base(grid.params_) {}
        // Keys that may be loaded, whatever the list and the step (the template argument).
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
