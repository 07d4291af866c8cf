// Tells the last of several blocks that write partial results, so that it combines them. Used by the decode and stream-K
// kernels.
#pragma once

constexpr int kSemaphoreCountBits = 16;  // lowest bits of a semaphore: blocks that have arrived; above them the launch's id

// Returns true if exactly one block of this launch has arrived. The later of two blocks need not store its results then.
__device__ __forceinline__ bool one_arrived(const unsigned long long* semaphore, unsigned long long launch_id) {
    return *reinterpret_cast<const volatile unsigned long long*>(semaphore) == (launch_id << kSemaphoreCountBits | 1);
}

// Increments a semaphore. Returns true for the last of `expected` blocks, which also resets it. (`>=`, because a simulation may
// start with some blocks counted.) One thread of a block calls it, after every thread's __threadfence() for its results; the
// last block fences again before it reads those of the others.
//
// Memory needs no initialization: a value whose upper bits are not this call's `launch_id` counts as zero. So any scratch
// memory of the call's stream will do. A replay of a CUDA graph has the same memory and id, and finds the semaphore reset.
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
