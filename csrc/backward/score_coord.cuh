// Where a lane's scores lie in the sequence, and the mask on them.
//
// A family says who holds which score by a layout (score_layout.cuh), which in the backward pass also has:
//
//   query(first, v), key(first, v) first + query_slot(v), first + key_slot(v): the family says in which order the terms are added,
//                                  because ptxas' schedule hangs on it
//   kKeyRows                       rows of the product are keys: S^T, a warp's scores s[m][n] have the tiles of keys in m
//   kRows, row_of(v), row_slot(r)  element v is of the lane's query number row_of(v) < kRows, first_query + row_slot(r)
//   kKeys, kKeyStride              of each of them it has so many keys, so far apart, in one group of four (from a multiple of 4):
//                                  all 4, or 2, of which the first is number 0 or 1 of the group and the other two further
//   element(r, j)                  the element of its query number r and key number j
//   kQueryMate                     where kKeys is 4: the lane whose queries are 4 before or behind is so far away (XOR)
#pragma once

#include "score_layout.cuh"
#include "seqlen_info.cuh"
#include "softmax.cuh"
#include "volta_fa_params.h"

// Whether a layout's rows, keys and elements agree. For a static_assert beside each layout.
template <class Layout>
__device__ constexpr bool has_rows_and_keys() {
    static_assert(Layout::kRows * Layout::kKeys == Layout::kElements && Layout::kKeys * Layout::kKeyStride == 4,
                  "see the file's head");
    for (int r = 0; r < Layout::kRows; r++)
        for (int j = 0; j < Layout::kKeys; j++) {
            const int v = Layout::element(r, j);
            if (Layout::row_of(v) != r || Layout::query_slot(v) != Layout::row_slot(r) ||
                Layout::key_slot(v) != j * Layout::kKeyStride)
                return false;
        }
    return true;
}

template <class Layout>
class ScoreCoord {
    int query_, key_;  // of element 0

public:
    // `query` and `key` are the tile's first.
    __device__ __forceinline__ ScoreCoord(const typename Layout::Lane& lane, int query, int key) {
        // rows of the product first: schedules hang on the order
        if (Layout::kKeyRows) key_ = key + Layout::first_key(lane);
        query_ = query + Layout::first_query(lane);
        if (!Layout::kKeyRows) key_ = key + Layout::first_key(lane);
    }
    __device__ __forceinline__ int query(int v) const { return Layout::query(query_, v); }
    __device__ __forceinline__ int key(int v) const { return Layout::key(key_, v); }
    // What query - key is more than that of element 0.
    __device__ __forceinline__ static constexpr int query_minus_key(int v) { return Layout::query_slot(v) - Layout::key_slot(v); }
};

// Sets what the mask hides to -inf. Only for tiles at an edge: the caller branches, all lanes alike. `query` and `key` are the
// first of the warp's scores.
template <class Layout, int M, int N>
__device__ __forceinline__ void apply_mask(typename Layout::Tile (&s)[M][N], const BwdParams& p, const typename Layout::Lane& lane,
                                           int query, int key) {
    const Mask mask = mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z));
    const ScoreCoord<Layout> coord(lane, query, key);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++) {
                const int j = Layout::key(coord.key(0) + Layout::kTileKeys * (Layout::kKeyRows ? m : n), v);
                const int i = Layout::query(coord.query(0) + Layout::kTileQueries * (Layout::kKeyRows ? n : m), v);
                if (!mask.visible(i, j)) s[m][n][v] = negative_infinity();
            }
}
// The same of one tile.
template <class Layout>
__device__ __forceinline__ void mask_tile(typename Layout::Tile& s, const Mask& mask, const ScoreCoord<Layout>& coord) {
#pragma unroll
    for (int v = 0; v < Layout::kElements; v++)
        if (!mask.visible(coord.query(v), coord.key(v))) s[v] = negative_infinity();
}
