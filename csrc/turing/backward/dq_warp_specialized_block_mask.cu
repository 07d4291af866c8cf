// dq of the backward pass without atomics, under a block-sparse mask, for large headdims.
#include "turing/backward/block_mask.cuh"
#include "turing/backward/dq_warp_specialized.cuh"

using Kernel = turing::BackwardDqWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, turing::ListedBlocks>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdBlockParams p) {
    Kernel::run(p.backward, turing::ListedBlocks(p.blocks));
}
