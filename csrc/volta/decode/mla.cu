// Decode kernel for multi-head latent attention (MLA, DeepSeek): a cache of latents, 512 + 64 columns.
#include "volta/decode/mla.cuh"

using Mainloop = volta::MlaMainloop<THREADS / 32>;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL(const DecodeParams p) {
    decode::Block<Mainloop>::run(p);
}
