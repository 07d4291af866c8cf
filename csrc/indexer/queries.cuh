// Loads the queries of the lightning indexer (indexer.cuh): rows of fp16, bf16 or e4m3 become fp16 in shared memory, and a factor
// of each row. A row is one head of a query; 2^head_shift rows are a query's.
#pragma once

#include "quantized.cuh"
#include "tile.cuh"

namespace indexer {

constexpr int kColumns = 128, kChunks = kColumns / kChunk;
// Bytes between rows in shared memory. One chunk of padding makes the pitch odd in chunks: eight consecutive rows, or every second
// one of them, fall into different bank groups, and chunks have immediate offsets.
constexpr int kPitch = (kChunks + 1) * kChunkBytes;
constexpr int kStagedRows = 16;  // rows that a warp stages at a time: those of one operand

using KeyCodes = Element<CacheFormat::E4m3>;

// A warp's rows: heads of one query, from `head` on.
struct QueryRows {
    const IndexerParams& p;
    int batch, query, head;
    int count;  // rows that exist

    // `row`: the warp's first row in its tile, whose first query is `first_query`.
    __device__ __forceinline__ QueryRows(const IndexerParams& p_, int batch_, int first_query, int row)
        : p(p_), batch(batch_), query(first_query + (row >> p_.head_shift)), head(row & ((1 << p_.head_shift) - 1)),
          count(query < p_.seqlen_q ? p_.nheads - head : 0) {}

    // Address of a row, whose elements have `bytes` bytes.
    __device__ __forceinline__ const unsigned char* address(int row, int bytes) const {
        const long long offset = batch * p.q.batch_stride + query * p.q.row_stride + (head + row) * p.q.head_stride;
        return reinterpret_cast<const unsigned char*>(p.q.ptr) + offset * bytes;
    }
    __device__ __forceinline__ float weight(int row) const {
        return load_float_or_0(row < count, p.weights + batch * p.weights_batch_stride + query * p.weights_row_stride + head + row);
    }
};

// The exponent of a power of two that brings the row's largest magnitude close to 2^14, so that fp16 holds what bf16 held. `bits`:
// of that magnitude, as fp32.
__device__ __forceinline__ int row_exponent(unsigned bits) {
    return min(max(14 - (static_cast<int>(bits >> 23) - 126), -126), 126);
}
__device__ __forceinline__ float power_of_2(int exponent) { return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23); }

// Calls f(i, x) for Passes chunks of bits X that the lane has, from pass `first` on: that of row 2 * i after the lane's first, or
// 0.
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

// Writes rows `first` to first + 15 to shared memory, zeros for rows that do not exist. The padding of a row gets its factor:
// scores of the row and of codes of keys, times it, are those of the given numbers.
__device__ __forceinline__ void stage_queries(const QueryRows& rows, int first, unsigned address) {
    const int lane = threadIdx.x % 32, chunk = lane % kChunks, own = lane / kChunks;
    const unsigned to = address + own * kPitch + chunk * kChunkBytes;
    constexpr int kPasses = kStagedRows / 2;
    constexpr float kFactor = 1.f / KeyCodes::kScale;  // KeyCodes unpacks numbers times kScale (quantized.cuh)
    const auto format = rows.p.q_format;
    const int bytes = format == QueryFormat::E4m3 ? 1 : 2, left = rows.count - first - own;
    const unsigned char* from = rows.address(first + own, bytes) + chunk * kChunk * bytes;
    const long long pass_bytes = 2 * rows.p.q.head_stride * bytes;
    const auto store = [&](int i, const uint4& x, float factor) {
        store_shared(to + 2 * i * kPitch, x);
        if (chunk == 0) store_shared1(to + 2 * i * kPitch + kColumns * 2, __float_as_uint(factor));
    };
    if (format == QueryFormat::E4m3) {
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
            unpack8(columns, x, true);  // of bf16
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
