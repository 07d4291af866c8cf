// Nests of unrolled loops over a lane's registers: tiles, rows, elements. Registers cannot be indexed at run time: arrays in a loop
// that is not unrolled go to local memory. Some kernels keep a nest written out, because with a call ptxas schedules them in
// another order (tools/compare_kernels.py shows it).
#pragma once

// Calls f(i, j) for each i < I and j < J, the last index fastest. Other overloads take three and four bounds.
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
