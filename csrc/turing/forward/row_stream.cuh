// Loads of K and V for the turing forward kernel (pipelined.cuh): from global memory to the ring in shared memory, without
// branches or predicates on rows.
#pragma once

#include "tile.cuh"

namespace turing {

// Streams steps of Step rows of K or V, one chunk of a row at a time. Past the last row it loads the last row again: those
// scores are masked, and 0 times an existing row adds no new NaN. If a step has fewer chunks than threads, the last threads
// take none. Rows in shared memory are keys in the order of Layout::key_of_row.
template <class Layout, int Chunks, int Step, int Threads>
struct RowStream {
    static constexpr int kPasses = (Step * Chunks + Threads - 1) / Threads;
    static constexpr int kRowsPerPass = Step / kPasses;
    static constexpr bool kAllTakePart = kRowsPerPass * Chunks == Threads;
    static_assert(kRowsPerPass * kPasses == Step && kRowsPerPass * Chunks <= Threads && kRowsPerPass % 8 == 0,
                  "the rows of one thread have the same swizzle");
    // From a thread's key in one pass to that in the next.
    static constexpr int kKeysToNextPass = kPasses == 1 ? 0 : Layout::key_of_row(kRowsPerPass);

    const unsigned short* column;  // the thread's chunk of row 0; past the columns, the row's last chunk
    bool takes_part, inside;  // whether the thread moves anything; whether its chunk is inside the matrix

    __device__ __forceinline__ RowStream(int thread, const unsigned short* matrix, int columns) {
        const int chunk = thread % Chunks, last = columns / kChunk - 1;
        column = matrix + min(chunk, last) * kChunk;
        takes_part = kAllTakePart || thread / Chunks < kRowsPerPass;
        inside = chunk <= last;
    }
    // The thread's first key of a step.
    __device__ __forceinline__ static int key_of(int thread) { return Layout::key_of_row(thread / Chunks); }
    // Where the thread's chunk goes in slot 0.
    __device__ __forceinline__ static unsigned offset(int thread) { return swizzled<Chunks>(thread / Chunks, thread % Chunks); }

    // Loads pass number `pass` of the step whose first key, for this thread, is `key`. OnlyInside: chunks past the columns keep
    // what the registers held.
    template <bool OnlyInside>
    __device__ __forceinline__ void load(uint4& data, int pass, unsigned row_stride, int key, int last) const {
        load_from<OnlyInside>(data, rows_after(column, min(key + pass * kKeysToNextPass, last), row_stride));
    }
    template <bool OnlyInside>
    __device__ __forceinline__ void load_from(uint4& data, const unsigned short* from) const {
        if (!takes_part) return;
        if (OnlyInside)
            load_global_if(inside, data, from);
        else
            data = load_global(from);
    }
    __device__ __forceinline__ void store(const uint4& data, int pass, unsigned address) const {
        if (!takes_part) return;
        store_shared(address + pass * kRowsPerPass * Chunks * kChunkBytes, data);
    }
};

}  // namespace turing
