// dQ += dS K in the main kernels of turing (single_role.cuh, single_role_halves.cuh, warp_specialized.cuh), whose blocks own keys
// and visit queries in steps. Once dS^T of a step is in shared memory (block barrier), all warps call multiply(). Then add() adds
// the result, unscaled, to dq's fp32 accumulator in global memory by atomics (postprocess scales it). In the fused kernel, whose
// block has all keys, store() instead stores it as dq, times |softmax_scale|: for a negative one, load_own_keys() has flipped the
// signs of K.
//
//   S (Shape)         the kernel's sizes (shape.cuh): kRows keys of the block, kStep queries of a step, kWarps warps; a row of K
//                     has kChunks chunks (16 bytes, 8 fp16) and kRowBytes bytes, a row of dS^T kScoreChunks and kScoreRowBytes
//   ds, keys          shared addresses of dS^T and of K, whose rows are the block's keys
//   pair_after(x, n)  the address 2 * n chunks after x; score_offset(key, c): offset of chunk c, 8 queries, in dS^T (fragments.cuh)
//   Accumulator       a lane's part of C, 16 queries by 8 columns, as fp32; its group is lane / 4, its quad lane % 4
//   remat_*()         reads a special register again, to hold none (ptx.cuh)
#pragma once

#include "turing/backward/dq_accumulator.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// dQ of a step is kStep queries x headdim. Its unit is a pair: 16 queries by two column tiles of 8 columns, so two Accumulators.
// Warps take turns: number j (0 to kPairs - 1) of a warp's pairs has columns from 16 * (first_pair(warp) + kColumnWarps * j) on.
// A warp sums a pair over all keys of the block (kKeyParts = 1). Where pairs do not divide evenly among warps but twice as many do,
// it sums over half of the keys (2): 8 warps that share 16 queries take 12 pairs (headdim 192) as 3 each, two warps a pair.
template <class S>
struct DqProduct {
    static constexpr int kAllPairs = S::kChunks / 2;  // in a row: of the same 16 queries
    static constexpr int kTileWarps = S::kWarps / (S::kStep / 16);  // warps that share 16 queries
    static constexpr int kKeyParts = kAllPairs % kTileWarps != 0 && 2 * kAllPairs % kTileWarps == 0 ? 2 : 1;
    static constexpr int kColumnWarps = kTileWarps / kKeyParts;  // of these, those that sum over the same keys
    static constexpr int kPairs = (kAllPairs + kColumnWarps - 1) / kColumnWarps;  // that a warp takes, rounded up
    static constexpr int kKeys = S::kRows / kKeyParts;  // over which a warp sums, from first_key(warp) of the block on

    static __device__ __forceinline__ u32 query_tile(u32 warp) { return warp / kTileWarps; }
    static __device__ __forceinline__ u32 first_key(u32 warp) { return warp % kTileWarps / kColumnWarps * kKeys; }
    static __device__ __forceinline__ u32 first_pair(u32 warp) { return warp % kColumnWarps; }
    // With fewer pairs than warps, the last warps have none. The first clause is known at compile time.
    static __device__ __forceinline__ bool has_pair(u32 warp) {
        return kAllPairs >= kColumnWarps || first_pair(warp) < u32(kAllPairs);
    }

    // Addresses that a lane gives to ldmatrix for the warp's first 16 keys. The load transposes both operands. dS^T's matrices 0
    // and 1 are queries 0 to 7 and 8 to 15 of eight keys. K's matrices 0 and 1 are all 16 keys of the pair's first chunk
    // (by_rows(), fragments.cuh).
    static __device__ __forceinline__ u32 a_operand(u32 ds, u32 lane, u32 warp) {
        return ds + score_offset<S::kScoreChunks>(first_key(warp) + lane % 8 + lane / 16 * 8, 2 * query_tile(warp) + lane / 8 % 2);
    }
    static __device__ __forceinline__ u32 b_operand(u32 keys, u32 lane, u32 warp) {
        return by_rows<S>(keys, lane, 2 * (has_pair(warp) ? first_pair(warp) : 0)) + first_key(warp) * S::kRowBytes;
    }
    // Offset, in floats, of the lane's first sum from the first of the step's rows in the accumulator.
    static __device__ __forceinline__ u32 output_offset(u32 lane, u32 warp) {
        // With dropout alone (kOneCallPerLane, fragments.cuh), a step's queries lie in shared memory in the order 0, 4, 1, 5, 2, 6,
        // 3, 7. The accumulator keeps their own order: query q of eight is that of lanes 4 * q to 4 * q + 3.
        if (kOneCallPerLane) lane = 4 * KeysLayout<2>::query_of_row(lane / 4) + lane % 4;
        return query_tile(warp) * 16 * S::kHeaddim + 2 * first_pair(warp) * DqAccumulator::kTileFloats + lane;
    }

    // Computes the warp's pairs from number `first` on, c[pair][column tile], over 16 keys at a time (k: eight of them).
    template <int Pairs>
    static __device__ __forceinline__ void multiply(Accumulator (&c)[Pairs][2], u32 a_address, u32 b_address, int first) {
        clear_tiles(c);
#pragma unroll
        for (int key = 0; key < kKeys; key += 16) {
            u32 a[4];
            load_matrices_transposed(a, a_address + key * S::kScoreRowBytes);
#pragma unroll
            for (int j = 0; j < Pairs; j++) {
                u32 b[4];
                load_matrices_transposed(b, pair_after<S>(b_address, kColumnWarps * (first + j)) + key * S::kRowBytes);
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const OperandA queries = {a[2 * k], a[2 * k + 1]};
                        mma(c[j][i], queries, b[2 * i + k]);
                    }
            }
        }
    }

    // Adds the warp's pairs from number `first` on to the accumulator by atomics. `accum`: the lane's first sum (output_offset()).
    // A column tile is kTileFloats floats there, element v of all lanes kLineFloats (dq_accumulator.cuh).
    template <int Pairs>
    static __device__ __forceinline__ void add(const Accumulator (&c)[Pairs][2], float* accum, int first) {
#pragma unroll
        for (int j = 0; j < Pairs; j++) {
            float* to = accum + 2 * kColumnWarps * (first + j) * DqAccumulator::kTileFloats;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    add_global(to + i * DqAccumulator::kTileFloats + v * DqAccumulator::kLineFloats, c[j][i][v]);
        }
    }

    // Stores the warp's pair j as dq. `row`: the step's first; `rows`: of the sequence.
    static __device__ __forceinline__ void store(const Accumulator (&c)[1][2], const BwdParams& p, int head, int row, int rows,
                                                 u32 warp, int j) {
        static_assert(kKeyParts == 1, "a warp has the sums over all keys");
        const int batch = remat_block_batch();
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);  // again: it holds no registers in the loop
        const auto row_of_lane = [](const Lane& lane, int, int h) {  // h: which of a lane's two rows
            return (kOneCallPerLane ? KeysLayout<2>::query_of_row(lane.group) : lane.group) + 8 * h;
        };
        write_gradient(c, p, p.dq, rows_of(p.dq, batch, head, sequence.q_offset()), p.problem.scale, row + query_tile(warp) * 16,
                       rows, p.problem.headdim, row_of_lane, first_pair(warp) + kColumnWarps * j);
    }
};

}  // namespace turing
