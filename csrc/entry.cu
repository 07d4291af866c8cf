// The entry point of every kernel. The build compiles this file once for each row of src/kernels, after the headers that the row
// names (--pre-include). The words in capitals are -D definitions from the row (tools/build/nvrtc.rs). KERNEL is the type whose
// run() is the kernel, PARAMS its parameter block, ARGUMENTS what run() takes of block p. Headers read the numbers of the row's
// tile, for example BLOCK_ROWS and SHARED_BYTES.
#include "volta_fa_params.h"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) KERNEL_NAME(const PARAMS p) { KERNEL::run(ARGUMENTS); }
