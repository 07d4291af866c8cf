#include "volta/decode/layout.cuh"

// STEP is the rows of a warp.
using Mainloop = decode::DecodeMainloop<volta::DecodeLayout, STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) {
    decode::Block<Mainloop>::run(p);
}
