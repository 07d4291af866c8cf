// Second product, O += P V, of the volta forward kernels whose V lies in shared memory without padding (shared_q.cuh,
// column_groups.cuh).
//
// A lane is number t (0 to 7) of its quad-pair: t % 4 is quad, t / 4 is half. The four quad-pairs of a warp form a 2x2 over a tile
// of 16 by 16. The lane's quad-pair is in row qm and column qn of it (volta/mma.cuh).
#pragma once

#include "volta/forward/layout.cuh"

namespace volta {

// O += P V for the keys of Columns quad-pair columns (qn, volta/mma.cuh), eight each. u: product of four of the eight keys.
// part(row tile, column, u): P. address(column): the lane's address of V, whose rows are Pitch bytes apart.
template <int Columns, int Pitch, int RowTiles, int OutputTiles, class Part, class Address>
__device__ __forceinline__ void accumulate_columns(Accumulator (&o)[RowTiles][OutputTiles], Part part, Address address) {
    constexpr int kChunksV = 2 * OutputTiles;
    constexpr int kGroups = kChunksV / 4;  // of four chunks, one for each (qn, half)
    constexpr int kLoads = Columns * 2 * kGroups;  // for column x u x group
    constexpr int kAtOnce = kGroups % 3 == 0 ? 3 : 4;  // a part of the loads of one (column, u), issued ahead of its use
    const auto load = [&](int i) {
        const int w = i / (2 * kGroups), u = i / kGroups % 2, j = i % kGroups;
        // Row u + 2 quad + 8 qn: bit 0 of the row is u, which the swizzle XORs into bit 2 of the chunk.
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
            __syncwarp();
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
