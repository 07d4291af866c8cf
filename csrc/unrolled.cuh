// Nests of unrolled loops over a lane's registers: tiles, rows, elements. Registers have no index at run time: such loops must be
// unrolled. Where a nest is written out instead, ptxas schedules its kernel otherwise with a call (tools/compare_kernels.py).
#pragma once

// Calls f(i, j) for each i < I and j < J, j fastest; likewise with three and four bounds.
template <int I, int J, class F>
__device__ __forceinline__ void unrolled(F f) {
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
        for (int j = 0; j < J; j++) f(i, j);
}
template <int I, int J, int K, class F>
__device__ __forceinline__ void unrolled(F f) {
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int k = 0; k < K; k++) f(i, j, k);
}
template <int I, int J, int K, int L, class F>
__device__ __forceinline__ void unrolled(F f) {
#pragma unroll
    for (int i = 0; i < I; i++)
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int k = 0; k < K; k++)
#pragma unroll
                for (int l = 0; l < L; l++) f(i, j, k, l);
}
