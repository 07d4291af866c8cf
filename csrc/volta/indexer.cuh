// Products q . k of DeepSeek V3.2's lightning indexer on Volta, 32 query rows by 16 keys: quad-pairs 2x2, with the rows and keys of
// the forward kernels (volta/forward/layout.cuh). indexer/indexer.cuh has the formula and says what each member is. beside(c) runs
// other work between the products of chunk c.
//
// A lane is number t (0 to 7) of its quad-pair: t % 4 is quad, t / 4 is half. The four quad-pairs of a warp form a 2x2 over a tile
// of 16 by 16. The lane's quad-pair is in row qm and column qn of it (volta/mma.cuh).
#pragma once

#include "indexer/indexer.cuh"
#include "volta/mma.cuh"

namespace volta {

struct IndexerProducts {
    using Queries = uint4[indexer::kRowTiles][indexer::kChunks];
    struct Scores {
        Accumulator tile[1][indexer::kRowTiles];
        __device__ __forceinline__ float at(int mt, int v) const { return tile[0][mt][v]; }
        __device__ __forceinline__ void clear() { clear_tiles(tile); }
    };
    static constexpr int kRowStep = 4;  // from row() to the lane's other row of a tile
    static constexpr int kLaneMasks[3] = {16, 4, 1};  // shfl_xor masks that reach the lanes with other rows of the same keys
    static constexpr int kAhead = 2;  // chunks of keys that are loaded ahead of the products that use them

    Lane lane;

    __device__ __forceinline__ explicit IndexerProducts(int lane_) : lane(lane_) {}
    __device__ __forceinline__ int row() const { return lane.qm + 2 * (lane.t & 1) + 8 * lane.half; }
    __device__ __forceinline__ int key(int i) const { return 2 * (lane.t & 2) + 8 * lane.qn + 2 * (i & 1) + (i >> 1); }
    // The lane's row of operand K, bytes.
    __device__ __forceinline__ int key_offset() const { return (lane.half + 2 * lane.quad + 8 * lane.qn) * indexer::kPitch; }

    __device__ __forceinline__ void load(Queries& q, int mt, u32 address) const {
        const u32 own = address + (lane.qm + 2 * lane.quad + 8 * lane.half) * indexer::kPitch;
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c++) q[mt][c] = load_shared(own + c * kChunkBytes);
    }
    template <class Beside>
    __device__ __forceinline__ void multiply(Scores& s, const Queries& q, u32 keys, Beside beside) const {
        s.clear();
        uint4 k[kAhead + 1];
#pragma unroll
        for (int c = 0; c < kAhead; c++) k[c] = load_shared(keys + c * kChunkBytes);
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c++) {
            if (c + kAhead < indexer::kChunks) k[(c + kAhead) % (kAhead + 1)] = load_shared(keys + (c + kAhead) * kChunkBytes);
            beside(c);
            const uint4& b = k[c % (kAhead + 1)];
#pragma unroll
            for (int mt = 0; mt < indexer::kRowTiles; mt++) mma_row_col(s.tile[0][mt], q[mt][c].x, q[mt][c].y, b.x, b.y);
#pragma unroll
            for (int mt = 0; mt < indexer::kRowTiles; mt++) mma_row_col(s.tile[0][mt], q[mt][c].z, q[mt][c].w, b.z, b.w);
        }
    }
};

}  // namespace volta
