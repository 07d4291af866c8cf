// Products q . k of DeepSeek V3.2's lightning indexer on Volta: IndexerProducts is the template argument Products of
// indexer::Kernel, which calls it (indexer/indexer.cuh). A warp multiplies 32 query rows (heads of a query), in registers, by tiles
// of 16 keys, in shared memory. The rows are kRowTiles (2) row tiles of 16. A row has 128 fp16 columns: kChunks (16) chunks of
// eight, kChunkBytes (16) each. Rows of shared memory are kPitch bytes apart.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, in row qm and column qn of the warp's 2x2 (volta/mma.cuh). Rows
// and keys are assigned so that shared loads have no bank conflicts (as in volta/forward/layout.cuh).
#pragma once

#include "indexer/indexer.cuh"
#include "volta/mma.cuh"

namespace volta {

struct IndexerProducts {
    using Queries = uint4[indexer::kRowTiles][indexer::kChunks];  // the lane's operands: two row tiles of 16
    // Scores of the two row tiles and 16 keys. at(mt, v): element v (0 to 7) of the lane in row tile mt.
    struct Scores {
        Accumulator tile[indexer::kRowTiles];
        __device__ __forceinline__ float at(int mt, int v) const { return tile[mt][v]; }
        __device__ __forceinline__ void clear() { clear_tiles(tile); }
    };
    static constexpr int kRowStep = 4;  // from row() to the lane's other row of a tile
    static constexpr int kLaneMasks[3] = {16, 4, 1};  // shfl_xor masks that reach the lanes with other rows of the same keys
    static constexpr int kAhead = 2;  // chunks of keys that are loaded ahead of the products that use them

    Lane lane;

    __device__ __forceinline__ explicit IndexerProducts(int lane_) : lane(lane_) {}
    // Query rows and keys of the lane's scores. Element v is in row row() + kRowStep * ((v >> 1) & 1) of its row tile, and of key
    // key((v & 1) + 2 * (v >> 2)).
    __device__ __forceinline__ int row() const { return lane.qm + 2 * (lane.t & 1) + 8 * lane.half; }
    __device__ __forceinline__ int key(int i) const { return 2 * (lane.t & 2) + 8 * lane.qn + 2 * (i & 1) + (i >> 1); }
    // Byte offset of the lane's row of operand K in a tile of keys.
    __device__ __forceinline__ int key_offset() const { return (lane.half + 2 * lane.quad + 8 * lane.qn) * indexer::kPitch; }

    // Loads row tile mt of the queries from shared memory, where its row 0 is at `address`.
    __device__ __forceinline__ void load(Queries& q, int mt, u32 address) const {
        const u32 lane_row = address + (lane.qm + 2 * lane.quad + 8 * lane.half) * indexer::kPitch;
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c++) q[mt][c] = load_shared(lane_row + c * kChunkBytes);
    }
    // Computes s = q . k, where `keys` is the tile's address plus key_offset(). Calls beside(c), other work of the warp that
    // overlaps the products, before those of each chunk c.
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
            for (int mt = 0; mt < indexer::kRowTiles; mt++) mma_row_col(s.tile[mt], q[mt][c].x, q[mt][c].y, b.x, b.y);
#pragma unroll
            for (int mt = 0; mt < indexer::kRowTiles; mt++) mma_row_col(s.tile[mt], q[mt][c].z, q[mt][c].w, b.z, b.w);
        }
    }
};

}  // namespace volta
