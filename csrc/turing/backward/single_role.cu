// Main kernel for small headdims: dk, dv, and dq by atomics.
#include "turing/backward/single_role.cuh"

using Kernel = turing::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kAtomicAdd>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
