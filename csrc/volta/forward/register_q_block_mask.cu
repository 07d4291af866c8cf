// Forward kernel with Q in registers, under a block-sparse mask.
#include "volta/forward/block_mask.cuh"
#include "volta/forward/register_q.cuh"

using Kernel = volta::ForwardRegisterQ<HEADDIM, HEADDIM_V, THREADS / 32, volta::BlockMaskGrid>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdBlockParams p) {
    Kernel::run(p.forward, volta::BlockMaskGrid(p));
}
