// Main kernel: dk, dv, and dq by atomics.
#include "volta/backward/warp_specialized.cuh"

using Kernel = volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kAtomicAdd, HEADDIM_V>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
