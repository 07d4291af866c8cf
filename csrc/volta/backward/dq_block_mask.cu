// dq of the backward pass without atomics, under a block-sparse mask.
#include "backward/block_mask.cuh"
#include "volta/backward/dq.cuh"

using Kernel = volta::BackwardDq<HEADDIM, BLOCK_ROWS, STEP, THREADS, ListedBlocks>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdBlockParams p) {
    Kernel::run(p.backward, ListedBlocks(p.blocks));
}
