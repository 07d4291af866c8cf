// A lane's part of a tile of P^T or dS^T as PackedTile (packed_tile.cuh), or as the sum of two: for store_scores.cuh, which has
// either.
#pragma once

#include "backward/packed_tile.cuh"

// A tile as the sum of two packed ones: rounded numbers, and what rounding took from them.
struct SplitTile {
    PackedTile high, low;
};
__device__ __forceinline__ SplitTile split_tile(const float (&s)[8]) {
    SplitTile tile = {pack_tile(s), {}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 rounded = to_float2(tile.high.x[i]);
        tile.low.x[i] = to_half2(s[packed_element(i)] - rounded.x, s[packed_element(i) + 1] - rounded.y);
    }
    return tile;
}
__device__ __forceinline__ void multiply(float (&s)[8], const SplitTile& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 high = to_float2(x.high.x[i]), low = to_float2(x.low.x[i]);
        s[packed_element(i)] *= high.x + low.x;
        s[packed_element(i) + 1] *= high.y + low.y;
    }
}
// Calls f(tile) for each tile of a sum.
template <class F>
__device__ __forceinline__ void each_part(PackedTile& x, F f) {
    f(x);
}
template <class F>
__device__ __forceinline__ void each_part(SplitTile& x, F f) {
    f(x.high);
    f(x.low);
}
__device__ __forceinline__ PackedTile& high_part(PackedTile& x) { return x; }
__device__ __forceinline__ PackedTile& high_part(SplitTile& x) { return x.high; }
