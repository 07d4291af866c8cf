// A lane's eight elements of a tile of P^T or dS^T as the sum of two fp16 tiles, for fp32 tensors in full precision. Its functions
// also take one PackedTile (packed_tile.cuh has the order of elements), so that store_scores.cuh is written once for both.
#pragma once

#include "backward/packed_tile.cuh"

// The sum of two: elements rounded to fp16, and what that took from them, rounded to fp16.
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
// s *= x, element by element.
__device__ __forceinline__ void multiply(float (&s)[8], const SplitTile& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 high = to_float2(x.high.x[i]), low = to_float2(x.low.x[i]);
        s[packed_element(i)] *= high.x + low.x;
        s[packed_element(i) + 1] *= high.y + low.y;
    }
}
// Calls f(tile) for each packed tile of a sum: for one or two.
template <class F>
__device__ __forceinline__ void each_part(PackedTile& x, F f) {
    f(x);
}
template <class F>
__device__ __forceinline__ void each_part(SplitTile& x, F f) {
    f(x.high);
    f(x.low);
}
// The tile whose sign bits mark dropped elements.
__device__ __forceinline__ PackedTile& high_part(PackedTile& x) { return x; }
__device__ __forceinline__ PackedTile& high_part(SplitTile& x) { return x.high; }
