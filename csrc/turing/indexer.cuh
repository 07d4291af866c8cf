// Products q . k of DeepSeek V3.2's lightning indexer, which scores keys for sparse attention, on Turing: 32 rows (a row is one
// head of one query) by 16 keys at a time, by mma.m16n8k8, with operands by ldmatrix. It is the Products argument of
// indexer::Kernel (indexer/indexer.cuh), which sums relu(q . k) over heads, with weights. The rows are kRowTiles (2) row tiles of
// 16. A row of Q or K has 128 fp16 columns: kChunks (16) chunks of 8, kChunkBytes (16) each. Scores are fp32. A lane's group is
// lane / 4, its quad lane % 4 (turing/mma.cuh).
#pragma once

#include "indexer/indexer.cuh"
#include "turing/mma.cuh"

namespace turing {

struct IndexerProducts {
    using Queries = u32[indexer::kRowTiles][indexer::kChunks][2];  // the lane's operand A of each row tile and chunk
    struct Scores {
        Accumulator tile[indexer::kRowTiles][2];  // two tiles of eight keys
        __device__ __forceinline__ float at(int mt, int v) const { return tile[mt][v >> 2][v & 3]; }
        __device__ __forceinline__ void clear() { clear_tiles(tile); }
    };
    static constexpr int kRowStep = 8;  // from row() to the lane's other row of a tile
    static constexpr int kLaneMasks[3] = {16, 8, 4};  // shfl_xor masks that reach the lanes with other rows of the same keys

    Lane lane;

    __device__ __forceinline__ explicit IndexerProducts(int lane_) : lane(lane_) {}
    // at(mt, v) is the score of row row() + kRowStep * ((v >> 1) & 1) of row tile mt (16 rows) and key((v & 1) + 2 * (v >> 2)).
    __device__ __forceinline__ int row() const { return lane.group; }
    __device__ __forceinline__ int key(int i) const { return 2 * lane.quad + (i & 1) + 8 * (i >> 1); }
    // Offset in bytes of the row that the lane addresses for ldmatrix, whose four matrices are keys 0 to 7 of two chunks, then keys
    // 8 to 15. kPitch: bytes between rows in shared memory.
    __device__ __forceinline__ int key_offset() const {
        return (lane.lane % 8 + lane.lane / 16 * 8) * indexer::kPitch + (lane.lane >> 3 & 1) * kChunkBytes;
    }

    // Loads row tile mt from 16 rows of fp16 at `address`.
    __device__ __forceinline__ void load(Queries& q, int mt, u32 address) const {
        // matrices are rows 0 to 7 and 8 to 15 of a chunk, then of the next
        const u32 own = address + lane.lane % 16 * indexer::kPitch + lane.lane / 16 * kChunkBytes;
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c += 2) {
            u32 r[4];
            load_matrices(r, own + c * kChunkBytes);
#pragma unroll
            for (int i = 0; i < 4; i++) q[mt][c + i / 2][i % 2] = r[i];
        }
    }
    // Sets s to the scores of the 16 keys at `keys`, a shared address with the lane's key_offset(). Calls beside(c), other work of
    // the kernel, before the products of chunk c.
    template <class Beside>
    __device__ __forceinline__ void multiply(Scores& s, const Queries& q, u32 keys, Beside beside) const {
        s.clear();
#pragma unroll
        for (int c = 0; c < indexer::kChunks; c += 2) {
            u32 k[4];
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
