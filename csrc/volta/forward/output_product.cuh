// Second product, O += P V, of volta forward kernels whose V lies in shared memory without padding. Each warp calls it for every
// 16 keys of a step, after the softmax: in shared_q.cuh for all 16 at once or eight at a time, in column_groups.cuh for eight.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, where quad is lane % 4 and half is lane / 16. A quad-pair is in
// row qm (bit 2 of the lane) and column qn (bit 3) of the warp's 2x2 (volta/mma.cuh). A chunk is eight fp16 columns, 16 bytes; a
// panel is four chunks. Output tile 2j (16 by 16) has the first half of each of panel j's chunks, tile 2j + 1 the second half.
#pragma once

#include "volta/forward/layout.cuh"

namespace volta {

// Adds P V to the output o, of RowTiles by OutputTiles tiles. Quad-pair column qn has the scores of eight of 16 keys.
//
//   Columns, w        quad-pair columns whose keys to take: 2 (w = 0: the lane's own, 1: the other), or 1, which the caller chooses
//   u                 a product takes four of eight keys: the even ones with u = 0, the odd ones with 1
//   pair(mt, w, u)    P of these four keys, in a row of row tile mt: four fp16 (RowPair)
//   address(w)        shared address of the lane's chunk of V in panel 0, for u = 0
//   Pitch             bytes between rows of V, which are swizzled (tile.cuh): their chunks are permuted by XOR
template <int Columns, int Pitch, int RowTiles, int OutputTiles, class Pair, class Address>
__device__ __forceinline__ void accumulate_columns(Accumulator (&o)[RowTiles][OutputTiles], Pair pair, Address address) {
    constexpr int kChunksV = 2 * OutputTiles;  // chunks of V for these columns
    constexpr int kPanels = kChunksV / 4;  // a panel has one chunk for each (qn, half)
    constexpr int kLoads = Columns * 2 * kPanels;  // number i is (w, u, panel j), j fastest
    // Loads that are issued together, ahead of their use. 3 where it divides kLoads, because 4 may not.
    constexpr int kAtOnce = kPanels % 3 == 0 ? 3 : 4;
    const auto load = [&](int i) {
        const int w = i / (2 * kPanels), u = i / kPanels % 2, j = i % kPanels;
        // Row u + 2 quad + 8 qn: bit 0 of the row is u, which the swizzle XORs into bit 2 of the chunk: bit 0 of the panel. (Not
        // where a row's chunks are no multiple of eight: there the pitch already moves odd rows to other banks.)
        const int swizzled_panel = kChunksV % 8 == 0 ? j ^ u : j;
        return load_shared(address(w) + u * Pitch + swizzled_panel * 4 * kChunkBytes);
    };
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) v[i] = load(i);
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
        const int w = i / (2 * kPanels), u = i / kPanels % 2, j = i % kPanels;
        if (i % kAtOnce == 0) {
            __syncwarp();  // ptxas would move more loads up, and need more registers
#pragma unroll
            for (int n = i + kAtOnce; n < i + 2 * kAtOnce && n < kLoads; n++) v[n] = load(n);
        }
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) mma_row_row(o[mt][2 * j], pair(mt, w, u).lo, pair(mt, w, u).hi, v[i].x, v[i].y);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) mma_row_row(o[mt][2 * j + 1], pair(mt, w, u).lo, pair(mt, w, u).hi, v[i].z, v[i].w);
    }
}

}  // namespace volta
