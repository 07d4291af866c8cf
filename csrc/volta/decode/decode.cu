// Decode kernel of the volta family: attention of few queries over a KV cache (decode/block.cuh, decode/mainloop.cuh).
#include "volta/decode/layout.cuh"

// STEP: rows of a warp.
using Mainloop = decode::DecodeMainloop<volta::DecodeLayout, STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) {
    decode::Block<Mainloop>::run(p);
}
