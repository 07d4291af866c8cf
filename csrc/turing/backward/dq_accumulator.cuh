// Element order of dq's fp32 accumulator in global memory on turing. Main kernels (blocks own keys and visit queries in steps) add
// to it by atomics (dq_product.cuh); the postprocess kernel (backward/postprocess.cuh) converts it to dq. A tile is 16 queries
// (rows) by 8 columns: accumulator C of a warp's product (turing/mma.cuh), 128 floats. It has four lines of 32 floats, [element v
// of a lane][lane], so that each atomic instruction of a warp covers one whole 128-byte line. Element v (0 to 3) of a lane is row
// lane / 4 + 8 * (v / 2) and column lane % 4 * 2 + v % 2 of the tile. The headdim / 8 tiles of 16 rows are contiguous.
#pragma once

namespace turing {

// Order of the elements; template argument of BackwardPostprocess.
struct DqAccumulator {
    static constexpr int kTileFloats = 128, kLineFloats = 32;

    // Element (row, column) lies row(row) + column(column) floats after the sequence's first element. row(): 16 rows are 16 *
    // headdim floats; rows 8 to 15 have elements 2 and 3, two lines on; each row has four lanes. headdim: columns of the
    // accumulator (column() needs it on volta alone). Integer: the type of offsets, long long in postprocess.
    template <class Integer>
    static __device__ __forceinline__ Integer row(Integer row, int headdim) {
        return row / 16 * 16 * headdim + row / 8 % 2 * (2 * kLineFloats) + row % 8 * 4;
    }
    static __device__ __forceinline__ int column(int column, int) {
        return column / 8 * kTileFloats + column % 2 * kLineFloats + column % 8 / 2;
    }
    // Loads eight neighboring columns of a row into a (0 to 3) and b (4 to 7): four lanes' even columns, from the next line their
    // odd ones. `from`: address of the first, whose column is a multiple of 8.
    static __device__ __forceinline__ void load8(const float* from, float4& a, float4& b) {
        const float4 even = *reinterpret_cast<const float4*>(from), odd = *reinterpret_cast<const float4*>(from + kLineFloats);
        a = make_float4(even.x, odd.x, even.y, odd.y), b = make_float4(even.z, odd.z, even.w, odd.w);
    }

    // For postprocess: the row and the chunk (eight columns, of the first 64) that a thread of its block converts first.
    static constexpr int kLanesPerRow = 8;  // threads that share a row; each goes on with every eighth chunk
    static __device__ __forceinline__ int row_of(int thread) { return thread / kLanesPerRow; }
    static __device__ __forceinline__ int chunk_of(int thread) { return thread % kLanesPerRow; }
};

}  // namespace turing
