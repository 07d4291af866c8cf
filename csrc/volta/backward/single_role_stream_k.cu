// Main kernel for small headdims on a stream-K grid: dk, dv, and dq by atomics.
#include "volta/backward/single_role.cuh"
#include "volta/backward/stream_k.cuh"

using Kernel = volta::BackwardSingleRole<HEADDIM, BLOCK_ROWS, STEP, THREADS, DqMode::kAtomicAdd, volta::StreamKKeyBlock>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && HEADDIM_V == HEADDIM, "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdStreamKParams p) {
    Kernel::run(p.backward, volta::StreamKKeyBlock(p.stream_k));
}
