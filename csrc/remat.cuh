// Control over what the compiler keeps in registers: values to keep, and special registers to read again (remat_*:
// rematerialization, as in CUTLASS). Registers limit most kernels. Used by all attention kernels.
#pragma once

// Hides from the compiler how x is computed. It could otherwise compute x from thread indices again in every iteration, instead
// of keeping it in a register.
__device__ __forceinline__ int keep_in_register(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

// Reads threadIdx.x again (rematerialization, as in CUTLASS), for code that runs rarely: what is derived from it is computed
// there, and holds no register elsewhere.
__device__ __forceinline__ int remat_thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// The same for blockIdx.x, y and z.
__device__ __forceinline__ int remat_block_index() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}
__device__ __forceinline__ int remat_block_head() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(x));
    return x;
}
__device__ __forceinline__ int remat_block_batch() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(x));
    return x;
}
