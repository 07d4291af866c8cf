// Forward kernel of the turing family whose warps divide the columns.
#include "turing/forward/column_groups.cuh"

using Kernel = turing::ForwardColumnGroups<HEADDIM, BLOCK_ROWS>;
static_assert(HEADDIM_V == HEADDIM && Kernel::kThreads == THREADS && Kernel::kStep == STEP && Kernel::kSharedBytes == SHARED_BYTES,
              "src/kernels/turing/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdParams p) { Kernel::run(p); }
