// State of the fast forward kernel (forward.cuh) beside operands and sums: in registers (Register...) or, where these are too few,
// in shared memory (Shared...), with the same functions. It has two parts:
//
//   ...Sources  where the thread block's K and V lie in global memory: loads of each span take their addresses from it
//   ...Rows     scale and reference of a lane's query rows. load_queries() (queries.cuh) sets scales: the factor of the row's int8
//               codes of Q, times |softmax_scale| * log2(e). A reference is what is subtracted from the row's scores before exp2,
//               log2 units: move_references() (forward.cuh) raises it
//
// Template arguments: Rows, two or four, of a lane; Threads of the thread block. The four lanes of a quad have the same rows, so
// shared memory has these once.
#pragma once

#include "tile.cuh"
#include "turing/mma.cuh"

namespace turing {

constexpr u32 kQuadBytes = 2 * kChunkBytes;  // of up to four rows of a quad: their scales (16 bytes), then their references
constexpr float kNoReference = -3e38f;  // below every score

// Global memory of the sequence's keys and values, for the thread block's KV head.
struct Sources {
    const signed char* codes;  // of K, from key 0 on
    const float* scales;  // of these codes: four for 64 keys (codes.cuh)
    const unsigned short* v;  // row 0
    int v_last;  // number of the last row: the kernel reads none after it
    u32 v_factor;  // of V's elements, as a pair of fp16: brings fp16 V below 1; 1 for bf16, scaled already by prepare.cuh
};
__device__ __forceinline__ void store_pointer(u32 address, const void* p) {
    const unsigned long long x = reinterpret_cast<unsigned long long>(p);
    store_shared2(address, x, x >> 32);
}
template <class T>
__device__ __forceinline__ const T* load_pointer(u32 address) {
    const uint2 x = load_shared2(address);
    return reinterpret_cast<const T*>(static_cast<unsigned long long>(x.y) << 32 | x.x);
}

// Store and load one float for each of the lane's rows, two or four, in shared memory.
template <int Rows>
__device__ __forceinline__ void store_rows(u32 address, const float (&x)[Rows]) {
#pragma unroll
    for (int r = 0; r < Rows; r += 2) store_shared2(address + 4 * r, __float_as_uint(x[r]), __float_as_uint(x[r + 1]));
}
template <int Rows>
__device__ __forceinline__ void load_rows(float (&x)[Rows], u32 address) {
    if (Rows == 4) {
        const uint4 four = load_shared(address);
        x[0] = __uint_as_float(four.x), x[1] = __uint_as_float(four.y), x[2] = __uint_as_float(four.z),
        x[3] = __uint_as_float(four.w);
    } else {
        const uint2 pair = load_shared2(address);
        x[0] = __uint_as_float(pair.x), x[1] = __uint_as_float(pair.y);
    }
}

// Sources in registers, or in shared memory: 32 bytes of the thread block, at block_address. `base`: as in SharedState.
struct RegisterSources {
    Sources of_block;

    __device__ __forceinline__ explicit RegisterSources(u32 /*base: no shared memory*/) {}
    __device__ __forceinline__ void store_sources(const Sources& x) { of_block = x; }
    __device__ __forceinline__ const signed char* codes() const { return of_block.codes; }
    __device__ __forceinline__ const float* scales() const { return of_block.scales; }
    __device__ __forceinline__ const unsigned short* v() const { return of_block.v; }
    __device__ __forceinline__ int v_last() const { return of_block.v_last; }
    __device__ __forceinline__ u32 v_factor() const { return of_block.v_factor; }
};
template <int Threads>
struct SharedSources {
    u32 block_address;

    __device__ __forceinline__ explicit SharedSources(u32 base) : block_address(base + Threads / 4 * kQuadBytes) {}
    // Thread 0 stores for the thread block: a barrier must come before other threads call the functions below.
    __device__ __forceinline__ void store_sources(const Sources& x) {
        if (threadIdx.x > 0) return;
        store_pointer(block_address, x.codes);
        store_pointer(block_address + 8, x.scales);
        store_pointer(block_address + 16, x.v);
        store_shared2(block_address + 24, x.v_last, x.v_factor);
    }
    __device__ __forceinline__ const signed char* codes() const { return load_pointer<signed char>(block_address); }
    __device__ __forceinline__ const float* scales() const { return load_pointer<float>(block_address + 8); }
    __device__ __forceinline__ const unsigned short* v() const { return load_pointer<unsigned short>(block_address + 16); }
    __device__ __forceinline__ int v_last() const { return load_shared1(block_address + 24); }
    __device__ __forceinline__ u32 v_factor() const { return load_shared1(block_address + 28); }
};
// Scale and reference of each of the lane's rows.
template <int Rows>
struct RegisterRows {
    float scale[Rows], reference[Rows];

    __device__ __forceinline__ explicit RegisterRows(u32) {
#pragma unroll
        for (int r = 0; r < Rows; r++) reference[r] = kNoReference;
    }
    // Appends the scale of the next row: after Rows calls the first is row 0's. It shifts, and ignores the row's number, because
    // rolled loops cannot index registers.
    __device__ __forceinline__ void push_scale(float x, int) {
#pragma unroll
        for (int r = 0; r + 1 < Rows; r++) scale[r] = scale[r + 1];
        scale[Rows - 1] = x;
    }
    __device__ __forceinline__ void load_scales(float (&x)[Rows]) const {
#pragma unroll
        for (int r = 0; r < Rows; r++) x[r] = scale[r];
    }
    __device__ __forceinline__ void load_references(float (&x)[Rows]) const {
#pragma unroll
        for (int r = 0; r < Rows; r++) x[r] = reference[r];
    }
    __device__ __forceinline__ void store_references(const float (&x)[Rows]) {
#pragma unroll
        for (int r = 0; r < Rows; r++) reference[r] = x[r];
    }
};
template <int Rows>
struct SharedRows {
    u32 address;  // of the quad's kQuadBytes

    __device__ __forceinline__ explicit SharedRows(u32 base) : address(base + threadIdx.x / 4 * kQuadBytes) {
        float x[Rows];
#pragma unroll
        for (int r = 0; r < Rows; r++) x[r] = kNoReference;
        store_references(x);
    }
    __device__ __forceinline__ static bool is_first_of_quad() { return (remat_thread_index() & 3) == 0; }
    // Stores the scale of row r of the quad. Its other lanes may read it after a __syncwarp() or a barrier.
    __device__ __forceinline__ void push_scale(float x, int r) {
        if (is_first_of_quad()) store_shared1(address + 4 * r, __float_as_uint(x));
    }
    __device__ __forceinline__ void load_scales(float (&x)[Rows]) const { load_rows(x, address); }
    __device__ __forceinline__ void load_references(float (&x)[Rows]) const { load_rows(x, address + kChunkBytes); }
    // The whole warp calls it.
    __device__ __forceinline__ void store_references(const float (&x)[Rows]) {
        __syncwarp();  // the quad has read the old ones
        if (is_first_of_quad()) store_rows(address + kChunkBytes, x);
        __syncwarp();
    }
};
// Both parts. `base`: shared address of kQuadBytes for each quad of the thread block, then of Sources; unused for registers.
template <int Rows>
struct RegisterState : RegisterSources, RegisterRows<Rows> {
    __device__ __forceinline__ explicit RegisterState(u32 base) : RegisterSources(base), RegisterRows<Rows>(base) {}
};
template <int Rows, int Threads>
struct SharedState : SharedSources<Threads>, SharedRows<Rows> {
    __device__ __forceinline__ explicit SharedState(u32 base) : SharedSources<Threads>(base), SharedRows<Rows>(base) {}
};

}  // namespace turing
