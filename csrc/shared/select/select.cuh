// Prepares sparse MLA (volta/decode/sparse_mla.cuh), whose queries attend to latents (a token's compressed key and value) that the
// caller chose by index, from the call's own cache and an optional extra one: lists each query's tokens, (queries, list_stride)
// int32, and casts bf16 queries to fp16. src/ops/sparse.rs launches it.
//
// Grid: queries, then 1 or, with bf16 queries, 1 + heads / kWarps, rounded up. Blocks with blockIdx.y 0 make a query's list: the
// valid indices in their order, those of the own cache first. An index outside its cache is no token. So the attention kernel reads
// lists without a check, and its time is that of the tokens that exist. The other blocks cast bf16 queries, a warp for each head.
// The kernel's row in src/kernels gives THREADS and SHARED_BYTES (of a block).
#pragma once

#include "half.cuh"  // bf16x2_to_float2(), to_half2(): pairs of numbers
#include "lengths.cuh"  // load_length(); load_int_if() (ptx.cuh): a predicated load
#include "volta_fa_params.h"  // generated from src/params: SparseMlaParams, ChosenTokens (indices of one cache)

namespace select {

constexpr int kWarps = THREADS / 32;
constexpr int kChunk = 8;  // columns of a load

// Appends the valid indices of one cache (below tokens.count, of topk for each query) to the query's list of `length` tokens.
// Returns its new length. All threads call it together: each takes an index, and a scan over lanes (ballot), then warps
// (warp_counts, shared), gives its place in the list.
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
        int position = length + __popc(found & ((1u << lane) - 1));
#pragma unroll
        for (int w = 0; w < kWarps; w++) {
            position += w < warp ? warp_counts[w] : 0;
            length += warp_counts[w];
        }
        if (exists) list[position] = is_extra ? ~index : index;  // ~n stands for token n of the second cache
        __syncthreads();
    }
    return length;
}

// Makes a query's list, and the start values of max_logits (an output: each row's largest scaled score). The block of query 0 also
// bounds the sinks.
__device__ __forceinline__ void make_list(const SparseMlaParams& p, int query) {
    extern __shared__ uint4 shared_memory[];
    static_assert(SHARED_BYTES == kWarps * sizeof(int), "the row in src/kernels and the kernel disagree");
    int (&warp_counts)[kWarps] = *reinterpret_cast<int (*)[kWarps]>(shared_memory);
    const int nheads = p.decode.problem.nheads;
    int* list = p.lists + query * p.list_stride;
    // false, true: is_extra; 0: the list is empty
    const int own_length = append(p.own, false, query, list, 0, warp_counts);
    const int length = append(p.extra, true, query, list, own_length, warp_counts);
    if (threadIdx.x == 0) p.lengths[query] = length;
    for (int head = threadIdx.x; head < nheads; head += THREADS) {
        // -inf (0xff800000): the attention kernel raises it by atomics, and rows without tokens keep it
        p.max_logits[static_cast<long long>(query) * nheads + head] = __int_as_float(0xff800000);
        // at most 1e30, because a sink of infinity would make a row's sum NaN
        if (query == 0 && p.sinks) {
            const float sink = p.sinks[head];
            p.finite_sinks[head] = sink > 1e30f ? 1e30f : sink;  // fminf would lose a NaN
        }
    }
}

// Casts one head of a bf16 query (a batch entry of p.q) to fp16, scaled by a power of two so that its largest magnitude is below
// 2^15. row_scales gets the inverse power, by which the attention kernel multiplies scores. 0x7f800000: exponent bits of a bf16.
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
    // Biased exponent: all are below 2^(exponent - 126). The factor 2^(141 - exponent) has the biased exponent 268 - exponent. With
    // 16 as the least exponent, the factor and its inverse are normal numbers.
    const unsigned exponent = max(largest >> 23, 16u);
    const float factor = __uint_as_float((268 - exponent) << 23);
    for (int i = lane; i < chunks; i += 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i * kChunk);
        const auto scaled = [&](unsigned pair) {
            const float2 y = bf16x2_to_float2(pair);
            return to_half2(y.x * factor, y.y * factor);
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
