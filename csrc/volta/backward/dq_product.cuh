// dQ += dS K, added to the accumulator in global memory by atomics: the product that all warps of a main kernel share.
#pragma once

#include "volta/backward/dq_accumulator.cuh"
#include "volta/backward/fragments.cuh"

namespace volta {

// dQ of a step is kStep queries x headdim: each warp computes kTiles tiles of 16 queries x kUnits units of 16 columns, over all
// keys of the block.
template <class S>
struct DqProduct {
    static constexpr int kAllUnits = S::kHeaddim / 16;
    // Where the units are too few, or half too many, for the warps, a warp takes one half of the queries.
    static constexpr bool kHalves = S::kStep == 32 && (kAllUnits * 2 <= S::kWarps || kAllUnits % S::kWarps == S::kWarps / 2);
    static constexpr int kTiles = S::kStep == 32 && !kHalves ? 2 : 1;  // of 16 queries
    static constexpr int kColumnWarps = kHalves ? S::kWarps / 2 : S::kWarps;  // a warp's units are that far apart
    static constexpr int kUnits = (kAllUnits + kColumnWarps - 1) / kColumnWarps;
    static constexpr int kKeysAtOnce = 16;
    // Independent sums: a single block an SM needs two or more to fill the pipe.
    static constexpr int kChains = S::kWarps == 8 && kTiles * kUnits < 4 ? 2 : 1;

    // Column-major A operand: four keys (quad) of four queries. A lane reads eight consecutive queries
    // for two tiles, or four for one.
    static __device__ __forceinline__ int query(const Lane& lane, int warp) {
        if (S::kStep == 16) return 8 * lane.half + 4 * lane.qm;
        return 8 * (2 * lane.qm + lane.half) + (kHalves ? 4 * (warp / kColumnWarps) : 0);
    }
    static __device__ __forceinline__ int unit(int warp) { return warp % kColumnWarps; }
    // Where headdim has fewer units of columns than there are warps, the last warps have none.
    static __device__ __forceinline__ bool has_unit(int warp) { return kAllUnits >= kColumnWarps || warp < kAllUnits; }

    static __device__ __forceinline__ u32 a_operand(u32 tile, const Lane& lane, int warp) {
        const int q = query(lane, warp);
        return tile + swizzled<kScoreChunks>(lane.quad, q / 8) + q % 8 * 2;
    }
    // Row-major B operand: four keys of four columns.
    static __device__ __forceinline__ u32 b_operand(u32 tile, const Lane& lane, int warp) {
        return tile + swizzled<S::kChunks>(lane.quad, 2 * unit(warp) + lane.half) + 8 * lane.qn;
    }
    // Offset into a tile of the accumulator in global memory where a lane's sums go: after the exchange
    // of add_to() it has one column of the rows of both lanes of its pair.
    static __device__ __forceinline__ int output_offset(const Lane& lane, int warp) {
        return DqAccumulator::row(query(lane, warp), S::kHeaddim) + 16 * unit(warp) + 4 * lane.qn + (lane.t & 3);
    }

    Accumulator c[kChains][kTiles][kUnits];

    __device__ __forceinline__ DqProduct() {
#pragma unroll
        for (int k = 0; k < kChains; k++)
#pragma unroll
            for (int i = 0; i < kTiles; i++)
#pragma unroll
                for (int u = 0; u < kUnits; u++) clear(c[k][i][u]);
    }

    __device__ __forceinline__ void multiply(u32 a_address, u32 b_address) {
#pragma unroll 1
        for (int key = 0; key < S::kRows; key += kKeysAtOnce) {
            const u32 a0 = a_address + key * kScoreRowBytes, b0 = b_address + key * S::kRowBytes;
#pragma unroll
            for (int s = 0; s < kKeysAtOnce / 4; s++) {
                const u32 a = chunk_after<kScoreChunks>(a0, row_swizzle<kScoreChunks>(4 * s)) + 4 * s * kScoreRowBytes;
                const u32 b = chunk_after<S::kChunks>(b0, row_swizzle<S::kChunks>(4 * s)) + 4 * s * S::kRowBytes;
                uint4 queries;
                if (kTiles == 2) {
                    queries = load_shared(a);
                } else {
                    const uint2 four = load_shared2(a);
                    queries.x = four.x, queries.y = four.y;
                }
#pragma unroll
                for (int u = 0; u < kUnits; u++) {
                    const uint2 columns = load_shared2(chunk_after<S::kChunks>(b, 2 * kColumnWarps * u));
                    mma_col_row(c[s % kChains][0][u], queries.x, queries.y, columns.x, columns.y);
                    if (kTiles == 2) mma_col_row(c[s % kChains][kTiles - 1][u], queries.z, queries.w, columns.x, columns.y);
                }
            }
        }
    }

    // Lane pairs exchange columns for rows, so that eight lanes of an instruction fill a 32-byte sector.
    __device__ __forceinline__ void add_to(float* accum) {
        const bool odd = threadIdx.x & 1;
#pragma unroll
        for (int i = 0; i < kTiles; i++)
#pragma unroll
            for (int u = 0; u < kUnits; u++)
#pragma unroll
                for (int v = 0; v < 8; v += 2) {
                    float x0 = c[0][i][u][v], x1 = c[0][i][u][v + 1];
                    if (kChains == 2) x0 += c[kChains - 1][i][u][v], x1 += c[kChains - 1][i][u][v + 1];
                    const float received = __shfl_xor_sync(~0u, odd ? x0 : x1, 1);
                    float* to = accum + DqAccumulator::row(4 * i + (v & 2), S::kHeaddim) + 16 * kColumnWarps * u + 2 * (v & 4);
                    add_global(to, odd ? received : x0);
                    add_global(to + DqAccumulator::row(1, S::kHeaddim), odd ? x1 : received);
                }
    }
};

}  // namespace volta
