// Second main kernel for large headdims: dq, dk and dv.
#include "backward/stored_gradients.cuh"
#include "volta/backward/stored.cuh"

using Kernel = BackwardGradients<volta::StoredFamily>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && BLOCK_ROWS == kStoredRows && STEP == kStagedTerms &&
                  THREADS == kStagedThreads,
              "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdStoredParams p) {
    Kernel::run(p.backward, p.stored);
}
