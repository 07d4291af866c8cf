// Main kernel under a block-sparse mask: dk, dv, and dq by atomics.
#include "backward/block_mask.cuh"
#include "volta/backward/warp_specialized.cuh"

using Kernel = volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kAtomicAdd, HEADDIM, ListedBlocks>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdBlockParams p) {
    Kernel::run(p.backward, ListedBlocks(p.blocks_t));
}
