#include "turing/forward/pipelined.cuh"

using Kernel = turing::ForwardPipelined<HEADDIM, THREADS / 32, BLOCK_ROWS / (THREADS / 32) / 16>;
static_assert(HEADDIM == HEADDIM_V && Kernel::kBlockRows == BLOCK_ROWS && Kernel::kStep == STEP &&
                  Kernel::kSharedBytes == SHARED_BYTES,
              "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdParams p) { Kernel::run(p); }
