// Forward kernel whose warps divide the columns, on a stream-K grid.
#include "volta/forward/column_groups.cuh"
#include "volta/forward/stream_k.cuh"

using Grid = volta::StreamKGrid<BLOCK_ROWS>;
using Kernel = volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS, Grid>;
static_assert(HEADDIM_V == HEADDIM && Kernel::kThreads == THREADS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdStreamKParams p) {
    Kernel::run(p.forward, Grid(p.stream_k));
}
