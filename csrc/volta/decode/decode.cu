#include "volta/decode/decode.cuh"

// STEP is the rows of a warp.
using Family = volta::Decode<STEP / 8, BLOCK_ROWS / STEP, THREADS / 32>;
using Kernel = decode::Block<Family>;
static_assert(Kernel::kSharedBytes == SHARED_BYTES, "src/kernels/volta/decode.rs");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) { Kernel::run(p); }
