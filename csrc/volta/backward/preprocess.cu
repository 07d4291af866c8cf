// First kernel of the backward pass: row statistics, and a cleared dq accumulator.
#include "backward/preprocess.cuh"
#include "volta/backward/row_stats.cuh"

using Kernel = BackwardPreprocess<volta::RowStats, BLOCK_ROWS, THREADS>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { Kernel::run(p); }
