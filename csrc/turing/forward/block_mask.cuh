// Grid policy of the turing forward kernel (pipelined.cuh: its template argument Grid) under a block-sparse mask. A grid policy
// tells a thread block its query rows and its steps of keys (16 keys each, the iterations of the main loop). A list
// (block_lists.cuh) names the key blocks, of 64 keys, that 128 query rows of a head see: in full, or in part (partial blocks), with
// a bit for each score (1: it exists). A lane's quad is lane % 4 (turing/mma.cuh).
#pragma once

#include "compact_listed_steps.cuh"
#include "conditional.cuh"  // Conditional<B, X, Y>::Type: X if B, else Y
#include "forward/block_mask.cuh"  // ListedBlock: a block's list and rows; MaskBits
#include "listed_block_steps.cuh"
#include "listed_steps.cuh"
#include "turing/forward/layout.cuh"  // OperandA; ForwardLayout: query first_query() + row_slot(h) is a lane's row h

namespace turing {

// One thread block for each list: its 128 rows, head and batch entry. The longest list of a head is launched first. Compact:
// whether the kernel's headdim is above 64 (and registers short). Kernels with and without code for score features
// (kHasScoreFeatures: softcap, ALiBi, bias, dropout) have different iterators over a list's steps:
//
//   without             ListedBlockSteps: two loops, over key blocks and over a block's steps. With Compact it computes an entry's
//                       address from its number instead of keeping a pointer: ptxas schedules headdim 128 better so
//   with, not Compact   ListedSteps: one loop; loads an entry of the list a key block ahead
//   with, Compact       CompactListedSteps: one loop, three registers fewer, but it waits for loads at each key block
template <bool Compact>
class BlockMaskGrid {
    const FwdBlockParams& params_;

public:
    static constexpr bool kListed = true;  // thread blocks visit the keys of a list, not a range of keys
    static constexpr bool kBlockLoop = !kHasScoreFeatures;  // two loops; with score features they would spill at headdim 256
    // The iterator, for steps of Step keys. ListedSteps also tells the keys of steps up to a key block (kListedColumns: 64 keys)
    // later, because the kernel's loads run up to four steps of 16 keys ahead.
    template <int Step>
    using Steps = typename Conditional<
        kBlockLoop, ListedBlockSteps<Step, Compact>,
        typename Conditional<Compact, CompactListedSteps<Step>, ListedSteps<Step, kListedColumns / Step>>::Type>::Type;
    // Loads the bits of partial key blocks for a warp's Rows rows, a word a lane, and hides the scores that do not exist.
    template <int Rows, int Step>
    using Bits = MaskBits<Rows, Step>;  // its load(), combine() and apply_to() are called by pipelined.cuh

    __device__ __forceinline__ explicit BlockMaskGrid(const FwdBlockParams& params) : params_(params) {}
    __device__ __forceinline__ const BlockLists& lists() const { return params_.blocks; }  // for Steps and Bits

    // First row, head, batch entry and list of a thread block. kEitherOrder: the grid may have heads on its first axis
    // (forward/block.cuh).
    template <int BlockRows>
    struct Block : ListedBlock<BlockRows, ForwardLayout::kEitherOrder> {
        __device__ __forceinline__ Block(const Problem&, const BlockMaskGrid& grid)
            : ListedBlock<BlockRows, ForwardLayout::kEitherOrder>(grid.params_) {}
    };

    // Loads rows of Q, from `row` on, of the `rows` that exist, as operand A: q[mt][c][h] is the lane's row h of row tile mt (16
    // rows), chunk c (8 columns). `base`: address of row 0. This function issues all loads; end_load_queries(), after other loads,
    // flips signs (sign_flip: 0x80008000 for a negative softmax_scale, else 0). load_queries() (layout.cuh) does both, but waits
    // for a group of loads before it issues the next: a short list has too few steps to hide that.
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
