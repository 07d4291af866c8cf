// Main kernel under a block-sparse mask: dk, dv, and dq by atomics.
#include "turing/backward/block_mask.cuh"
#include "turing/backward/warp_specialized.cuh"

// Two tiles of Q and dO fit the 64 KB of a block up to headdim 192.
using Kernel = turing::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, HEADDIM <= 192 ? 2 : 1, DqMode::kAtomicAdd,
                                               turing::ListedBlocks>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdBlockParams p) {
    Kernel::run(p.backward, turing::ListedBlocks(p.blocks_t));
}
