#include "volta/decode/latents.cuh"

using Family = volta::AttendToLatents<THREADS / 32>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) { decode::Block<Family>::run(p); }
