// dq of the backward pass without atomics, for large headdims.
#include "turing/backward/dq_warp_specialized.cuh"

using Kernel = turing::BackwardDqWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
