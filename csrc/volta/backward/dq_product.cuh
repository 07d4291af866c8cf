// dQ += dS K in the main kernels of volta (single_role.cuh, warp_specialized.cuh), whose blocks own keys and visit queries in
// steps. In each step, once dS^T of all warps is in shared memory (block barrier), all warps call multiply(). Then add_to() adds
// the result to the fp32 accumulator in global memory by atomics, unscaled. In the fused kernel, whose block has all keys, store()
// stores it as dq instead.
//
// A lane is number t = quad + 4 * half (0 to 7) of its quad-pair, the eight lanes of an 8x8x4 product: quad is lane % 4, half is
// lane / 16. The quad-pair's number in the warp is qm + 2 * qn: bits 2 and 3 of the lane (Lane, volta/mma.cuh). A chunk is eight
// fp16 elements (16 bytes) of a row.
//
//   kScoreChunks, kScoreRowBytes  chunks and bytes of a row of dS^T, whose first S::kStep elements count
//   kTileFloats, kLineFloats  floats of a tile of the accumulator, and of one of its eight lines, one for each v (DqAccumulator)
//   chunk_after(x, n) the address n chunks after x in a swizzled row (tile.cuh)
//   u, v              number of the warp's unit of columns; a lane's element (0 to 7) of its 8x8 product
//   remat_*()         reads a special register again at its use, to hold no register in between (ptx.cuh)
#pragma once

#include "backward/gradient_output.cuh"  // gradients_are_fp32(): whether dq is fp32, else fp16; store_gradient2(): two neighbors
#include "volta/backward/dq_accumulator.cuh"
#include "volta/backward/fragments.cuh"

namespace volta {

// dQ of a step is S::kStep queries x headdim. S, a Shape (shape.cuh), also has kRows, the block's keys, and kChunks and kRowBytes
// of a row of K. Each warp computes all queries of every kWarps-th unit of columns, over all keys of the block. A unit is eight
// columns, or 16 in steps of 16 queries (kShortSteps).
//
// Other products give quad-pair (qm, qn) eight rows and eight columns of a 16x16 tile. Here qn selects one half of every eight
// keys, and qm half of the step's queries or, in steps of 16, half of the unit's columns. So a quad-pair has 16 queries, two tiles
// of eight, and a lane's columns of K serve both. Tile n has queries 4n to 4n + 3 of each of the two chunks; lanes of half h load
// chunk h. In the end two lanes add their halves of the keys by a shuffle, one tile each. A lane keeps tile number qn: c[0]; the
// other tile is c[1].
//
// Compact: half of the code, for kernels that exceed the instruction cache, as those with score features (kHasScoreFeatures) do.
template <class S, bool Compact = kHasScoreFeatures>
struct DqProduct {
    static constexpr bool kShortSteps = S::kStep == 16;
    static_assert(kShortSteps == DqAccumulator::has_short_steps(S::kHeaddim), "both have the same units");
    static_assert(kShortSteps || S::kStep == 32, "16 or 32 queries");
    static constexpr int kUnitChunks = kShortSteps ? 2 : 1, kAllUnits = S::kChunks / kUnitChunks;
    static constexpr int kUnits = (kAllUnits + S::kWarps - 1) / S::kWarps;  // of a warp, or one less
    // Keys of an iteration. 16 hide more latency, 8 leave more of the instruction cache. Chosen by simulation.
    static constexpr int kKeysAtOnce = !Compact && (S::kHeaddim <= 64 || S::kHeaddim == 128) ? 16 : 8;

    // Shared address of the lane's column-major A operand in dS^T, whose rows are keys, at `tile`: one key, four queries of the
    // tile of eight that the lane keeps. Those of the other are 8 bytes before or after: the other half of the chunk.
    static __device__ __forceinline__ u32 a_operand(u32 tile, const Lane& lane) {
        const int chunk = kShortSteps ? lane.half : 2 * lane.qm + lane.half;
        return tile + swizzled<kScoreChunks>(lane.quad + 4 * lane.qn, chunk) + 8 * lane.qn;
    }
    // Shared address of the lane's row-major B operand in K, which is at `tile`: one key, four columns.
    static __device__ __forceinline__ u32 b_operand(u32 tile, const Lane& lane, int warp) {
        const int chunk = kUnitChunks * warp + (kShortSteps ? lane.qm : 0);
        return tile + swizzled<S::kChunks>(lane.quad + 4 * lane.qn, chunk) + 8 * lane.half;
    }
    // Offset, in floats, of the lane's sums from the first of the step's rows in the accumulator.
    static __device__ __forceinline__ int output_offset(const Lane& lane, int warp) {
        return warp * DqAccumulator::kTileFloats + DqAccumulator::line_offset(lane.half, lane.qn, lane.qm, lane.quad);
    }
    // Where units do not divide evenly among warps, the last warps have one less.
    static __device__ __forceinline__ bool has_unit(int u) {
        return kAllUnits % S::kWarps == 0 || u < kUnits - 1 || remat_thread_index() < kAllUnits % S::kWarps * 32;
    }

    Accumulator c[2][kUnits] = {};  // over the lane's half of the keys: of the tile that it keeps, and of the other lane's

    // Adds the products of dS^T and K over the block's keys. Addresses: those of a_operand() and b_operand().
    __device__ __forceinline__ void multiply(u32 a_address, u32 b_address) {
#pragma unroll 1
        for (int key = 0; key < S::kRows; key += kKeysAtOnce) {
#pragma unroll
            for (int k = 0; k < kKeysAtOnce; k += 8) {
                const u32 a = a_address + (key + k) * kScoreRowBytes, b = b_address + (key + k) * S::kRowBytes;
                const uint2 mine = load_shared2(a), others = load_shared2(a ^ 8);
#pragma unroll
                for (int u = 0; u < kUnits; u++) {
                    if (!has_unit(u)) continue;
                    const uint2 columns = load_shared2(chunk_after<S::kChunks>(b, kUnitChunks * S::kWarps * u));
                    mma_col_row(c[0][u], mine.x, mine.y, columns.x, columns.y);
                    mma_col_row(c[1][u], others.x, others.y, columns.x, columns.y);
                }
            }
        }
    }

    // Adds the sums to the accumulator by atomics. `accum`: the lane's first element of the step's rows, output_offset() included.
    __device__ __forceinline__ void add_to(float* accum) {
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            if (!has_unit(u)) continue;
#pragma unroll
            for (int v = 0; v < 8; v++)
                add_global(accum + S::kWarps * u * DqAccumulator::kTileFloats + v * DqAccumulator::kLineFloats, sum(u, v));
        }
    }

    // Stores the sums, times |softmax_scale| (K in shared memory has its sign), as dq of the step's queries, from row `row` of the
    // sequence on, which has `rows` rows. In a unit of eight columns two lanes (lane ^ 2) have four columns each of the same two
    // rows, two apart. As fp16 they exchange halves, so that each stores one whole row, 16 bytes.
    __device__ __forceinline__ void store(const BwdParams& p, int head, int row, int rows) {
        static_assert(!kShortSteps, "a unit is eight columns");
        const int thread = remat_thread_index(), batch = remat_block_batch();
        const Lane lane(thread % 32);
        const bool is_second = lane.quad / 2;
        row += lane.quad + 4 * lane.qn + 8 * lane.half + 16 * lane.qm;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        unsigned short* to = rows_of(p.dq, batch, head, sequence.q_offset() + row);
        if (gradients_are_fp32(p)) {
            float* fp32 = fp32_element(p.dq, to);
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                if (!has_unit(u)) continue;
                const int column = (thread / 32 + S::kWarps * u) * kChunk;
#pragma unroll
                for (int v = 0; v < 8; v += 2) {
                    const int rows_further = (v & 2) - 2 * is_second;  // from the row that the lane stores as fp16
                    const float x = sum(u, v) * p.problem.scale, y = sum(u, v + 1) * p.problem.scale;
                    if (row + rows_further < rows && column < p.problem.headdim)
                        store_gradient2(fp32 + rows_further * p.dq.row_stride + column + v / 4 * 4 + 2 * is_second, x, y);
                }
            }
            return;
        }
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
            if (!has_unit(u)) continue;
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                unsigned row_words[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float x = sum(u, 4 * i + 2 * r) * p.problem.scale, y = sum(u, 4 * i + 2 * r + 1) * p.problem.scale;
                    row_words[r] = to_half2(x, y);
                }
                const unsigned mine = is_second ? row_words[1] : row_words[0];
                const unsigned others = __shfl_xor_sync(~0u, is_second ? row_words[0] : row_words[1], 2);
                words[2 * i] = is_second ? others : mine, words[2 * i + 1] = is_second ? mine : others;
            }
            const int column = (thread / 32 + S::kWarps * u) * kChunk;
            if (row < rows && column < p.problem.headdim)
                *reinterpret_cast<uint4*>(to + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

private:
    // Adds the two halves of the keys: lane ^ 8 has the other qn.
    __device__ __forceinline__ float sum(int u, int v) { return c[0][u][v] + __shfl_xor_sync(~0u, c[1][u][v], 8); }
};

}  // namespace volta
