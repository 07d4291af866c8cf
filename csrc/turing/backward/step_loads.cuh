// Loads of each step in the turing backward kernels: statistics of the queries that a main kernel visits (StepStats), and the tiles
// of Q and dO, or in dq kernels of K and V (StepTileLoader). A Shape S (shape.cuh) gives sizes: kStep rows of a step, kChunks
// chunks of a row, kRowBytes bytes, kStepTile bytes of a tile, kThreads threads of a block. A chunk is 8 columns of a row, 16
// bytes. remat_* functions compute a value again at each use, so it holds no register. RowStats is the layout of the statistics:
// groups of 16 queries, first their -lse/scale (kNegLseAt), then their -delta (kNegDeltaAt), kRowFloats a query
// (backward/scratch.cuh). HeadRows says where the rows of a query head lie in scratch memory (shape.cuh).
#pragma once

#include "backward/probabilities.cuh"
#include "turing/backward/fragments.cuh"
#include "turing/backward/shape.cuh"

namespace turing {

// The lane's part of a step's statistics: -lse/scale of a query in lanes 0 to 15, -delta (delta = rowsum(dO * O)) in the others.
template <class S>
struct StepStats {
    static constexpr int kGroups = S::kStep / RowStats::kGroupRows;
    static_assert(RowStats::kGroupRows == 16 && RowStats::kGroupFloats == 32, "a warp loads a group");
    float x[kGroups];

    // `row`: the step's first, a multiple of kGroupRows (16).
    __device__ __forceinline__ void load(const BwdParams& p, const HeadRows& rows, int row) {
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
            const float* from =
                p.row_stats + rows.scratch_offset(row, RowStats::kRowFloats) + i * RowStats::kGroupFloats + remat_thread() % 32;
            x[i] = load_float(from);
        }
    }
    // Converts them for P, which kernels keep times kProbabilityUnit (2^kProbabilityBits = 4096): -lse / scale becomes -lse in log2
    // units plus `shift` (kExponentShift for pack_shifted), and -delta is divided by kProbabilityUnit, as callers do with dP. So
    // P * (dP - delta) is dS itself.
    __device__ __forceinline__ void scale(float scale_log2, float shift = kProbabilityBits) {
        const bool is_lse = remat_thread() % 32 < RowStats::kNegDeltaAt;
#pragma unroll
        for (int i = 0; i < kGroups; i++) x[i] = is_lse ? fmaf(x[i], scale_log2, shift) : x[i] * (1.f / kProbabilityUnit);
    }
    // Values of the lane's two queries in column tile n (8 queries) of S^T, as KeysLayout<2> has them. Its argument, the number of
    // tiles of 16 keys, does not change the lane's queries.
    __device__ __forceinline__ float2 neg_lse_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kNegLseAt); }
    __device__ __forceinline__ float2 neg_delta_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kNegDeltaAt); }

private:
    // kGroups is 1 or 2, of 16 queries: two column tiles each.
    __device__ __forceinline__ float2 of(int n, const Lane& lane, int at) const {
        const float mine = kGroups == 1 || n < 2 ? x[0] : x[kGroups - 1];
        const int from = at + 8 * (n % 2) + KeysLayout<2>::first_query(lane);
        return make_float2(__shfl_sync(~0u, mine, from), __shfl_sync(~0u, mine, from + KeysLayout<2>::row_slot(1)));
    }
};

// Loads a step's rows of Q and dO, or of K and V, to registers, and stores them to shared memory. A thread takes one chunk of every
// kRowsAtOnce-th row of both. Rows that do not exist are zeros. Columns past headdim meet zeros of the block's own operands in S
// and dP, and produce only gradient columns that are not stored. So a thread there reads the last existing chunk again.
template <class S>
class StepTileLoader {
    // lanes that share a row
    static constexpr int kLanes = S::kChunks <= 4 ? 4 : S::kChunks <= 8 ? 8 : S::kChunks <= 16 ? 16 : 32;
    static constexpr int kRowsAtOnce = S::kThreads / kLanes;
    static constexpr int kLoads = S::kStep / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && kLoads > 0, "the rows of a thread share their swizzle");

    static __device__ __forceinline__ bool has_chunk() { return S::kChunks == kLanes || remat_thread() % kLanes < S::kChunks; }

public:
    // A thread's part of one of the two tiles.
    using Part = uint4[kLoads];

    // Loads rows from `row` of the tensor on. rows_left of them exist (may be negative or more than a step). Without a branch,
    // which would separate the products before and after it. `batch`: blockIdx.z, or remat_block_batch() to keep no addresses.
    static __device__ __forceinline__ void load(Part& x, const Operand& from, int head, int row, int rows_left, int headdim,
                                                int batch = blockIdx.z) {
        const u32 thread = remat_thread(), column = thread % kLanes * kChunk;
        const unsigned short* base = rows_after(head_base(from, batch, head), row + thread / kLanes, from.row_stride) +
                                     (min(static_cast<int>(column) + kChunk, headdim) - kChunk);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            x[i] = zero_chunk();
            load_global_if(static_cast<int>(thread / kLanes) + i * kRowsAtOnce < rows_left, x[i],
                           rows_after(base, i * kRowsAtOnce, from.row_stride));
        }
    }
    static __device__ __forceinline__ void store(const Part& x, u32 tile) {
        const u32 thread = remat_thread();
        // With dropout alone, one Philox call draws for two queries 4 apart (kOneCallPerLane, fragments.cuh). So queries 0, 4, 1,
        // 5, 2, 6, 3 and 7 take adjacent rows.
        const u32 row =
            kOneCallPerLane ? thread / kLanes / 8 * 8 + KeysLayout<2>::row_of_query(thread / kLanes % 8) : thread / kLanes;
        tile += remat_swizzled<S::kChunks>(row, thread % kLanes);
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (has_chunk()) store_shared(tile + i * kRowsAtOnce * S::kRowBytes, x[i]);
    }

    // Both tiles: s makes S, dp makes dP. `to`: address of the first tile.
    __device__ __forceinline__ void load(const BwdParams& p, const Operand& s, const Operand& dp, int head, int row, int rows_left,
                                         int batch = blockIdx.z) {
        load(s_, s, head, row, rows_left, p.problem.headdim, batch);
        load(dp_, dp, head, row, rows_left, p.problem.headdim_v, batch);
    }
    __device__ __forceinline__ void store(u32 to) const {
        store(s_, to);
        store(dp_, to + S::kStepTile);
    }

private:
    Part s_, dp_;
};

}  // namespace turing
