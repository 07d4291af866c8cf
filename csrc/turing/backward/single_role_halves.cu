// Main kernel for headdim 64: dk, dv, and dq by atomics.
#include "turing/backward/single_role_halves.cuh"

using Kernel = turing::BackwardSingleRoleHalves<HEADDIM, BLOCK_ROWS, STEP, THREADS>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
