// Loads queries of DeepSeek V3.2's lightning indexer (indexer.cuh): a warp stages fp16, bf16 or e4m3 rows as fp16 in shared memory,
// and a factor for each. A row is one head of one query, which has 2^head_shift rows (32 or 64): nheads heads, then missing rows.
#pragma once

#include "quantized.cuh"  // Element: conversion of codes
#include "tile.cuh"  // kChunk: 8 fp16 columns, kChunkBytes: 16; IndexerParams (src/params)

namespace indexer {

constexpr int kColumns = 128, kChunks = kColumns / kChunk;
// Bytes between rows of queries and keys in shared memory. One chunk of padding makes the pitch odd in chunks. A quarter-warp reads
// eight consecutive rows at once, or the four even or odd ones of eight: they fall into different 16-byte bank groups. Without a
// swizzle, chunks have immediate offsets.
constexpr int kPitch = (kChunks + 1) * kChunkBytes;
constexpr int kStagedRows = 16;  // rows that a warp stages at a time: those of one row tile of the products

// Conversion of e4m3 codes to fp16 (quantized.cuh): fp16 numbers are kScale = 144 times the numbers, and NaN becomes infinity.
using KeyCodes = Element<CacheFormat::E4m3>;

// The 32 rows of a warp: heads of one query, from `head` on.
struct QueryRows {
    const IndexerParams& p;
    int batch, query, head;
    int count;  // heads from `head` on: rows from this number on are missing

    // `row`: the warp's first row, counted in the block's tile, whose first query is `first_query`.
    __device__ __forceinline__ QueryRows(const IndexerParams& p_, int batch_, int first_query, int row)
        : p(p_), batch(batch_), query(first_query + (row >> p_.head_shift)), head(row & ((1 << p_.head_shift) - 1)),
          count(query < p_.seqlen_q ? p_.nheads - head : 0) {}

    // Address of the warp's row `row`; an element has `bytes` bytes.
    __device__ __forceinline__ const unsigned char* address(int row, int bytes) const {
        const long long offset = batch * p.q.batch_stride + query * p.q.row_stride + (head + row) * p.q.head_stride;
        return reinterpret_cast<const unsigned char*>(p.q.ptr) + offset * bytes;
    }
    // Weight of the row's head in the logit; 0 for a missing row.
    __device__ __forceinline__ float weight(int row) const {
        return load_float_or_0(row < count, p.weights + batch * p.weights_batch_stride + query * p.weights_row_stride + head + row);
    }
};

// Returns the exponent of the power of two that brings a bf16 row's largest magnitude into [2^13, 2^14), in fp16's range. `bits`:
// those of the magnitude as fp32. Its biased exponent minus 126 is e with magnitude < 2^e.
__device__ __forceinline__ int row_exponent(unsigned bits) {
    return min(max(14 - (static_cast<int>(bits >> 23) - 126), -126), 126);
}
__device__ __forceinline__ float power_of_2(int exponent) { return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23); }

// Loads the lane's chunks of passes `first` to first + Passes - 1, then calls f(pass, chunk) for each. Pass i has the row 2 * i
// after the lane's first, whose chunk is at `from`; a pass is `pass_bytes` after the one before. X holds a chunk's bits: 8 bytes of
// e4m3, else 16. Chunks are 0 from row `rows` (counted from the lane's first) on.
template <int Passes, class X, class F>
__device__ __forceinline__ void each_chunk(const unsigned char* from, long long pass_bytes, int rows, int first, F f) {
    X x[Passes];
#pragma unroll
    for (int i = 0; i < Passes; i++) {
        x[i] = X{};
        if (2 * (first + i) < rows) x[i] = __ldg(reinterpret_cast<const X*>(from + (first + i) * pass_bytes));
    }
#pragma unroll
    for (int i = 0; i < Passes; i++) f(first + i, x[i]);
}

// Stages rows `first` to first + 15 at shared address `address`; missing rows become zeros. The padding of a row gets its fp32
// factor: q . k of the given numbers is the factor times the product of the staged row and a staged key.
__device__ __forceinline__ void stage_queries(const QueryRows& rows, int first, unsigned address) {
    const int lane = threadIdx.x % 32, chunk = lane % kChunks, lane_row = lane / kChunks;  // half a warp has a row: two rows a pass
    const unsigned to = address + lane_row * kPitch + chunk * kChunkBytes;
    constexpr int kPasses = kStagedRows / 2;
    constexpr float kFactor = 1.f / KeyCodes::kScale;  // for the keys; e4m3 queries have the same scale once more
    const auto format = rows.p.q_format;
    const int bytes = format == QueryFormat::E4m3 ? 1 : 2, left = rows.count - first - lane_row;
    const unsigned char* from = rows.address(first + lane_row, bytes) + chunk * kChunk * bytes;
    const long long pass_bytes = 2 * rows.p.q.head_stride * bytes;
    const auto store = [&](int i, const uint4& x, float factor) {
        store_shared(to + 2 * i * kPitch, x);
        if (chunk == 0) store_shared1(to + 2 * i * kPitch + kColumns * 2, __float_as_uint(factor));
    };
    if (format == QueryFormat::E4m3) {
        // 0, here and below: from the first pass on
        each_chunk<kPasses, uint2>(from, pass_bytes, left, 0, [&](int i, const uint2& x) {
            const unsigned words[2] = {x.x, x.y};
            store(i, KeyCodes::unpack8(words), kFactor / KeyCodes::kScale);
        });
        return;
    }
    if (format == QueryFormat::Half) {
        each_chunk<kPasses, uint4>(from, pass_bytes, left, 0, [&](int i, const uint4& x) { store(i, x, kFactor); });
        return;
    }
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kPasses / 2)
        each_chunk<kPasses / 2, uint4>(from, pass_bytes, left, pass, [&](int i, const uint4& x) {
            float columns[kChunk];
            unpack8(columns, x, true);  // true: bf16
            unsigned largest = 0;
#pragma unroll
            for (int c = 0; c < kChunk; c++) largest = max(largest, __float_as_uint(columns[c]) & 0x7fffffffu);
#pragma unroll
            for (int lane_mask = 1; lane_mask < kChunks; lane_mask *= 2)
                largest = max(largest, __shfl_xor_sync(~0u, largest, lane_mask));
            const int exponent = row_exponent(largest);
            const float scale = power_of_2(exponent);
            unsigned packed[4];
#pragma unroll
            for (int c = 0; c < 4; c++) packed[c] = to_half2(columns[2 * c] * scale, columns[2 * c + 1] * scale);
            store(i, make_uint4(packed[0], packed[1], packed[2], packed[3]), kFactor * power_of_2(-exponent));
        });
}

}  // namespace indexer
