// Tiles of fp16 matrices: loads from global memory to registers, stores to shared memory, in 16-byte chunks of 8 elements. Used by
// forward, backward, decode, cast and indexer kernels. Tensors' elements are `unsigned short`, the bits of fp16.
//
// sm_70 and sm_75 have no cp.async: a tile is loaded into registers early, and stored to shared memory once the tile before it has
// been used. Shared rows are swizzled (chunks permuted), so that operand loads have no bank conflicts. TileLoader pads a tile with
// zeros: columns up to the kernel's headdim, and rows, so that inf and NaN of stale data stay out of the products. TileStream does
// not load rows and columns outside the matrix: registers keep their contents, and the caller clears them.
#pragma once

#include "ptx.cuh"  // load_global_if(), store_shared(): 16 bytes
#include "unrolled.cuh"
#include "volta_fa_params.h"  // generated from src/params: Operand (read) and Output (written), strides in elements

constexpr int kChunk = 8;  // fp16 elements of a chunk
constexpr int kChunkBytes = 16;

// Loads a chunk from global memory, by the read-only path.
__device__ __forceinline__ uint4 load_global(const unsigned short* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

// Sets a lane's elements of a warp's tiles of accumulators to 0: arrays of any number of dimensions.
__device__ __forceinline__ void clear_tiles(float& x) { x = 0.f; }
template <class T, int N>
__device__ __forceinline__ void clear_tiles(T (&tiles)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) clear_tiles(tiles[i]);
}

__device__ __forceinline__ uint4 zero_chunk() { return make_uint4(0, 0, 0, 0); }

// Flips the signs of eight fp16 values if mask is 0x80008000; leaves them if it is 0. Problem::sign_flip is the mask of a negative
// softmax_scale, so that kernels compute with its magnitude.
__device__ __forceinline__ uint4 flipped(const uint4& x, unsigned mask) {
    return make_uint4(x.x ^ mask, x.y ^ mask, x.z ^ mask, x.w ^ mask);
}

// Address of row 0 of one head of one batch entry.
__device__ __forceinline__ const unsigned short* head_base(const Operand& x, int batch, int head) {
    return x.ptr + batch * x.batch_stride + head * x.head_stride;
}
__device__ __forceinline__ unsigned short* head_base(const Output& x, int batch, int head) {
    return x.ptr + batch * x.batch_stride + head * x.head_stride;
}

// Address of row `first` of one head of one batch entry.
template <class Tensor>
__device__ __forceinline__ auto rows_of(const Tensor& x, int batch, int head, int first) {
    return head_base(x, batch, head) + first * x.row_stride;
}

// Address of an element of an output that holds fp32, though Output's pointer is that of fp16. `element`: its address if elements
// were fp16, as rows_of() computes it.
__device__ __forceinline__ float* fp32_element(const Output& out, const unsigned short* element) {
    return reinterpret_cast<float*>(out.ptr) + (element - out.ptr);
}

// Byte offset of chunk (row, chunk) in a swizzled tile without padding. Chunks: chunks of a row, a multiple of 4. Chunks of one
// column in eight consecutive rows fall into all eight 16-byte bank groups, and so do four consecutive chunks of two consecutive
// rows. Bits 1 and 2 of the row are XORed into bits 0 and 1 of the chunk, bit 0 of the row into bit 2. In rows of 4 or 12 chunks
// (64 or 192 bytes) the pitch moves odd rows by four chunks, so that bit 0 is not needed.
template <int Chunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    static_assert(Chunks % 4 == 0, "the swizzle permutes groups of four chunks");
    const int parity = Chunks % 8 == 0 ? (row & 1) << 2 : 0;
    return (row * Chunks + (chunk ^ ((row >> 1) & 3) ^ parity)) * kChunkBytes;
}

// Returns the address of the chunk whose number is `chunks` higher in the same row, from a swizzled address: an XOR, because the
// swizzle is one too. kGroup: chunks within which an XOR reaches it, a row of 2^n chunks or a group that the swizzle permutes.
// Modulo kGroup, `chunks` shares no bit with the chunk's number, so that XOR adds. Tiles begin at multiples of kGroup chunks, so
// that it changes no bit of the tile's own address.
template <int Chunks>
__device__ __forceinline__ unsigned chunk_after(unsigned address, unsigned chunks) {
    constexpr bool kPowerOf2 = (Chunks & (Chunks - 1)) == 0;
    constexpr unsigned kGroup = kPowerOf2 ? Chunks : Chunks % 8 == 0 ? 8 : 4;
    if (kPowerOf2) return address ^ chunks * kChunkBytes;
    return (address ^ chunks % kGroup * kChunkBytes) + chunks / kGroup * (kGroup * kChunkBytes);
}
// Returns by how many chunks the swizzle moves a chunk from a row to the one `rows` further, where `rows` and the first row's
// number have no common bit among bits 0 to 2. That row's chunk is at chunk_after(address, row_swizzle(rows)) + rows * Chunks *
// kChunkBytes.
template <int Chunks>
__device__ __forceinline__ unsigned row_swizzle(unsigned rows) {
    return swizzled<Chunks>(rows % 8, 0) / kChunkBytes - rows % 8 * Chunks;
}

// Threads that load one row: 8, which cover a whole 128-byte line, or 4 in rows that 8 threads do not divide.
__device__ constexpr int threads_per_row(int chunks) { return chunks % 8 == 0 ? 8 : 4; }

// Loads tiles of Rows rows by 8 * Chunks columns, one after the other down a matrix: global memory to registers by load(),
// registers to shared memory by store(). Threads threads share a tile: in a pass each loads chunks of one row, kThreadsPerRow
// apart. The registers are live from load() to store() only. A tile inside the matrix costs plain loads. One that reaches past its
// rows or columns takes a branch that clears the registers first.
template <int Chunks, int Rows, int Threads>
struct TileLoader {
    static constexpr int kThreadsPerRow = threads_per_row(Chunks);
    static constexpr int kRowsPerPass = Threads / kThreadsPerRow;
    static constexpr int kPasses = Rows / kRowsPerPass;
    static constexpr int kChunksPerRow = Chunks / kThreadsPerRow;
    static_assert(kPasses * kRowsPerPass == Rows && kChunksPerRow * kThreadsPerRow == Chunks,
                  "the tile has to divide evenly among the threads");

    uint4 data[kPasses][kChunksPerRow];
    const unsigned short* next;  // the thread's first chunk of the next tile
    long long row_stride;  // elements
    int row, chunk;  // the thread's first
    int chunks;  // that exist in a row

    // `base`: first element of the first tile. `thread`: number among the Threads. `columns`: of the matrix.
    __device__ __forceinline__ TileLoader(int thread, const unsigned short* base, long long row_stride_, int columns)
        : row_stride(row_stride_), row(thread / kThreadsPerRow), chunk(thread % kThreadsPerRow), chunks(columns / kChunk) {
        next = base + row * row_stride + chunk * kChunk;
    }

    // Loads the next tile. rows_left of its rows exist (may be negative or more than Rows).
    __device__ __forceinline__ void load(int rows_left) {
        if (rows_left >= Rows && chunks == Chunks) {
#pragma unroll
            for (int i = 0; i < kPasses; i++)
#pragma unroll
                for (int c = 0; c < kChunksPerRow; c++) data[i][c] = load_global(source(i, c));
        } else {
            __syncwarp();  // keeps ptxas from turning the branch into predicates, which every tile would pay for
#pragma unroll
            for (int i = 0; i < kPasses; i++)
#pragma unroll
                for (int c = 0; c < kChunksPerRow; c++) {
                    data[i][c] = zero_chunk();
                    if (row + i * kRowsPerPass < rows_left && chunk + c * kThreadsPerRow < chunks)
                        data[i][c] = load_global(source(i, c));
                }
        }
        next += Rows * row_stride;
    }

    __device__ __forceinline__ void flip_signs(unsigned mask) {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++) data[i][c] = flipped(data[i][c], mask);
    }

    // Stores the tile. `address`: where the thread's first chunk goes. `pitch`: bytes between rows. A thread's rows are multiples
    // of 8 apart, so they have the same swizzle.
    __device__ __forceinline__ void store(unsigned address, int pitch) const {
        static_assert(kPasses == 1 || kRowsPerPass % 8 == 0, "all passes have one swizzle");
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                store_shared(address + i * kRowsPerPass * pitch + c * kThreadsPerRow * kChunkBytes, data[i][c]);
    }

private:
    __device__ __forceinline__ const unsigned short* source(int i, int c) const {
        return next + i * kRowsPerPass * row_stride + c * kThreadsPerRow * kChunk;
    }
};

// Address of the element `rows` rows further. One multiply-add into an aligned register pair, where 64-bit strides would take
// additions and moves. The 32-bit stride allows rows up to 2^32 elements (8 GB) apart.
__device__ __forceinline__ const unsigned short* rows_after(const unsigned short* p, int rows, unsigned row_stride) {
    asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(p) : "r"(row_stride), "r"(static_cast<unsigned>(rows * sizeof(*p))));
    return p;
}

// Loads tiles of K or of V, one after the other, for volta's forward kernels. Unlike TileLoader it has no branches, and the caller
// holds the registers, so that K and V take turns in them. Chunks outside the matrix are not loaded: registers keep their contents.
template <int Chunks, int Rows, int Threads>
struct TileStream {
    static constexpr int kThreadsPerRow = threads_per_row(Chunks);
    static constexpr int kRowsPerPass = Threads / kThreadsPerRow;
    static constexpr int kPasses = Rows / kRowsPerPass;
    static constexpr int kChunksPerRow = Chunks / kThreadsPerRow;
    static_assert(kPasses * kRowsPerPass == Rows && kChunksPerRow * kThreadsPerRow == Chunks,
                  "the tile has to divide evenly among the threads");
    static_assert(kPasses == 1 || kRowsPerPass % 8 == 0, "the rows of one thread have the same swizzle");

    const unsigned short* next;  // the thread's first chunk of the next tile
    int end;  // the matrix's rows end here: `last` less the thread's row in a tile, for has_row()
    int chunks_left;  // of a row, from the thread's first chunk on

    __device__ __forceinline__ static int row_of(int thread) { return thread / kThreadsPerRow; }
    __device__ __forceinline__ static int chunk_of(int thread) { return thread % kThreadsPerRow; }

    // Streams rows `first` to last - 1 of the matrix whose row 0 is at `base`.
    __device__ __forceinline__ TileStream(int thread, const unsigned short* base, long long row_stride, int columns, int first,
                                          int last)
        : next(base + (first + row_of(thread)) * row_stride + chunk_of(thread) * kChunk), end(last - row_of(thread)),
          chunks_left(columns / kChunk - chunk_of(thread)) {}

    __device__ __forceinline__ bool has_chunk(int c) const { return c * kThreadsPerRow < chunks_left; }
    __device__ __forceinline__ bool has_row(int row, int i) const { return row + i * kRowsPerPass < end; }

    // Loads the next tile, whose first row is number `row`.
    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void load(uint4 (&data)[Passes][ChunksPerRow], unsigned row_stride, int row) {
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                load_global_if(has_row(row, i) && has_chunk(c), data[i][c],
                               rows_after(next, i * kRowsPerPass, row_stride) + c * kThreadsPerRow * kChunk);
        }
        next = rows_after(next, Rows, row_stride);
    }

    // Clears rows past the matrix's last in the loaded tile, whose first row is number `row`.
    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void clear_beyond(uint4 (&data)[Passes][ChunksPerRow], int row) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                if (!has_row(row, i)) data[i][c] = zero_chunk();
    }

    // Stores the tile. `address`: where the thread's first chunk goes. `pitch`: bytes between rows. If `inside`, does not store
    // chunks past the last column: shared memory keeps its contents there.
    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void store(const uint4 (&data)[Passes][ChunksPerRow], unsigned address, int pitch,
                                          bool inside) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                if (!inside || has_chunk(c))
                    store_shared(address + i * kRowsPerPass * pitch + c * kThreadsPerRow * kChunkBytes, data[i][c]);
    }
};
