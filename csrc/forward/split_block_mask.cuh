// Block-sparse masks in the forward kernels of fp32 tensors, which split each number into two fp16 ones: ListedKeys is their
// template argument Keys (split.cuh). A list (block_lists.cuh) names the blocks of 64 keys that 128 query rows see; bits say which
// scores of a partial block exist. A thread block has at most those 128 rows, so several may share a list. (Other forward kernels
// have one block for each list, and start the longest lists first. This grid starts with the last rows, as without lists.) kStep:
// keys of a step, 16; kWarpRows: rows of a warp, 16; kListedRows: rows of a list, 128. remat_*: reads threadIdx again.
#pragma once

#include "compact_listed_steps.cuh"  // CompactListedSteps: iterator over the steps of a list
#include "forward/block_mask.cuh"  // MaskBits: bits of partial blocks; HeadLists, BlockLists: lists in memory
#include "forward/split.cuh"  // RowTileGrid: a thread block for each row tile and head

namespace split {

// The keys of the list that has a block's rows.
class ListedKeys : public RowTileGrid {
    const BlockLists& lists_;

public:
    // The iterator with the fewest registers: with ListedSteps kernels would spill. It waits for a load at each block of 64 keys,
    // every four steps. Ahead: by how many steps the kernel's loads precede their use. This iterator knows the keys of up to 4
    // later steps (64 / kStep), whatever Ahead.
    template <int Ahead>
    using Steps = CompactListedSteps<kStep>;
    struct Bits : MaskBits<kWarpRows, kStep> {
        // Loads the bits of the current step (0 steps ahead), if it is in a partial block. `row`: the warp's first. The lambda
        // returns the lane's row in the list.
        template <class Steps>
        __device__ __forceinline__ void load(const ListedKeys& keys, const Steps& steps, int row) {
            MaskBits<kWarpRows, kStep>::load(keys, steps, 0, [&] {
                return static_cast<unsigned>(row) % kListedRows + static_cast<unsigned>(remat_lane()) % kWarpRows;
            });
        }
    };
    __device__ __forceinline__ explicit ListedKeys(const BlockLists& lists) : lists_(lists) {}
    __device__ __forceinline__ const BlockLists& lists() const { return lists_; }
    // Returns the end of the keys that may be loaded, whatever the list and the block's rows.
    template <int, class Block>
    __device__ __forceinline__ static int end(const Mask& mask, const Block&) {
        return mask.seqlen_k;
    }
    template <int Ahead, int Rows, class Block>
    __device__ __forceinline__ Steps<Ahead> steps(const FwdParams& p, const Block& block, const Mask& mask) const {
        static_assert(kListedRows % Rows == 0, "a block's rows are of one list");
        // first_batch: batch entries of the call's earlier launches; lists count from the call's first
        const HeadLists of_head(lists_, p.lengths.first_batch + block.batch, block.head);
        const struct {  // what CompactListedSteps reads of a block; it ignores the first key, 0: the list has the keys
            const int* list;
        } of_block = {of_head.of(lists_, block.row / kListedRows)};
        return Steps<Ahead>(*this, of_block, 0, mask.seqlen_k);
    }
};

}  // namespace split
