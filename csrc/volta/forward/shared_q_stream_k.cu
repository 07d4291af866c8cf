// Forward kernel with Q in shared memory, on a stream-K grid. Blocks have one key group.
#include "volta/forward/shared_q.cuh"
#include "volta/forward/stream_k.cuh"

using Grid = volta::StreamKGrid<BLOCK_ROWS>;
using Kernel =
    volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, STEP, 1, BLOCKS_PER_SM, Grid>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kSharedBytes == SHARED_BYTES, "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdStreamKParams p) {
    Kernel::run(p.forward, Grid(p.stream_k));
}
