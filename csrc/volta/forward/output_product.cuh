// Second product, O += P V, of volta forward kernels whose V lies in shared memory without padding (shared_q, column_groups).
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, in row qm and column qn of the warp's 2x2 (volta/mma.cuh). A
// chunk is eight fp16 columns, 16 bytes. Output tiles of 16 by 16 come in pairs, of a group of four chunks of V: tile 2j has the
// first four columns of each of group j's chunks, tile 2j + 1 the last four (output_column() in layout.cuh).
#pragma once

#include "volta/forward/layout.cuh"

namespace volta {

// Adds P V to the output o, for the keys of Columns (1 or 2) quad-pair columns w, eight keys each. Of two, w 0 is the lane's own
// qn, 1 the other; of one, the caller's part() and address() say which. A product takes four of the eight keys: the even ones with
// u = 0, the odd ones with 1. part(row tile, w, u): P of these, four fp16 of a row (RowPair). address(w): the lane's address of V
// for u = 0; rows are Pitch bytes apart, in a swizzled tile (tile.cuh).
template <int Columns, int Pitch, int RowTiles, int OutputTiles, class Part, class Address>
__device__ __forceinline__ void accumulate_columns(Accumulator (&o)[RowTiles][OutputTiles], Part part, Address address) {
    constexpr int kChunksV = 2 * OutputTiles;
    constexpr int kGroups = kChunksV / 4;  // a group has one chunk for each (qn, half)
    constexpr int kLoads = Columns * 2 * kGroups;  // number i is (w, u, group j), j fastest
    // Loads that are issued together, ahead of their use. 3 where it divides kLoads, because 4 may not.
    constexpr int kAtOnce = kGroups % 3 == 0 ? 3 : 4;
    const auto load = [&](int i) {
        const int w = i / (2 * kGroups), u = i / kGroups % 2, j = i % kGroups;
        // Row u + 2 quad + 8 qn: bit 0 of the row is u, which the swizzle XORs into bit 2 of the chunk. (Not where a row's chunks
        // are no multiple of eight: there the pitch already moves odd rows to other banks.)
        const int group = kChunksV % 8 == 0 ? j ^ u : j;
        return load_shared(address(w) + u * Pitch + group * 4 * kChunkBytes);
    };
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) v[i] = load(i);
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        const int w = i / (2 * kGroups), u = i / kGroups % 2, j = i % kGroups;
        if (i % kAtOnce == 0) {
            __syncwarp();  // ptxas would move more loads up, and need more registers
#pragma unroll
            for (int n = i + kAtOnce; n < i + 2 * kAtOnce && n < kLoads; n++) v[n] = load(n);
        }
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) mma_row_row(o[mt][2 * j], part(mt, w, u).lo, part(mt, w, u).hi, v[i].x, v[i].y);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) mma_row_row(o[mt][2 * j + 1], part(mt, w, u).lo, part(mt, w, u).hi, v[i].z, v[i].w);
    }
}

}  // namespace volta
