#include "volta/forward_shared_q.cuh"

using Kernel = volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, STEP,
                                     HEADDIM == 96 || HEADDIM == 192 ? 4 : 2>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kSharedBytes == SHARED_BYTES, "src/kernels/forward_table.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdParams p) { Kernel::run(p); }
