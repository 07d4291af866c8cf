// Which of several blocks that write parts of one result comes last, and so joins them.
#pragma once

// One more has arrived in the memory at `semaphores`. Returns whether it is the last of `expected`; then nobody has. (No more than
// those arrive, but where a simulation lets some of them find the others there.)
//
// The memory needs no first value: whatever does not begin with the number of this call means that nobody has arrived. So it can be
// anything that the allocator has for the call's stream, and calls on other streams, or replays of a graph, have none to share.
__device__ __forceinline__ bool arrive_is_last(unsigned long long* semaphores, unsigned long long launch_id, int expected) {
    constexpr int kCountBits = 16;
    unsigned long long seen = *reinterpret_cast<volatile unsigned long long*>(semaphores);
    while (true) {
        const int count = seen >> kCountBits == launch_id ? static_cast<int>(seen & ((1u << kCountBits) - 1)) : 0;
        const bool last = count + 1 >= expected;
        const unsigned long long next = last ? 0 : launch_id << kCountBits | (count + 1);
        const unsigned long long found = atomicCAS(semaphores, seen, next);
        if (found == seen) return last;
        seen = found;
    }
}
