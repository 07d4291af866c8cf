// Grid of the turing forward kernel (pipelined.cuh) under a block-sparse mask. A grid is a template argument that tells a thread
// block its rows and its steps of keys (16 keys each). A list names the blocks of 64 keys that 128 query rows see
// (block_lists.cuh); of a partial block only some scores exist, as its tile of bits says. A lane's quad is lane % 4
// (turing/mma.cuh).
#pragma once

#include "compact_listed_steps.cuh"
#include "conditional.cuh"
#include "forward/block_mask.cuh"
#include "listed_block_steps.cuh"
#include "listed_steps.cuh"
#include "turing/forward/layout.cuh"

namespace turing {

// A thread block for each list. In a head the longest list is launched first. kListed: blocks visit the keys of a list (Steps), not
// a range of keys. Compact: the kernel's headdim is above 64. Then generic kernels (score features chosen by parameters) take
// CompactListedSteps, which holds fewer registers but waits for loads. Other kernels always take ListedBlockSteps; with Compact it
// indexes entries instead of keeping a pointer, because ptxas schedules headdim 128 better so.
template <bool Compact>
class BlockMaskGrid {
    const FwdBlockParams& params_;

public:
    static constexpr bool kListed = true;
    // Whether the kernel loops over listed key blocks, and in these over steps. Generic kernels have one: two spill at headdim 256.
    static constexpr bool kBlockLoop = !kHasScoreFeatures;
    // Iterator over the steps, of Step keys, of a list. ListedSteps looks a block ahead (kListedColumns, 64, keys), because the
    // kernel's loads run up to four steps ahead (kAhead + 1, pipelined_parts.cuh).
    template <int Step>
    using Steps = typename Conditional<
        kBlockLoop, ListedBlockSteps<Step, Compact>,
        typename Conditional<Compact, CompactListedSteps<Step>, ListedSteps<Step, kListedColumns / Step>>::Type>::Type;
    // Loads the bits of partial blocks for a warp's Rows rows, a word a lane, and hides the scores that do not exist.
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }  // for Steps and Bits

    // First row, head, batch entry and list of a thread block. kEitherOrder: the grid may have heads on its first axis
    // (forward/block.cuh).
    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid)
            : ListedBlock<BlockRows, ForwardLayout::kEitherOrder>(grid.params_) {}
    };

    // Loads rows of Q, from `row` on, of `rows` that exist (`base`: row 0), as operand A, as load_queries() (layout.cuh) does, but
    // in two parts: this one issues all loads, end_load_queries() flips signs for a negative softmax_scale. load_queries() waits
    // for groups of loads, which short lists do not hide. RowTiles: tiles of 16 rows. Chunks: chunks of 8 columns.
    template <int RowTiles, int Chunks>
    __device__ __forceinline__ static void begin_load_queries(OperandA (&q)[RowTiles][Chunks], const Operand& from,
                                                              const unsigned short* base, int row, int rows, int headdim) {
        const Lane lane(threadIdx.x & 31);
        unrolled<RowTiles, 2>([&](int mt, int h) {
            const int i = row + 16 * mt + ForwardLayout::row_slot(h) + ForwardLayout::first_query(lane);
            const unsigned short* source = base + i * from.row_stride + 2 * lane.quad;
#pragma unroll
            for (int c = 0; c < Chunks; c++) {
                int x = 0;
                load_int_if(i < rows && c * kChunk < headdim, x, reinterpret_cast<const int*>(source + c * kChunk));
                q[mt][c][h] = x;
            }
        });
    }
    template <int RowTiles, int Chunks>
    __device__ __forceinline__ static void end_load_queries(OperandA (&q)[RowTiles][Chunks],
                                                            const OperandA (&loaded)[RowTiles][Chunks], u32 sign_flip) {
        unrolled<RowTiles, Chunks, 2>([&](int mt, int c, int h) { q[mt][c][h] = loaded[mt][c][h] ^ sign_flip; });
    }
};

}  // namespace turing
