// dk, dv and, atomically, dq.
#include "volta/backward/split.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { volta::backward_split<true>(p); }
