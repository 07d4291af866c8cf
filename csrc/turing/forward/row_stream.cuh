// Copies K and V for the turing forward kernel (pipelined.cuh): from global memory to registers, and from there to a ring of slots
// in shared memory, without branches or predicates on rows. (sm_75 has no cp.async.) A slot holds the rows of a step, 16 keys, an
// iteration of the main loop; pipelined.cuh says when a step is loaded and stored, and has the barriers. Kernels with a paged cache
// do not call load(): they add a page's offset to `column` and load from there themselves. "Stream" does not mean stream-K. Layout
// is ForwardLayout (layout.cuh), swizzled(row, chunk) a chunk's byte offset in a slot (tile.cuh).
#pragma once

#include "tile.cuh"

namespace turing {

// Streams steps of Step rows of K or V. Chunks: of a row (a chunk is 8 columns, 16 bytes). Threads: of the block. A step takes
// kPasses passes; a thread moves one chunk of a row in each. Past the last row it loads the last row again: those scores are
// masked, and 0 times an existing row adds no new NaN. If a pass has fewer chunks than threads, the last threads take none. Row r
// in shared memory is the step's key number Layout::key_of_row(r), a permutation that the layout of the scores requires. So a
// thread's keys may differ from its rows in shared memory.
template <class Layout, int Chunks, int Step, int Threads>
struct RowStream {
    static constexpr int kPasses = (Step * Chunks + Threads - 1) / Threads;
    static constexpr int kRowsPerPass = Step / kPasses;
    static constexpr bool kAllTakePart = kRowsPerPass * Chunks == Threads;
    static_assert(kRowsPerPass * kPasses == Step && kRowsPerPass * Chunks <= Threads && kRowsPerPass % 8 == 0,
                  "the rows of one thread have the same swizzle");
    // Keys from a thread's in one pass to that in the next. One number is enough: the kernel has at most two passes.
    static constexpr int kKeysToNextPass = kPasses == 1 ? 0 : Layout::key_of_row(kRowsPerPass);

    const unsigned short* column;  // address of the thread's chunk in row 0; past the columns, of the row's last chunk
    bool takes_part, inside;  // whether the thread moves anything; whether its chunk is inside the matrix's columns

    // `matrix`: address of row 0 of K or V of the sequence and KV head; `columns`: those that exist, a multiple of 8.
    __device__ __forceinline__ RowStream(int thread, const unsigned short* matrix, int columns) {
        const int chunk = thread % Chunks, last = columns / kChunk - 1;
        column = matrix + min(chunk, last) * kChunk;
        takes_part = kAllTakePart || thread / Chunks < kRowsPerPass;
        inside = chunk <= last;
    }
    // The thread's key in the first pass, counted from the step's first key.
    __device__ __forceinline__ static int key_of(int thread) { return Layout::key_of_row(thread / Chunks); }
    // Where the thread's chunk of the first pass goes in a slot, bytes.
    __device__ __forceinline__ static unsigned offset(int thread) { return swizzled<Chunks>(thread / Chunks, thread % Chunks); }

    // Loads pass number `pass` of a step. `key`: the thread's key in the first pass, a row of the matrix; `last`: the last key.
    // row_stride: elements. OnlyInside, for K: does not load a chunk past the columns; `data` keeps the zeros with which the caller
    // began. Else, for V, it loads the row's last chunk again: such columns of the output are not stored. load_from() is a part of
    // load(): `from` is the address of the thread's chunk.
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
    // Stores pass number `pass`. `address`: in shared memory, where the thread's chunk of the first pass goes.
    __device__ __forceinline__ void store(const uint4& data, int pass, unsigned address) const {
        if (!takes_part) return;
        store_shared(address + pass * kRowsPerPass * Chunks * kChunkBytes, data);
    }
};

}  // namespace turing
