// First main kernel for large headdims: P and dS.
#include "backward/store_scores.cuh"
#include "turing/backward/stored.cuh"

using Kernel = BackwardScores<turing::StoredFamily>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES && BLOCK_ROWS == kStoredRows && STEP == kStagedTerms &&
                  THREADS == kStagedThreads,
              "the variant table and the kernel disagree");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdStoredParams p) {
    Kernel::run(p.backward, p.stored);
}
