// dQ += dS K in the main kernels of turing, which own keys: the product that all warps of a block share. The result is added to
// dq's fp32 accumulator by atomics, or stored as dq by the fused kernel, whose block has all keys. A Shape S (shape.cuh) gives
// sizes: kRows keys of the block, kStep queries of a step, kChunks chunks (8 columns) of a row of K, kRowBytes bytes, kScoreChunks
// and kScoreRowBytes of a row of dS^T. Of a lane, group is lane / 4, and quad is lane % 4 (turing/mma.cuh). remat_*() reads a
// special register again (ptx.cuh).
#pragma once

#include "turing/backward/dq_accumulator.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// dQ of a step is kStep queries x headdim. A warp computes kPairs pairs of column tiles (16 queries x 16 columns each), over all
// keys of the block. Where pairs do not divide evenly among warps but half pairs would, over half of the keys: 8 warps
// that share 16 queries take 12 pairs (headdim 192) as 3 each, so that two warps share each pair (kKeyParts = 2).
template <class S>
struct DqProduct {
    static constexpr int kAllPairs = S::kChunks / 2;  // of 16 queries
    static constexpr int kTileWarps = S::kWarps / (S::kStep / 16);  // warps that share 16 queries
    static constexpr int kKeyParts = kAllPairs % kTileWarps != 0 && 2 * kAllPairs % kTileWarps == 0 ? 2 : 1;
    static constexpr int kColumnWarps = kTileWarps / kKeyParts;  // distance between the pairs of a warp
    static constexpr int kPairs = (kAllPairs + kColumnWarps - 1) / kColumnWarps;  // of a warp; j numbers them below
    static constexpr int kKeys = S::kRows / kKeyParts;  // of the block, over which a warp sums

    static __device__ __forceinline__ u32 query_tile(u32 warp) { return warp / kTileWarps; }
    static __device__ __forceinline__ u32 first_key(u32 warp) { return warp % kTileWarps / kColumnWarps * kKeys; }
    static __device__ __forceinline__ u32 pair(u32 warp) { return warp % kColumnWarps; }
    // With fewer pairs than warps, the last warps have none. The first clause is known at compile time.
    static __device__ __forceinline__ bool has_pair(u32 warp) { return kAllPairs >= kColumnWarps || pair(warp) < u32(kAllPairs); }

    // Addresses that a lane gives to ldmatrix, for a warp. ds, keys: shared addresses of dS^T and K. pair_after(x, n) is 2 * n
    // chunks (of 8 columns) after x, score_offset() a chunk's offset in dS^T. dS^T is transposed by the load: matrices 0 and 1 are
    // the two groups of eight queries of the first eight keys. K's matrices 0 and 1 are all 16 keys of the first chunk: by_rows()
    // (fragments.cuh) orders matrices down the rows of a tile first.
    static __device__ __forceinline__ u32 a_operand(u32 ds, u32 lane, u32 warp) {
        return ds + score_offset<S::kScoreChunks>(first_key(warp) + lane % 8 + lane / 16 * 8, 2 * query_tile(warp) + lane / 8 % 2);
    }
    static __device__ __forceinline__ u32 b_operand(u32 keys, u32 lane, u32 warp) {
        return by_rows<S>(keys, lane, 2 * (has_pair(warp) ? pair(warp) : 0)) + first_key(warp) * S::kRowBytes;
    }
    // Offset of the lane's first element, from the first of the step's rows.
    static __device__ __forceinline__ u32 output_offset(u32 lane, u32 warp) {
        // With dropout alone (kOneCallPerLane), a step's queries lie in shared memory in the order 0, 4, 1, 5, 2, 6, 3, 7, so that
        // a lane has the two of one call of the random generator (fragments.cuh). The accumulator keeps their own order: query q
        // of eight is that of lanes 4 * q to 4 * q + 3. KeysLayout<2> is the main kernels' layout of a tile with 32 keys.
        if (kOneCallPerLane) lane = 4 * KeysLayout<2>::query_of_row(lane / 4) + lane % 4;
        return query_tile(warp) * 16 * S::kHeaddim + 2 * pair(warp) * DqAccumulator::kTileFloats + lane;
    }

    // Computes the warp's pairs j to j + Pairs - 1, 16 keys at a time (k: eight of them). Several pairs share the loads of dS.
    template <int Pairs>
    static __device__ __forceinline__ void multiply(Accumulator (&c)[Pairs][2], u32 a_address, u32 b_address, int j) {
        clear_tiles(c);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16) {
            u32 a[4];
            load_matrices_transposed(a, a_address + key * S::kScoreRowBytes);
#pragma unroll
            for (int pair = 0; pair < Pairs; pair++) {
                u32 b[4];
                load_matrices_transposed(b, pair_after<S>(b_address, kColumnWarps * (j + pair)) + key * S::kRowBytes);
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const OperandA queries = {a[2 * k], a[2 * k + 1]};
                        mma(c[pair][i], queries, b[2 * i + k]);
                    }
            }
        }
    }

    // Adds the warp's pairs j to j + Pairs - 1 to the accumulator by atomics. `accum`: at output_offset() of the step's first row.
    // A tile of it, 16 queries by 8 columns, is [element v][lane]: 4 x 32 floats. So a warp's atomics cover whole 128-byte lines.
    template <int Pairs>
    static __device__ __forceinline__ void add(const Accumulator (&c)[Pairs][2], float* accum, int j) {
#pragma unroll
        for (int pair = 0; pair < Pairs; pair++) {
            float* to = accum + 2 * kColumnWarps * (j + pair) * DqAccumulator::kTileFloats;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    add_global(to + i * DqAccumulator::kTileFloats + v * DqAccumulator::kElementFloats, c[pair][i][v]);
        }
    }

    // Stores pair j as dq of the step's rows, from `row` on; the sequence has `rows` rows.
    static __device__ __forceinline__ void store(const Accumulator (&c)[1][2], const BwdParams& p, int head, int row, int rows,
                                                 u32 warp, int j) {
        static_assert(kKeyParts == 1, "a warp has the sums over all keys");
        const int batch = remat_block_batch();
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);  // again: it holds no registers in the loop
        const auto row_of_lane = [](const Lane& lane, int, int h) {
            return (kOneCallPerLane ? KeysLayout<2>::query_of_row(lane.group) : lane.group) + 8 * h;
        };
        write_gradient(c, p, p.dq, rows_of(p.dq, batch, head, sequence.q_offset()), p.problem.scale, row + query_tile(warp) * 16,
                       rows, p.problem.headdim, row_of_lane, pair(warp) + kColumnWarps * j);
    }
};

}  // namespace turing
