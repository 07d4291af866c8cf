// Forward kernel with Q in shared memory, under a block-sparse mask.
#include "volta/forward/block_mask.cuh"
#include "volta/forward/shared_q.cuh"

using Kernel = volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, STEP, 1, BLOCKS_PER_SM,
                                     volta::BlockMaskGrid>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kSharedBytes == SHARED_BYTES, "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdBlockParams p) {
    Kernel::run(p.forward, volta::BlockMaskGrid(p));
}
