// Forward kernel with Q in shared memory.
#include "volta/forward/shared_q.cuh"

// Blocks of at least 128 rows have each row in one warp. Smaller ones split the keys between two groups of warps.
constexpr int kKeyGroups = BLOCK_ROWS < 128 ? 2 : 1;
using Kernel = volta::ForwardSharedQ<HEADDIM, HEADDIM_V, THREADS / 32, BLOCK_ROWS * kKeyGroups / (THREADS / 32) / 16,
                                     STEP / kKeyGroups, kKeyGroups, BLOCKS_PER_SM>;
static_assert(Kernel::kBlockRows == BLOCK_ROWS && Kernel::kSharedBytes == SHARED_BYTES, "src/kernels/volta/forward.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const FwdParams p) { Kernel::run(p); }
