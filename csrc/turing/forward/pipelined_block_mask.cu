// Forward kernel of the turing family under a block-sparse mask.
#include "turing/forward/block_mask.cuh"
#include "turing/forward/pipelined.cuh"

// Slots of the ring that fit shared memory: four or eight.
constexpr int kSlots = SHARED_BYTES / (2 * STEP * (HEADDIM + HEADDIM_V)) / 4 * 4;
using Grid = turing::BlockMaskGrid<(HEADDIM > 64)>;
using Kernel = turing::ForwardPipelined<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, kSlots, Grid>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdBlockParams p) {
    Kernel::run(p.forward, Grid(p));
}
