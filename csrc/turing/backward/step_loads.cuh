// Loads of each step in the turing backward kernels. StepTileLoader loads the step's tiles: Q and dO in main kernels (blocks own
// keys and visit queries), K and V in dq kernels (blocks own queries and visit keys). StepStats loads, in main kernels alone, the
// queries' statistics -lse/scale and -delta: lse is softmax_lse, scale |softmax_scale|, delta rowsum(dO * O). Kernels call load()
// one or two steps ahead, and store() once a block barrier has freed the slot; the next barrier shows the tiles to all warps.
//
//   S (Shape)         sizes: kStep rows of a step; kStepTile bytes of a tile; a row is kRowBytes, kChunks chunks (16 bytes, 8 fp16)
//   RowStats          layout of the statistics in global memory (backward/scratch.cuh): groups of 16 queries (kGroupRows), first
//                     their -lse/scale (at kNegLseAt), then their -delta (at kNegDeltaAt), so kRowFloats = 2 a query
//   HeadRows          where the rows of a query head lie in scratch memory (shape.cuh): scratch_offset(row, n): floats before those
//                     of `row`, if a row has n
//   KeysLayout        which scores a lane has (fragments.cuh); its argument, tiles of 16 keys, does not change the queries
//   head_base(), rows_after()  address of row 0 of a batch entry and head; the address some rows further (tile.cuh)
//   remat_*()         computes a value again at each use, so it holds no register (ptx.cuh)
#pragma once

#include "backward/probabilities.cuh"
#include "turing/backward/fragments.cuh"
#include "turing/backward/shape.cuh"

namespace turing {

// The lane's part of a step's statistics: -lse/scale of a query in lanes 0 to 15, -delta of the same query in lanes 16 to 31.
template <class S>
struct StepStats {
    static constexpr int kGroups = S::kStep / RowStats::kGroupRows;
    static_assert(RowStats::kGroupRows == 16 && RowStats::kGroupFloats == 32, "a warp loads a group");
    float x[kGroups];  // the lane's number of each group

    // `row`: the step's first, a multiple of kGroupRows (16).
    __device__ __forceinline__ void load(const BwdParams& p, const HeadRows& rows, int row) {
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
            const float* from =
                p.row_stats + rows.scratch_offset(row, RowStats::kRowFloats) + i * RowStats::kGroupFloats + remat_thread() % 32;
            x[i] = load_float(from);
        }
    }
    // Converts x for P, which kernels keep times kProbabilityUnit (2^kProbabilityBits = 4096): -lse / scale becomes -lse in log2
    // units plus `shift`, log2 of P's factor (warp_specialized.cuh passes another one), and -delta is divided by kProbabilityUnit,
    // as callers do with dP. So P * (dP - delta) is dS itself.
    __device__ __forceinline__ void scale(float scale_log2, float shift = kProbabilityBits) {
        const bool is_lse = remat_thread() % 32 < RowStats::kNegDeltaAt;
#pragma unroll
        for (int i = 0; i < kGroups; i++) x[i] = is_lse ? fmaf(x[i], scale_log2, shift) : x[i] * (1.f / kProbabilityUnit);
    }
    // Values of the lane's two queries in column tile n (8 queries) of S^T.
    __device__ __forceinline__ float2 neg_lse_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kNegLseAt); }
    __device__ __forceinline__ float2 neg_delta_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kNegDeltaAt); }

private:
    // kGroups is 1 or 2: two column tiles each. `at`: first lane with the statistic. `from`: lane with the first query's.
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
    // lanes that share a row: kChunks rounded up to a power of two; those without a chunk do not store
    static constexpr int kLanes = S::kChunks <= 4 ? 4 : S::kChunks <= 8 ? 8 : S::kChunks <= 16 ? 16 : 32;
    static constexpr int kRowsAtOnce = S::kThreads / kLanes;
    static constexpr int kLoads = S::kStep / kRowsAtOnce;  // chunks of a thread in a tile
    static_assert(kRowsAtOnce % 8 == 0 && kLoads > 0, "the rows of a thread share their swizzle");

    static __device__ __forceinline__ bool has_chunk() { return S::kChunks == kLanes || remat_thread() % kLanes < S::kChunks; }

public:
    // A thread's part of one of the two tiles. Kernels that lack registers for both call load() and store() for each in turn.
    using Part = uint4[kLoads];

    // Loads rows from `row` of the tensor's head on. rows_left of them exist (may be negative or more than a step), and headdim
    // columns. Loads have predicates: a branch would separate the products around it. `batch`: blockIdx.z, or remat_block_batch()
    // to keep no addresses.
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

    // Loads and stores both tiles: Q or K, an operand of S, then dO or V, one of dP. `to`: shared address of the first.
    __device__ __forceinline__ void load(const BwdParams& p, const Operand& q_or_k, const Operand& dout_or_v, int head, int row,
                                         int rows_left, int batch = blockIdx.z) {
        load(q_or_k_, q_or_k, head, row, rows_left, p.problem.headdim, batch);
        load(dout_or_v_, dout_or_v, head, row, rows_left, p.problem.headdim_v, batch);
    }
    __device__ __forceinline__ void store(u32 to) const {
        store(q_or_k_, to);
        store(dout_or_v_, to + S::kStepTile);
    }

private:
    Part q_or_k_, dout_or_v_;
};

}  // namespace turing
