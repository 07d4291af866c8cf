// Fused kernel: the whole backward pass in one launch, where a block has all keys of its heads.
#include "volta/backward/warp_specialized.cuh"

using Kernel = volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kStore, HEADDIM_V>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
