// The order of dq's fp32 accumulator: rows of headdim_rounded floats, as those of a tensor.
#pragma once

namespace volta {

struct DqAccumulator {
    // Element (row, column) of a sequence lies at row(row) + column(column) from the sequence's first.
    // (Integer, because offsets inside a tile fit an int.)
    template <class Integer>
    static __device__ __forceinline__ Integer row(Integer row, int headdim) {
        return row * headdim;
    }
    static __device__ __forceinline__ int column(int column) { return column; }
    // The eight elements from one whose column is a multiple of 8.
    static __device__ __forceinline__ void eight(const float* from, float4& a, float4& b) {
        a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    }
};

}  // namespace volta
