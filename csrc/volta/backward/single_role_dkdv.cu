// Main kernel for small headdims without atomics: dk and dv; dq.cu computes dq.
#include "volta/backward/single_role.cuh"

using Kernel = volta::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kSeparate>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
