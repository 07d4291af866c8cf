// Who holds which score: what the code that no family owns must know of an arithmetic layer.
//
// A family's mma instruction hands each lane of a warp some elements of a tile of scores. Masks, references, ALiBi, bias,
// dropout (forward/scores.cuh; the backward pass has its own) only ask which query and which key an element is. A family answers
// with a struct of static functions and constants, a layout, one for each way in which its kernels deal out rows and columns:
//
//   using Lane                     made from a lane's number; what the functions below take
//   using Tile                     float[kElements], a lane's elements of one tile
//   kTileQueries, kTileKeys        the tile: 16 x 16 for volta, 16 x 8 for turing
//   kElements                      of one lane; kTileQueries * kTileKeys / 32
//   first_query(lane)              the lane's lowest query of a tile, and its lowest key
//   first_key(lane)
//   query_slot(v), key_slot(v)     element v is query first_query + query_slot(v), key first_key + key_slot(v)
//
// A layout of the forward pass also says how a lane's elements make rows, whose softmax they share:
//
//   kRows, row_of(v), row_slot(r)  element v is of the lane's row row_of(v) < kRows, query first_query + row_slot(r)
//   kKeys                          consecutive keys of each of its rows, from first_key on, which is a multiple of kKeys:
//                                  2 or 4, so that they lie in one group of four random numbers and one load of the bias
//   kEitherOrder                   whether the family's grids may have heads first (forward/block.cuh)
//   kRowLaneMasks                      the lanes that hold a row's other keys: shfl_xor over each of these distances in turn
//   leads_row(lane)                one of them, true of the lane that writes what a row has once
//
// The rest of an arithmetic layer, operand loads, products and the packing of probabilities into operands, has no common
// form: kernels are written for it. It lies beside the layout: volta/mma.cuh and volta/forward/layout.cuh.
#pragma once

// Whether the lanes' elements are the tile, each query and key once. For a static_assert beside each layout.
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

// Whether a forward layout's rows agree with its elements, and the row mates with both.
template <class Layout>
__device__ constexpr bool has_rows() {
    int distances = 0;
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
