// dk, dv and, atomically, dq.
#include "volta/backward/small.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const BwdParams p) { volta::backward_small<true>(p); }
