// Prepares sparse MLA (volta/decode/sparse_mla.cuh): the list of each query's tokens, and bf16 queries as fp16. For all families.
// src/ops/sparse.rs launches it.
//
// A block of the first row of the grid has a query's list: the valid indices in their order, first those of the call's own cache.
// An index outside a cache is no token. So the attention kernel reads lists without a check, and its time is that of the tokens
// that exist. Blocks of other rows of the grid have queries, a warp for each head.
//
// The kernel's row in src/kernels gives THREADS and SHARED_BYTES (of a block).
#pragma once

#include "half.cuh"
#include "lengths.cuh"
#include "volta_fa_params.h"

namespace select {

constexpr int kWarps = THREADS / 32;
constexpr int kChunk = 8;  // columns of a load

// Appends the valid indices of one cache to the query's list. Returns its length. All threads call it together.
__device__ __forceinline__ int append(const ChosenTokens& tokens, bool is_extra, int query, int* list, int length,
                                      int (&warp_counts)[kWarps]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int count = tokens.topk;
    if (tokens.lengths) count = min(max(load_length(tokens.lengths + query), 0), count);
    for (int first = 0; first < count; first += THREADS) {
        const int i = first + threadIdx.x;
        int index = -1;
        load_int_if(i < count, index, tokens.indices + query * tokens.indices_stride + i);
        const bool exists = static_cast<unsigned>(index) < static_cast<unsigned>(tokens.count);
        const unsigned found = __ballot_sync(~0u, exists);
        if (lane == 0) warp_counts[warp] = __popc(found);
        __syncthreads();
        int at = length + __popc(found & ((1u << lane) - 1));
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            at += w < warp ? warp_counts[w] : 0;
            length += warp_counts[w];
        }
        if (exists) list[at] = is_extra ? ~index : index;  // ~n stands for token n of the second cache
        __syncthreads();
    }
    return length;
}

__device__ __forceinline__ void make_list(const SparseMlaParams& p, int query) {
    extern __shared__ uint4 shared_memory[];
    static_assert(SHARED_BYTES == kWarps * sizeof(int), "the row in src/kernels and the kernel disagree");
    int (&warp_counts)[kWarps] = *reinterpret_cast<int (*)[kWarps]>(shared_memory);
    const int nheads = p.decode.problem.nheads;
    int* list = p.lists + query * p.list_stride;
    const int own = append(p.own, false, query, list, 0, warp_counts);
    const int length = append(p.extra, true, query, list, own, warp_counts);
    if (threadIdx.x == 0) p.lengths[query] = length;
    for (int head = threadIdx.x; head < nheads; head += THREADS) {
        // -inf: the attention kernel raises it by atomics, and rows without tokens keep it
        p.max_logits[static_cast<long long>(query) * nheads + head] = __int_as_float(0xff800000);
        // infinity would make a row's sum NaN
        if (query == 0 && p.sinks) {
            const float sink = p.sinks[head];
            p.finite_sinks[head] = sink > 1e30f ? 1e30f : sink;  // fminf would lose a NaN
        }
    }
}

// Scales a row of bf16 queries by a power of two, so that its largest is below 2^15.
__device__ __forceinline__ void cast_row(const SparseMlaParams& p, int query, int head) {
    const int lane = threadIdx.x & 31, chunks = p.decode.problem.headdim / kChunk;
    const unsigned short* from = p.q.ptr + query * p.q.batch_stride + head * p.q.head_stride;
    const long long row = static_cast<long long>(query) * p.decode.problem.nheads + head;
    unsigned largest = 0;
    for (int i = lane; i < chunks; i += 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i * kChunk);
        for (unsigned pair : {x.x, x.y, x.z, x.w}) largest = max(largest, max(pair & 0x7f800000u, pair << 16 & 0x7f800000u));
    }
#pragma unroll
    for (int n = 1; n < 32; n *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, n));
    // Biased: all are below 2^(exponent - 126). The factor is 2^(141 - exponent), its inverse 2^(exponent - 141). With 16 as the
    // least exponent both are normal numbers.
    const unsigned exponent = max(largest >> 23, 16u);
    const float inverse = __uint_as_float((268 - exponent) << 23);
    for (int i = lane; i < chunks; i += 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i * kChunk);
        const auto scaled = [&](unsigned pair) {
            const float2 y = bf16x2_to_float2(pair);
            return to_half2(y.x * inverse, y.y * inverse);
        };
        reinterpret_cast<uint4*>(p.q_fp16 + row * p.decode.problem.headdim)[i] =
            make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
    }
    if (lane == 0) p.row_scales[row] = __uint_as_float((exponent - 14) << 23);
}

struct Kernel {
    __device__ __forceinline__ static void run(const SparseMlaParams& p) {
        const int query = blockIdx.x, head = (blockIdx.y - 1) * kWarps + threadIdx.x / 32;
        if (blockIdx.y == 0)
            make_list(p, query);
        else if (head < p.decode.problem.nheads)
            cast_row(p, query, head);
    }
};

}  // namespace select
