// Global -> register -> shared tiles of fp16 matrices, in 16-byte chunks of 8 elements.
//
// There is no cp.async on Volta: a tile is loaded into registers early, and stored to shared memory
// once the tile before it has been used. Rows and columns beyond the matrix are zero in shared memory:
// the columns pad headdim to the kernel's, the rows keep inf and NaN of stale data out of the products.
#pragma once

#include "volta_fa_params.h"

constexpr int kChunk = 8;        // fp16 elements a chunk
constexpr int kChunkBytes = 16;

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Volatile, so that they stay in program order; without a memory clobber, since the compiler sees no
// other accesses to shared memory.
__device__ __forceinline__ uint4 load_shared(unsigned address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared(unsigned address, const uint4& r) {
    asm volatile("st.shared.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w), "r"(address));
}
// The same of half a chunk.
__device__ __forceinline__ uint2 load_shared2(unsigned address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared2(unsigned address, unsigned x, unsigned y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y));
}

__device__ __forceinline__ uint4 load_global(const unsigned short* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

__device__ __forceinline__ uint4 zero_chunk() { return make_uint4(0, 0, 0, 0); }

// Eight fp16 values times -1 where mask is 0x80008000, as they are where mask is 0.
__device__ __forceinline__ uint4 flipped(const uint4& x, unsigned mask) {
    return make_uint4(x.x ^ mask, x.y ^ mask, x.z ^ mask, x.w ^ mask);
}

// First element of row 0 of one head of one batch entry.
__device__ __forceinline__ const unsigned short* head_base(const Operand& x, int batch, int head) {
    return x.ptr + batch * x.batch_stride + head * x.head_stride;
}
__device__ __forceinline__ unsigned short* head_base(const Output& x, int batch, int head) {
    return x.ptr + batch * x.batch_stride + head * x.head_stride;
}

// The same from row `first` on.
template <class Tensor>
__device__ __forceinline__ auto rows_of(const Tensor& x, int batch, int head, int first) {
    return head_base(x, batch, head) + first * x.row_stride;
}

// Swizzled rows: where the chunk (row, chunk) of a tile without padding lies, in bytes.
//
// Chunks of one column of eight consecutive rows fall into all eight 16-byte bank groups, and so do
// four consecutive chunks of two consecutive rows: bits 1 and 2 of the row go to bits 0 and 1 of the
// chunk, bit 0 of the row to bit 2. Rows of 64 or 192 bytes (4 or 12 chunks) shift odd rows by four
// chunks by themselves. Chunks is the row length, a multiple of 4.
template <int Chunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    static_assert(Chunks % 4 == 0, "the swizzle permutes groups of four chunks");
    const int parity = Chunks % 8 == 0 ? (row & 1) << 2 : 0;
    return (row * Chunks + (chunk ^ ((row >> 1) & 3) ^ parity)) * kChunkBytes;
}

// From one such address to others, without a multiplication. In the same row: the chunk `chunks` further, a number that has none of
// the bits that the chunk's own has, below the group that the swizzle permutes.
template <int Chunks>
__device__ __forceinline__ unsigned chunk_after(unsigned address, unsigned chunks) {
    constexpr bool kPowerOf2 = (Chunks & (Chunks - 1)) == 0;
    constexpr unsigned kGroup = kPowerOf2 ? Chunks : Chunks % 8 == 0 ? 8 : 4;
    if (kPowerOf2) return address ^ chunks * kChunkBytes;
    return (address ^ chunks % kGroup * kChunkBytes) + chunks / kGroup * (kGroup * kChunkBytes);
}
// In another row: by `rows` rows, which have none of bits 0 to 2 that the row's own has, chunks move so far. The same chunk there
// is chunk_after(address, row_swizzle(rows)) + rows * Chunks * kChunkBytes.
template <int Chunks>
__device__ __forceinline__ unsigned row_swizzle(unsigned rows) {
    return swizzled<Chunks>(rows % 8, 0) / kChunkBytes - rows % 8 * Chunks;
}

// A row is read by 4 or 8 threads, so that one load instruction of a warp covers whole 128-byte lines
// where rows have them.
__device__ constexpr int threads_per_row(int chunks) { return chunks % 8 == 0 ? 8 : 4; }

// Keeps a value that ptxas would otherwise recompute from thread indices in every iteration of a loop.
__device__ __forceinline__ int keep_in_register(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

// threadIdx.x for a branch that is rarely taken: what is derived from it is computed inside the branch
// and holds no registers outside.
__device__ __forceinline__ int remat_thread_index() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// The same of blockIdx: x, y and z.
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

// Moves a tile of Rows rows by 8 * Chunks columns along a matrix: global memory to registers with load(),
// registers to shared memory with store(), by Threads threads of which this is number `thread`.
//
// The registers are live from load() to store() only. A tile inside the matrix costs plain loads; one
// that reaches past its rows or columns takes a branch that clears the registers first.
template <int Chunks, int Rows, int Threads>
struct TileLoader {
    static constexpr int kThreadsPerRow = threads_per_row(Chunks);
    static constexpr int kRowsPerPass = Threads / kThreadsPerRow;
    static constexpr int kPasses = Rows / kRowsPerPass;
    static constexpr int kChunksPerRow = Chunks / kThreadsPerRow;
    static_assert(kPasses * kRowsPerPass == Rows && kChunksPerRow * kThreadsPerRow == Chunks,
                  "the tile has to divide evenly among the threads");

    uint4 data[kPasses][kChunksPerRow];
    const unsigned short* next;  // the thread's first chunk of the tile that load() takes next
    long long row_stride;        // elements
    int row, chunk;              // the thread's first
    int chunks;                  // valid chunks of a row

    // `base` is the first element of the first tile.
    __device__ __forceinline__ TileLoader(int thread, const unsigned short* base, long long row_stride_, int columns)
        : row_stride(row_stride_), row(thread / kThreadsPerRow), chunk(thread % kThreadsPerRow), chunks(columns / kChunk) {
        next = base + row * row_stride + chunk * kChunk;
    }

    // Loads the next tile, of which rows_left rows exist (may be negative or more than Rows).
    __device__ __forceinline__ void load(int rows_left) {
        if (rows_left >= Rows && chunks == Chunks) {
#pragma unroll
            for (int i = 0; i < kPasses; i++)
#pragma unroll
                for (int c = 0; c < kChunksPerRow; c++) data[i][c] = load_global(source(i, c));
        } else {
            __syncwarp();  // keeps ptxas from turning the branch into predicates that every tile pays for
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

    // Stores the tile. `address` is where the thread's first chunk goes, `pitch` the bytes between rows of
    // the tile; the rows of one thread are multiples of 8 apart, so that their swizzle is the same.
    __device__ __forceinline__ void store(unsigned address, int pitch) const {
        static_assert(kPasses == 1 || kRowsPerPass % 8 == 0, "see above");
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

// The chunk at p to r if it is inside the matrix. r is an operand in and out because ptxas keeps the registers
// of a predicated load live from what they held before.
__device__ __forceinline__ void load_global_if(bool inside, uint4& r, const unsigned short* p) {
    asm volatile(
        "{.reg .pred inside;\n"
        "setp.ne.s32 inside, %5, 0;\n"
        "@inside ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
        : "l"(p), "r"(static_cast<int>(inside)));
}

// The element `rows` rows further. One multiply-add into an aligned pair of registers, where 64-bit strides take
// additions and moves. Rows 2^32 elements apart are 8 GB apart.
__device__ __forceinline__ const unsigned short* rows_after(const unsigned short* p, int rows, unsigned row_stride) {
    asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(p) : "r"(row_stride), "r"(static_cast<unsigned>(rows * sizeof(*p))));
    return p;
}

// The tiles of K or of V, one after the other: what TileLoader does, without branches in the main loop and
// through registers that the caller holds, so that K and V take turns in them. What is beyond the matrix is
// not loaded: the registers keep what they held.
template <int Chunks, int Rows, int Threads>
struct TileStream {
    static constexpr int kThreadsPerRow = threads_per_row(Chunks);
    static constexpr int kRowsPerPass = Threads / kThreadsPerRow;
    static constexpr int kPasses = Rows / kRowsPerPass;
    static constexpr int kChunksPerRow = Chunks / kThreadsPerRow;
    static_assert(kPasses * kRowsPerPass == Rows && kChunksPerRow * kThreadsPerRow == Chunks,
                  "the tile has to divide evenly among the threads");
    static_assert(kPasses == 1 || kRowsPerPass % 8 == 0, "the rows of one thread have the same swizzle");

    const unsigned short* next;  // the thread's first chunk of the tile that load() takes next
    int end;                     // the rows before this one exist, counted from the thread's first
    int chunks_left;             // of a row, from the thread's first on

    __device__ __forceinline__ static int row_of(int thread) { return thread / kThreadsPerRow; }
    __device__ __forceinline__ static int chunk_of(int thread) { return thread % kThreadsPerRow; }

    // Rows `first` to `last` - 1 of the matrix whose row 0 is at `base`.
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

    // Clears rows beyond the last of the tile that was loaded.
    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ void clear_beyond(uint4 (&data)[Passes][ChunksPerRow], int row) const {
#pragma unroll
        for (int i = 0; i < kPasses; i++)
#pragma unroll
            for (int c = 0; c < kChunksPerRow; c++)
                if (!has_row(row, i)) data[i][c] = zero_chunk();
    }

    // Stores the tile. `address` is where the thread's first chunk goes, `pitch` the bytes between its rows.
    // With `inside`, chunks beyond the columns keep what shared memory held.
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
