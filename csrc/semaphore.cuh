// Tells the last of several blocks that write partial results of the same rows, so that it combines them: no block waits. Used by
// the decode and stream-K kernels, with a semaphore for each tile of rows that several blocks share.
#pragma once

constexpr int kSemaphoreCountBits = 16;  // lowest bits of a semaphore: blocks that have arrived; above them the id of the launch

// Returns true if exactly one block of this launch has arrived. The later of two blocks need not store its results then.
__device__ __forceinline__ bool one_arrived(const unsigned long long* semaphore, unsigned long long launch_id) {
    return *reinterpret_cast<const volatile unsigned long long*>(semaphore) == (launch_id << kSemaphoreCountBits | 1);
}

// Increments a semaphore. Returns true for the last of `expected` blocks, which also resets it to 0. (`>=`, because a simulation of
// part of a grid starts with some blocks counted.) One thread of a block calls it, after every thread's __threadfence() for its
// results; the last block fences again before it reads those of the others.
//
// Memory needs no initialization: a value whose upper bits are not `launch_id`, 48 bits that no other call has, counts as zero. So
// any scratch memory of the call's stream will do. A CUDA graph's replay has the same memory and id, and finds the semaphore reset.
__device__ __forceinline__ bool arrive_is_last(unsigned long long* semaphore, unsigned long long launch_id, int expected) {
    unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(semaphore);
    while (true) {
        const int count = seen >> kSemaphoreCountBits == launch_id ? static_cast<int>(seen & ((1u << kSemaphoreCountBits) - 1)) : 0;
        const bool last = count + 1 >= expected;
        const unsigned long long next = last ? 0 : launch_id << kSemaphoreCountBits | (count + 1);
        const unsigned long long found = atomicCAS(semaphore, seen, next);
        if (found == seen) return last;
        seen = found;
    }
}

// Counts this block at a semaphore, after each thread has stored its results and fenced. Returns true in all threads of the last of
// `expected` blocks, which may then read the results of the others. All threads of the block call it.
__device__ __forceinline__ bool is_last_block(unsigned long long* semaphore, unsigned long long launch_id, int expected) {
    __syncthreads();
    const bool last = threadIdx.x == 0 && arrive_is_last(semaphore, launch_id, expected);
    if (!__syncthreads_or(last)) return false;
    __threadfence();  // other blocks' results are read after the count
    return true;
}
