// Operand tiles of the backward kernels for large headdims (store_scores.cuh, stored_gradients.cuh): 128 by 128 elements of a
// product, in steps of 32 terms (k of the product: columns of the headdim, queries or keys). A step's two operands lie in one of
// two buffers of shared memory, so that a step has one barrier. While a step multiplies, loads of the next step are in flight.
//
// The kernel's row in src/kernels gives BLOCK_ROWS (rows of a tile), STEP (terms of a step), THREADS and SHARED_BYTES (of a
// block).
#pragma once

#include "tile.cuh"

constexpr int kStagedThreads = 128, kStagedRows = 128, kStagedTerms = 32;
constexpr int kStagedTile = kStagedRows * kStagedTerms * 2, kStagedBuffer = 2 * kStagedTile;  // bytes
static_assert(2 * kStagedBuffer == SHARED_BYTES && kStagedRows == BLOCK_ROWS && kStagedTerms == STEP && kStagedThreads == THREADS,
              "the row in src/kernels and the kernel disagree");

// Tiles whose columns are a step's terms: 128 rows of 32.
struct TermColumns {
    static constexpr int kChunks = kStagedTerms / kChunk, kRowBytes = kChunks * kChunkBytes, kRows = kStagedRows;
};
// Tiles whose rows are a step's terms: 32 rows of 128 columns. kStep: the rows that volta's accumulate() sums over
// (volta/backward/products.cuh).
struct TermRows {
    static constexpr int kChunks = kStagedRows / kChunk, kRowBytes = kChunks * kChunkBytes, kRows = kStagedTerms, kStep = kRows;
};

// A thread's part of a tile, from global memory to shared memory.
template <class Shape>
struct StagedTile {
    static constexpr int kRowsAtOnce = kStagedThreads / Shape::kChunks, kLoads = Shape::kRows / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0, "the rows of a thread share their swizzle");
    uint4 data[kLoads];

    static __device__ __forceinline__ int row() { return threadIdx.x / Shape::kChunks; }
    static __device__ __forceinline__ int column() { return threadIdx.x % Shape::kChunks * kChunk; }

    // Loads a tile whose element (0, 0) is at `first`. Its first `rows` rows and `columns` columns exist; the rest becomes 0.
    __device__ __forceinline__ void load(const unsigned short* first, long long row_stride, int rows, int columns) {
        const unsigned short* from = first + row() * row_stride + column();
        if (rows >= Shape::kRows && columns >= Shape::kChunks * kChunk) {
#pragma unroll
            for (int i = 0; i < kLoads; i++) data[i] = load_global(from + i * kRowsAtOnce * row_stride);
        } else {
            __syncwarp();  // keeps the compiler from turning the branch into predicates, which every tile would pay for
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                data[i] = zero_chunk();
                if (row() + i * kRowsAtOnce < rows && column() < columns)
                    data[i] = load_global(from + i * kRowsAtOnce * row_stride);
            }
        }
    }
    // `mask`: Problem::sign_flip, 0x80008000 if softmax_scale is negative, else 0.
    __device__ __forceinline__ void flip_signs(unsigned mask) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) data[i] = flipped(data[i], mask);
    }
    // `first_row`: the shared row of the thread's first row. The order may permute rows only within aligned groups of kRowsAtOnce.
    __device__ __forceinline__ void store(unsigned tile, int first_row) const {
        const unsigned to = tile + swizzled<Shape::kChunks>(first_row, column() / kChunk);
#pragma unroll
        for (int i = 0; i < kLoads; i++) store_shared(to + i * kRowsAtOnce * Shape::kRowBytes, data[i]);
    }
    __device__ __forceinline__ void store(unsigned tile) const { store(tile, row()); }
};

// Runs `steps` steps, at least one. load(i) loads the tiles of step i, store(buffer) stores what was loaded last, and
// multiply(buffer) multiplies. The last barrier is after the last product, so the caller may reuse both buffers.
template <class Load, class Store, class Multiply>
__device__ __forceinline__ void staged_steps(unsigned shared, int steps, Load load, Store store, Multiply multiply) {
    load(0);
    store(shared);
    if (steps > 1) load(1);
    __syncthreads();
    unsigned buffer = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        multiply(shared + buffer);
        buffer ^= kStagedBuffer;
        if (step + 1 < steps) store(shared + buffer);
        if (step + 2 < steps) load(step + 2);
        __syncthreads();
    }
}
