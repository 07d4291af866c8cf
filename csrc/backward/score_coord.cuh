// Query and key index of each of a lane's scores in the backward pass, and their mask. Included by all backward kernels that
// compute scores.
//
// A lane has some elements of each tile of scores, numbered v. By its family's Layout (score_layout.cuh), v is of query
// first_query(lane) + query_slot(v) and key first_key(lane) + key_slot(v) of the tile, which has kTileQueries by kTileKeys scores.
// Tile is float[kElements], Lane is made from a lane number. For the backward pass a Layout also has the following, where "row"
// means query except in kKeyRows:
//
//   query(first, v), key(first, v) first + query_slot(v), first + key_slot(v); the family chooses the order of the additions,
//                                  because ptxas's schedule depends on it
//   kKeyRows                       true: rows of the product are keys (S^T); scores s[m][n] then have tiles of keys in m
//   kRows, row_of(v), row_slot(r)  element v is of the lane's query r = row_of(v) < kRows, which is first_query + row_slot(r)
//   kKeys, kKeyStride              a query's keys in the lane: kKeys of an aligned group of four, kKeyStride apart: 4 and 1 for
//                                  keys 0 to 3, or 2 and 2 for keys 0 and 2 in some lanes, 1 and 3 in others
//   element(r, j)                  the element of query r and key j of the lane
//   kQueryPartnerMask              where kKeys or kRows is 4: XOR mask to the lane whose queries are 4 before or after: a call of
//                                  dropout's generator (Philox) draws for four keys of both (modifiers.cuh, packed_tile.cuh)
//   kKeyPartnerMask                where kKeys is 2: XOR mask to the lane that has the other two keys of the group
#pragma once

#include "score_layout.cuh"
#include "seqlen_info.cuh"  // BlockSeqlenInfo, mask_of(): lengths and mask of a sequence
#include "softmax.cuh"  // negative_infinity()
#include "unrolled.cuh"  // unrolled(): nested unrolled loops
#include "volta_fa_params.h"  // generated from src/params: BwdParams

// Returns whether a layout's rows, keys and elements agree. For a static_assert after each layout.
template <class Layout>
__device__ constexpr bool has_rows_and_keys() {
    static_assert(Layout::kRows * Layout::kKeys == Layout::kElements && Layout::kKeys * Layout::kKeyStride == 4,
                  "a lane's elements are kRows queries by kKeys keys of an aligned group of four");
    for (int r = 0; r < Layout::kRows; r++)
        for (int j = 0; j < Layout::kKeys; j++) {
            const int v = Layout::element(r, j);
            if (Layout::row_of(v) != r || Layout::query_slot(v) != Layout::row_slot(r) ||
                Layout::key_slot(v) != j * Layout::kKeyStride)
                return false;
        }
    return true;
}

// The coordinates of a lane's elements of one tile.
template <class Layout>
class ScoreCoord {
    int query_, key_;  // of element 0

public:
    // `query` and `key`: first of the tile.
    __device__ __forceinline__ ScoreCoord(const typename Layout::Lane& lane, int query, int key) {
        // Rows of the product first: ptxas's schedule depends on the order.
        if (Layout::kKeyRows) key_ = key + Layout::first_key(lane);
        query_ = query + Layout::first_query(lane);
        if (!Layout::kKeyRows) key_ = key + Layout::first_key(lane);
    }
    __device__ __forceinline__ int query(int v) const { return Layout::query(query_, v); }
    __device__ __forceinline__ int key(int v) const { return Layout::key(key_, v); }
    // Returns query - key of element v, relative to element 0: for ALiBi.
    __device__ __forceinline__ static constexpr int query_minus_key(int v) { return Layout::query_slot(v) - Layout::key_slot(v); }
};

// Sets masked scores of a warp's tiles to -inf. Only for tiles across a mask's edge. `query` and `key`: the warp's first.
template <class Layout, int M, int N>
__device__ __forceinline__ void apply_mask(typename Layout::Tile (&s)[M][N], const BwdParams& p, const typename Layout::Lane& lane,
                                           int query, int key) {
    const Mask mask = mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z));
    // Slots of element 0 are 0 in all layouts, so query(0) and key(0) are the lane's first.
    const ScoreCoord<Layout> coord(lane, query, key);
    unrolled<M, N, Layout::kElements>([&](int m, int n, int v) {
        const int j = Layout::key(coord.key(0) + Layout::kTileKeys * (Layout::kKeyRows ? m : n), v);
        const int i = Layout::query(coord.query(0) + Layout::kTileQueries * (Layout::kKeyRows ? n : m), v);
        if (!mask.visible(i, j)) s[m][n][v] = negative_infinity();
    });
}
// Sets masked scores of one tile to -inf.
template <class Layout>
__device__ __forceinline__ void mask_tile(typename Layout::Tile& s, const Mask& mask, const ScoreCoord<Layout>& coord) {
#pragma unroll
    for (int v = 0; v < Layout::kElements; v++)
        if (!mask.visible(coord.query(v), coord.key(v))) s[v] = negative_infinity();
}
