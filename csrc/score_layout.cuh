// Which lane holds which score of an mma tile: the contract between shared code and a family's mma layout. Each mma instruction
// gives a lane some elements of a tile of scores. Masks, softmax, ALiBi, bias and dropout (forward/scores.cuh,
// backward/score_coord.cuh) only need the query and the key of each element. So a family describes each of its tilings by a Layout,
// a struct of static functions and constants:
//
//   using Lane                     made from a lane number; argument of the functions below
//   using Tile                     float[kElements]: a lane's elements of one tile
//   kTileQueries, kTileKeys        size of a tile: forward 16 x 16 for volta, 16 x 8 for turing
//   kElements                      elements of a lane: kTileQueries * kTileKeys / 32 (ColumnGroupsLayout: some rows of a tile only)
//   first_query(lane)              the lane's lowest query in a tile
//   first_key(lane)                the lane's lowest key in a tile
//   query_slot(v), key_slot(v)     element v is query first_query + query_slot(v) and key first_key + key_slot(v)
//
// A forward Layout also says how elements form rows, which share a softmax:
//
//   kRows, row_of(v), row_slot(r)  element v belongs to the lane's row row_of(v) < kRows: query first_query + row_slot(r)
//   kKeys                          2 or 4: keys of each row are within one aligned group of kKeys, from first_key on, so that they
//                                  share a group of random numbers and a load of the bias
//   kEitherOrder                   whether grids may have heads on their first axis (forward/block.cuh)
//   kRowLaneMasks                  shfl_xor masks that reach the other lanes of a row
//   leads_row(lane)                true for one lane of each row, which writes the row's lse
//
// Operand loads, products and packing have no common form: they are in volta/mma.cuh, volta/forward/layout.cuh and so on. row_max()
// and row_sum() at the end reduce over the lanes of a row, in decode's layouts too.
#pragma once

// Whether the lanes' elements cover the tile, each (query, key) once. For a static_assert after each layout.
template <class Layout>
__device__ constexpr bool covers_tile() {
    static_assert(32 * Layout::kElements == Layout::kTileQueries * Layout::kTileKeys, "a warp holds a tile");
    bool held[Layout::kTileQueries * Layout::kTileKeys] = {};
    for (int index = 0; index < 32; index++)
        for (int v = 0; v < Layout::kElements; v++) {
            const typename Layout::Lane lane(index);
            const int query = Layout::first_query(lane) + Layout::query_slot(v),
                      key = Layout::first_key(lane) + Layout::key_slot(v);
            if (query >= Layout::kTileQueries || key >= Layout::kTileKeys || held[query * Layout::kTileKeys + key]) return false;
            held[query * Layout::kTileKeys + key] = true;
        }
    return true;
}

// Whether a forward layout's rows agree with its elements, and kRowLaneMasks with both. For a static_assert after each layout.
template <class Layout>
__device__ constexpr bool has_rows() {
    int distances = 0;  // bits in which the numbers of a row's lanes may differ
    for (int lane_mask : Layout::kRowLaneMasks) distances |= lane_mask;
    for (int v = 0; v < Layout::kElements; v++)
        if (Layout::row_slot(Layout::row_of(v)) != Layout::query_slot(v) || Layout::key_slot(v) >= Layout::kKeys) return false;
    for (int index = 0; index < 32; index++) {
        const typename Layout::Lane lane(index);
        int leaders = 0;
        for (int other_index = 0; other_index < 32; other_index++) {
            const typename Layout::Lane other(other_index);
            const bool same_row = Layout::first_query(lane) == Layout::first_query(other);
            if (same_row != ((index & ~distances) == (other_index & ~distances))) return false;
            leaders += same_row && Layout::leads_row(other);
        }
        if (leaders != 1 || Layout::first_key(lane) % Layout::kKeys != 0) return false;
    }
    return true;
}

// Return the maximum, or the sum, of x over the lanes of a row (kRowLaneMasks). All lanes of the warp call them together.
template <class Layout>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int lane_mask : Layout::kRowLaneMasks) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane_mask));
    return x;
}
template <class Layout>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int lane_mask : Layout::kRowLaneMasks) x += __shfl_xor_sync(~0u, x, lane_mask);
    return x;
}
