// Products q . k of DeepSeek V3.2's lightning indexer, which scores keys for sparse attention, on Turing. IndexerProducts is the
// template argument Products of indexer::Kernel (indexer/indexer.cuh): the kernel calls load() once for its queries and multiply()
// for each 16 keys, then sums relu(q . k) over heads, with weights. A warp multiplies 32 rows (a row is one head of one query), in
// registers, by 16 keys, in shared memory, by mma.m16n8k8 with operands by ldmatrix. Scores are fp32.
//
//   kRowTiles, mt     2, row tiles of 16 rows; number of one
//   kChunks, c        16, chunks of 8 of the 128 fp16 columns of a row of Q or K, kChunkBytes (16) each; number of one
//   kPitch            bytes from one row of shared memory to the next
//   group, quad       of a lane: lane / 4, lane % 4 (turing/mma.cuh)
#pragma once

#include "indexer/indexer.cuh"
#include "turing/mma.cuh"

namespace turing {

struct IndexerProducts {
    using Queries = u32[indexer::kRowTiles][indexer::kChunks][2];  // the lane's operand A of each row tile and chunk
    struct Scores {
        Accumulator tile[indexer::kRowTiles][2];  // [row tile][keys 0 to 7, 8 to 15], four elements each
        __device__ __forceinline__ float at(int mt, int v) const { return tile[mt][v >> 2][v & 3]; }
        __device__ __forceinline__ void clear() { clear_tiles(tile); }
    };
    static constexpr int kRowStep = 8;  // from row() to the lane's other row of a tile
    static constexpr int kLaneMasks[3] = {16, 8, 4};  // shfl_xor masks to the lanes with other rows of the same keys (other groups)

    Lane lane;

    __device__ __forceinline__ explicit IndexerProducts(int lane_) : lane(lane_) {}
    // at(mt, v), v: 0 to 7, is the score of row row() + kRowStep * ((v >> 1) & 1) of row tile mt and key((v & 1) + 2 * (v >> 2)).
    __device__ __forceinline__ int row() const { return lane.group; }
    __device__ __forceinline__ int key(int i) const { return 2 * lane.quad + (i & 1) + 8 * (i >> 1); }
    // Byte offset, in a tile of 16 keys, of the matrix row that the lane addresses for ldmatrix. The four matrices are keys 0 to 7
    // of two chunks, then keys 8 to 15 of these.
    __device__ __forceinline__ int key_offset() const {
        return (lane.lane % 8 + lane.lane / 16 * 8) * indexer::kPitch + (lane.lane >> 3 & 1) * kChunkBytes;
    }

    // Loads row tile mt of the queries from shared memory, where its row 0 is at `address`.
    __device__ __forceinline__ void load(Queries& q, int mt, u32 address) const {
        // matrices are rows 0 to 7 and 8 to 15 of a chunk, then of the next
        const u32 lane_row = address + lane.lane % 16 * indexer::kPitch + lane.lane / 16 * kChunkBytes;
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c += 2) {
            u32 r[4];
            load_matrices(r, lane_row + c * kChunkBytes);
#pragma unroll
            for (int i = 0; i < 4; i++) q[mt][c + i / 2][i % 2] = r[i];
        }
    }
    // Computes s = q . k, where `keys` is the tile's address plus key_offset(). Calls beside(c), other work of the warp that
    // overlaps the products, before those of each chunk c.
    template <class Beside>
    __device__ __forceinline__ void multiply(Scores& s, const Queries& q, u32 keys, Beside beside) const {
        s.clear();
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c += 2) {
            u32 k[4];  // [2 * n + part]: keys 8 * n to 8 * n + 7 of chunk c + part
            load_matrices(k, keys + c * kChunkBytes);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                beside(c + part);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int mt = 0; mt < indexer::kRowTiles; mt++) mma(s.tile[mt][n], q[mt][c + part], k[2 * n + part]);
            }
        }
    }
};

}  // namespace turing
