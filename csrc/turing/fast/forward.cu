// Fast forward kernel of the turing family.
#include "turing/fast/forward.cuh"

using Kernel = turing::FastForward<HEADDIM, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16, STEP, 2, 256>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kSharedBytes == SHARED_BYTES,
              "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FastParams p) { Kernel::run(p); }
