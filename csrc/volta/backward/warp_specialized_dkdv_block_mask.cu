// Main kernel without atomics, under a block-sparse mask: dk and dv; dq_block_mask.cu computes dq.
#include "backward/block_mask.cuh"
#include "volta/backward/warp_specialized.cuh"

using Kernel = volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kSeparate, HEADDIM, ListedBlocks>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdBlockParams p) {
    Kernel::run(p.backward, ListedBlocks(p.blocks_t));
}
