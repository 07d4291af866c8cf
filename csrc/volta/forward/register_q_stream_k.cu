// Forward kernel with Q in registers, on a stream-K grid. The macros in capitals come from the table in
// src/kernels/volta/forward.rs. `p.stream_k` has the grid's splits.
#include "volta/forward/register_q.cuh"
#include "volta/forward/stream_k.cuh"

using Grid = volta::StreamKGrid<BLOCK_ROWS>;
using Kernel = volta::ForwardRegisterQ<HEADDIM, HEADDIM_V, THREADS / 32, Grid>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdStreamKParams p) {
    Kernel::run(p.forward, Grid(p.stream_k));
}
