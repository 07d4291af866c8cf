// Operands of the backward kernels that store P and dS (store_scores.cuh, stored_gradients.cuh: large headdims, and fp32 tensors of
// any headdim). A block computes 128 by 128 elements of a product, or 128 by 64, in steps of 32 terms (k of the product: columns of
// the headdim, queries or keys). All elements are fp16: an fp32 number is two, a high and a low part, whose products have steps of
// their own. A step's two operand tiles lie in one of two buffers of shared memory, so that a step has one barrier. While a step
// multiplies, loads of the next are in flight.
//
// A warp has 64 by 64 elements of the product, and a block has two warps for its rows. Blocks of gradients of at most 64 columns
// have one warp for their columns (64 threads), others two: so a product has as many columns as the block has threads.
//
// The kernel's row in src/kernels gives BLOCK_ROWS (rows of a tile), STEP (terms of a step), THREADS and SHARED_BYTES.
#pragma once

#include "tile.cuh"  // kChunk: 8 elements, kChunkBytes: 16; swizzled(), chunk_after(): shared addresses

constexpr int kStagedThreads = THREADS, kStagedRows = 128, kStagedColumns = kStagedThreads, kStagedTerms = 32;
constexpr int kStagedTile = kStagedRows * kStagedTerms * 2;  // bytes of the first operand
constexpr int kStagedBuffer = kStagedTile + kStagedColumns * kStagedTerms * 2;  // bytes of both operands
static_assert(2 * kStagedBuffer == SHARED_BYTES && kStagedRows == BLOCK_ROWS && kStagedTerms == STEP && kStagedThreads % 64 == 0,
              "the row in src/kernels and the kernel disagree");

// Tiles whose columns are a step's terms: 128 rows of 32. kChunks: 16-byte chunks of a row.
struct TermColumns {
    static constexpr int kChunks = kStagedTerms / kChunk, kRowBytes = kChunks * kChunkBytes, kRows = kStagedRows;
};
// Tiles whose rows are a step's terms: 32 rows of `Columns` columns. kStep: volta's name for the rows that a product sums.
template <int Columns>
struct TermRowsOf {
    static constexpr int kChunks = Columns / kChunk, kRowBytes = kChunks * kChunkBytes, kRows = kStagedTerms, kStep = kRows;
};
using TermRows = TermRowsOf<kStagedRows>;  // of the first operand, A
using OtherTermRows = TermRowsOf<kStagedColumns>;  // of the second, B; the output's tile has its row length too

// A thread's chunks (16 bytes, eight elements) of a tile, from global memory to shared memory. Registers hold one of `Parts` equal
// groups of rows at a time: of two in volta's gradients of fp32 tensors (kLoadParts), which then spill least, else of one. From
// here on a part is such a group, of the same step, and not a high or low part. Shared rows are swizzled (tile.cuh), in a pattern
// that repeats every eight rows.
template <class Shape, int Parts = 1>
struct StagedTile {
    static constexpr int kRows = Shape::kRows / Parts;  // of a part
    static constexpr int kRowsAtOnce = kStagedThreads / Shape::kChunks, kLoads = kRows / kRowsAtOnce;
    static_assert(kLoads * kRowsAtOnce * Parts == Shape::kRows && kRows % 8 == 0, "parts are equal, with the same swizzles");
    static_assert(kRowsAtOnce % 4 == 0, "the rows of a thread have two swizzles at most");
    uint4 data[kLoads];

    static __device__ __forceinline__ int row() { return threadIdx.x / Shape::kChunks; }
    static __device__ __forceinline__ int column() { return threadIdx.x % Shape::kChunks * kChunk; }

    // Loads a part whose element (0, 0) is at `first`. Its first `rows` rows and `columns` columns (a multiple of 8) exist; the
    // rest becomes 0.
    __device__ __forceinline__ void load(const unsigned short* first, long long row_stride, int rows, int columns) {
        const unsigned short* from = first + row() * row_stride + column();
        if (rows >= kRows && columns >= Shape::kChunks * kChunk) {
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
    // Loads part number `part` of the tile at `first`. `rows` and `columns`: of the tile, those that exist.
    __device__ __forceinline__ void load_part(const unsigned short* first, long long row_stride, int rows, int columns, int part) {
        if constexpr (Parts == 1)
            load(first, row_stride, rows, columns);
        else
            load(first + part * kRows * row_stride, row_stride, rows - part * kRows, columns);
    }
    // `mask`: Problem::sign_flip, 0x80008000 if softmax_scale is negative, else 0. Kernels take its magnitude, and flip K instead.
    __device__ __forceinline__ void flip_signs(unsigned mask) {
#pragma unroll
        for (int i = 0; i < kLoads; i++) data[i] = flipped(data[i], mask);
    }
    // Stores the loaded rows to the shared tile. `first_row`: where the thread's first row goes, because volta or turing may
    // permute rows (Family::tile_row of store_scores.cuh), within aligned groups of kRowsAtOnce.
    __device__ __forceinline__ void store(unsigned tile, int first_row) const {
        const unsigned to = tile + swizzled<Shape::kChunks>(first_row, column() / kChunk);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const unsigned shift = i * kRowsAtOnce % 8 ? row_swizzle<Shape::kChunks>(4) : 0;  // 4 rows further: another swizzle
            store_shared((shift ? chunk_after<Shape::kChunks>(to, shift) : to) + i * kRowsAtOnce * Shape::kRowBytes, data[i]);
        }
    }
    __device__ __forceinline__ void store(unsigned tile) const { store(tile, row()); }
    __device__ __forceinline__ void store_part(unsigned tile, int part) const {
        store(Parts == 1 ? tile : tile + part * kRows * Shape::kRowBytes);
    }
};

// Runs `steps` steps, at least one. `shared`: address of both buffers. load(i, part) loads a part of the tiles of step i into
// registers, store(buffer, part) stores what was loaded last to the buffer at that shared address, and multiply(buffer, part)
// computes a part of the product's elements, over all terms of the buffer's step. The last barrier is after the last product, so
// the caller may reuse both buffers.
//
// One part (here and in StagedTile) and no shift are special cases: with empty loops and shifts by 0, ptxas (CUDA 12) schedules
// kernels of one part differently, and turing_bwd_gradients_512 spills.
template <int Parts = 1, class Load, class Store, class Multiply>
__device__ __forceinline__ void staged_steps(unsigned shared, int steps, Load load, Store store, Multiply multiply) {
    load(0, 0);
    store(shared, 0);
    if constexpr (Parts > 1) {
#pragma unroll
        for (int part = 1; part < Parts; part++) {
            load(0, part);
            store(shared, part);
        }
    }
    if (steps > 1) load(1, 0);
    __syncthreads();
    unsigned buffer = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if constexpr (Parts > 1) {
#pragma unroll
            for (int part = 0; part + 1 < Parts; part++) {
                multiply(shared + buffer, part);
                if (step + 1 < steps) store(shared + (buffer ^ kStagedBuffer), part);
                if (step + 1 < steps) load(step + 1, part + 1);
            }
        }
        multiply(shared + buffer, Parts - 1);
        buffer ^= kStagedBuffer;
        if (step + 1 < steps) store(shared + buffer, Parts - 1);
        if (step + 2 < steps) load(step + 2, 0);
        __syncthreads();
    }
}
