// Block-sparse masks in the forward kernels of fp32 tensors (split.cuh, block_lists.cuh). A block has the rows of a list or a part
// of them. So blocks start in the order of rows, not of the lists' lengths.
#pragma once

#include "compact_listed_steps.cuh"
#include "forward/block_mask.cuh"
#include "forward/split.cuh"

namespace split {

// The keys of the list that has a block's rows.
class ListedKeys {
    const BlockLists& lists_;

public:
    // ListedSteps would spill. The loads that this iterator waits for are short beside four steps.
    template <int Ahead>
    using Steps = CompactListedSteps<kStep>;
    struct Bits : MaskBits<kWarpRows, kStep> {
        // Loads the bits of this step, if it has some. `row`: the warp's first.
        template <class Steps>
        __device__ __forceinline__ void load(const ListedKeys& keys, const Steps& steps, int row) {
            MaskBits<kWarpRows, kStep>::load(keys, steps, 0, [&] {
                return static_cast<unsigned>(row) % kListedRows + static_cast<unsigned>(remat_lane()) % kWarpRows;
            });
        }
    };
    __device__ __forceinline__ explicit ListedKeys(const BlockLists& lists) : lists_(lists) {}
    __device__ __forceinline__ const BlockLists& lists() const { return lists_; }
    // Keys from this one on are not loaded, whatever the list.
    __device__ __forceinline__ static int end(const Mask& mask, int, int) { return mask.seqlen_k; }
    template <int Ahead, int Rows, class Block>
    __device__ __forceinline__ Steps<Ahead> steps(const FwdParams& p, const Block& block, const Mask& mask) const {
        static_assert(kListedRows % Rows == 0, "a block's rows are of one list");
        const HeadLists of_head(lists_, p.lengths.first_batch + block.batch, block.head);
        const struct {
            const int* list;
        } of_block = {of_head.of(lists_, block.row / kListedRows)};
        return Steps<Ahead>(*this, of_block, 0, mask.seqlen_k);
    }
};

}  // namespace split
