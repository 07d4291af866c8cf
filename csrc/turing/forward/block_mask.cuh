// Grid of the turing forward kernels under a block-sparse mask (forward/block_mask.cuh).
#pragma once

#include "forward/block_mask.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

// A thread block for each list of key blocks, which some rows of a head see. In a head the longest list is launched first. kListed:
// blocks visit the keys of a list (Steps), not a range of keys. Compact: takes the fewest registers.
template <bool Compact>
class BlockMaskGrid {
    const FwdBlockParams& params_;

public:
    static constexpr bool kListed = true;
    // Loads of the kernel run up to four steps ahead.
    template <int Step>
    using Steps = ListedSteps<Step, Compact ? 0 : kListedColumns / Step>;
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }

    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid)
            : ListedBlock<BlockRows, ForwardLayout::kEitherOrder>(grid.params_) {}
    };
};

}  // namespace turing
