// Grid policy of the volta forward kernels (register_q.cuh, shared_q.cuh: their template argument Grid) under a block-sparse mask.
// A grid policy tells a block its rows, its steps of keys and how it loads them. A list (block_lists.cuh) names the blocks of 64
// keys that 128 query rows of a head see, in part (a bit for each score: MaskBits, forward/block_mask.cuh) or in full.
#pragma once

#include "forward/block_mask.cuh"
#include "listed_steps.cuh"
#include "volta/forward/required_features.cuh"

namespace volta {

// One thread block for each list: its 128 rows, head and batch entry. Lists say in which order blocks take them: longest first.
class BlockMaskGrid : public DataParallelGrid {
    const FwdBlockParams& params_;

public:
    // Iterator over the steps of Step keys, bits that hide scores of a warp's Rows rows, loader of tiles of K and V (Rows keys by
    // Chunks chunks of eight columns, by Threads threads). The base class, one block per row tile, has the rest of the policy:
    // combine_splits(), remat_*(), kHasHeadAndBatchAxes. The second argument of ListedSteps is how many steps loads run ahead:
    // three in register_q.cuh (16 keys a step), else one.
    template <int Step>
    using Steps = ListedSteps<Step, Step == 16 ? 3 : 1>;
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;
    template <int Chunks, int Rows, int Threads>
    using Stream = ListedTileStream<Chunks, Rows, Threads>;

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }  // for Steps and Bits

    // First row, head and batch entry. kEitherOrder: the grid may have heads on its first axis (forward/block.cuh).
    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        using Base = ListedBlock<BlockRows, ForwardLayout::kEitherOrder>;
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid) : Base(grid.params_) {}
        // Keys that may be loaded: all of the sequence, whatever the step (the template argument), because the list chooses.
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
