// Last kernel of the backward pass with atomics: dq from its fp32 accumulator.
#include "backward/postprocess.cuh"
#include "volta/backward/dq_accumulator.cuh"
#include "volta/backward/row_stats.cuh"

using Kernel = BackwardPostprocess<volta::RowStats, volta::DqAccumulator, BLOCK_ROWS, THREADS>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
