// Forward kernel whose warps divide the columns.
#include "volta/forward/column_groups.cuh"

using Kernel = volta::ForwardColumnGroups<HEADDIM, BLOCK_ROWS>;
static_assert(HEADDIM_V == HEADDIM && Kernel::kThreads == THREADS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdParams p) { Kernel::run(p); }
