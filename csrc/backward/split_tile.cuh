// A lane's eight elements of a tile of P^T or dS^T as the sum of two fp16 tiles, for fp32 tensors in full precision: two fp16
// numbers keep about fp32's digits, and tensor cores multiply fp16 only. Used by store_scores.cuh, which is written once for this
// and for one PackedTile: four words of two fp16 elements. Word i has packed_element(i) and the next (packed_tile.cuh).
#pragma once

#include "backward/packed_tile.cuh"  // pack_tile(): fp32 to a PackedTile

// high: elements rounded to fp16. low: what that rounding took from them, rounded to fp16.
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
// Multiplies s by the sums high + low of x, element by element.
__device__ __forceinline__ void multiply(float (&s)[8], const SplitTile& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 high = to_float2(x.high.x[i]), low = to_float2(x.low.x[i]);
        s[packed_element(i)] *= high.x + low.x;
        s[packed_element(i) + 1] *= high.y + low.y;
    }
}
// Calls f(tile) for each packed tile: one, or the two of a sum.
template <class F>
__device__ __forceinline__ void each_part(PackedTile& x, F f) {
    f(x);
}
template <class F>
__device__ __forceinline__ void each_part(SplitTile& x, F f) {
    f(x.high);
    f(x.low);
}
// Returns the packed tile whose sign bits mark dropped probabilities.
__device__ __forceinline__ PackedTile& high_part(PackedTile& x) { return x; }
__device__ __forceinline__ PackedTile& high_part(SplitTile& x) { return x.high; }
