#include "volta/decode/latents_pipelined.cuh"

using Family = volta::PipelinedLatents<BLOCK_ROWS / 8, THREADS / 32>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) { decode::Block<Family>::run(p); }
