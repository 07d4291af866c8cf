// Element order of dq's fp32 accumulator on turing. It is the order of the mma accumulators, so that the atomics of a warp cover
// whole 128-byte lines. dq_product.cuh adds in it, backward/postprocess.cuh reads it and writes dq. A tile of 16 rows by 8 columns,
// one accumulator C (turing/mma.cuh), is 128 floats: [element v][lane]. Element v of a lane is row lane / 4 + 8 * (v / 2) and
// column lane % 4 * 2 + v % 2. The tiles of 16 rows are contiguous.
#pragma once

namespace turing {

// Order of the elements; argument of BackwardPostprocess.
struct DqAccumulator {
    static constexpr int kTileFloats = 128, kElementFloats = 32;  // of a tile; from an element of a lane to the next

    // Element (row, column) of a sequence lies at row(row) + column(column) from the sequence's first element. headdim: columns of
    // a row; unnamed in column(), which needs it on volta alone. Integer: long long in postprocess.
    template <class Integer>
    static __device__ __forceinline__ Integer row(Integer row, int headdim) {
        return row / 16 * 16 * headdim + row / 8 % 2 * (2 * kElementFloats) + row % 8 * 4;
    }
    static __device__ __forceinline__ int column(int column, int) {
        return column / 8 * kTileFloats + column % 2 * kElementFloats + column % 8 / 2;
    }
    // Loads eight neighboring columns of a row into a and b, from the element of the first, whose column is a multiple of 8.
    static __device__ __forceinline__ void load8(const float* from, float4& a, float4& b) {
        const float4 even = *reinterpret_cast<const float4*>(from), odd = *reinterpret_cast<const float4*>(from + kElementFloats);
        a = make_float4(even.x, odd.x, even.y, odd.y), b = make_float4(even.z, odd.z, even.w, odd.w);
    }

    // Work of postprocess: eight lanes a row, each with a chunk of 8 columns at a time.
    static constexpr int kLanesPerRow = 8;
    static __device__ __forceinline__ int row_of(int thread) { return thread / kLanesPerRow; }
    static __device__ __forceinline__ int chunk_of(int thread) { return thread % kLanesPerRow; }
};

}  // namespace turing
