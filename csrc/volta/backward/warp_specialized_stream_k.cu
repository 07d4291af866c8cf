// Main kernel on a stream-K grid: dk, dv, and dq by atomics.
#include "volta/backward/warp_specialized.cuh"
#include "volta/backward/stream_k.cuh"

using Kernel = volta::BackwardWarpSpecialized<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kAtomicAdd, HEADDIM_V, DenseBlocks,
                                              volta::StreamKKeyBlock>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdStreamKParams p) {
    Kernel::run(p.backward, DenseBlocks(), volta::StreamKKeyBlock(p.stream_k));
}
