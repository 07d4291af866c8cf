// Prepares K and V for the fast forward kernel of the turing family.
#include "turing/fast/prepare.cuh"

using Kernel = turing::FastPrepare<HEADDIM, BLOCK_ROWS, THREADS>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FastParams p) { Kernel::run(p); }
