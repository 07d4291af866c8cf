// Tile sizes, shared-memory layout, step loads and products of the turing backward kernels (main kernels and dq kernels).
//
// A block of a main kernel owns keys and visits the queries that see them, a step at a time (FlashAttention-2's backward,
// transposed):
//
//   S^T  = K Q^T          P = exp(scale * S - lse)      dV += P^T dO
//   dP^T = V dO^T         dS = P * (dP - delta)         dK += dS^T Q        dQ += dS K  (by atomics)
//
// Registers hold dK, dV, the operands P^T and dS^T, and operands of V, or of both K and V. Shared memory holds K (for dQ, and
// for warps that have no registers for its operands), tiles of Q and dO, and dS^T (for dQ).
#pragma once

#include "backward/probabilities.cuh"
#include "backward/scratch.cuh"
#include "backward/iteration_range.cuh"
#include "backward/dq_mode.cuh"
#include "backward/row_statistics.cuh"
#include "turing/backward/dq_product.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Slots: tiles of Q and dO, and of dS; with two, a step needs one barrier. PartnerTiles: tiles of P^T, which go from warp to
// warp.
template <int Headdim, int Rows, int Step, int Threads, int Slots, int PartnerTiles>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads, kSlots = Slots;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of a row of Q, K, V, dO
    static constexpr int kScoreChunks = kStep / kChunk, kScoreRowBytes = kScoreChunks * kChunkBytes;

    // Offsets in shared memory, bytes.
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes, kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kSlotBytes = 2 * kStepTile;  // Q, then dO
    static constexpr int kOwn = 0, kStepTiles = kOwnTile, kScores = kStepTiles + kSlots * kSlotBytes;
    static constexpr int kPartner = kScores + kSlots * kScoreTile;
    static constexpr int kSharedBytes = kPartner + PartnerTiles * kScoreTile;

    // The slot of the step that has this row.
    static __device__ __forceinline__ u32 slot(int row) { return kSlots == 2 ? row / kStep % 2 : 0; }
};

// Loads the block's K once, in the layout's order, padded with zeros in rows and columns.
template <class S, class Layout>
__device__ __forceinline__ void load_own_keys(const BwdParams& p, u32 shared, int origin, int first_key, int keys) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    using Loader = TileLoader<S::kChunks, kRowsAtOnce, S::kThreads>;
    Loader k(threadIdx.x, head_base(p.k, blockIdx.z, blockIdx.y) + (origin + first_key) * p.k.row_stride, p.k.row_stride,
             p.problem.headdim);
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kRowsAtOnce) {
        k.load(keys - first_key - r);
        k.flip_signs(p.problem.sign_flip);
        k.store(shared + S::kOwn + swizzled<S::kChunks>(Layout::row_of_key(r + k.row), k.chunk), 0);
    }
}

// QueryRange, but every step of a block needs the mask if some of its keys do not exist: their P must be 0.
template <class S>
struct Queries : QueryRange<S::kRows, S::kStep> {
    __device__ __forceinline__ Queries(const Mask& mask, int first_key, bool all_rows = false)
        : QueryRange<S::kRows, S::kStep>(mask, first_key, all_rows) {
        if (first_key + S::kRows > mask.seqlen_k) this->unmasked.first = 0x7fffffff, this->unmasked.span = 0;
    }
};

// Offsets of the rows of one head. Each step computes its addresses again from these few numbers (and shared addresses from the
// thread index), because pointers would take more registers than there are. keep_in_register() and remat_*() are volatile:
// otherwise the compiler would move what does not change out of the loop, and then spill it.
struct HeadRows {
    int head, origin_;
    unsigned scratch;  // the sequence's first row in the scratch memory, over all heads

    __device__ __forceinline__ HeadRows(const BwdParams& p, const BlockSeqlenInfo& sequence, int head_)
        : head(head_), origin_(kVarlen && !kGeneric ? keep_in_register(sequence.q_offset()) : 0),
          scratch(keep_in_register(static_cast<int>(rounded_row<RowStats>(p, sequence, remat_block_batch(), head_)))) {}
    // First row in the tensors.
    __device__ __forceinline__ int origin(const BwdParams& p) const {
        return kGeneric ? BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch()).q_offset() : origin_;
    }
    // Offset in the scratch memory, for `floats` floats per row.
    __device__ __forceinline__ unsigned long long scratch_offset(int row, unsigned floats) const {
        return static_cast<unsigned long long>(scratch + row) * floats;
    }
};

// Writes the statistics of all rows that the block visits (fused kernels). At the start, because between heads there are no
// registers.
template <class S>
__device__ __forceinline__ void write_all_statistics(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    const int group = p.problem.nheads / p.problem.nheads_k;
#pragma unroll 1
    for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++)
        write_row_statistics<RowStats, S::kHeaddim, S::kThreads>(p, sequence, head);
}

// The lane's part of a step's statistics: -lse/scale of a query in lanes 0 to 15, -delta in the others.
template <class S>
struct StepStats {
    static constexpr int kGroups = S::kStep / RowStats::kGroupRows;
    float x[kGroups];

    __device__ __forceinline__ void load(const BwdParams& p, const HeadRows& rows, int row) {
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
            const float* from =
                p.row_stats + rows.scratch_offset(row, RowStats::kRowFloats) + i * RowStats::kGroupFloats + remat_thread() % 32;
            asm volatile("ld.global.f32 %0, [%1];" : "=f"(x[i]) : "l"(from));
        }
    }
    // Converts them to the unit of P (kProbabilityUnit): the lse that the exponent takes, and delta for the product with such a
    // P.
    __device__ __forceinline__ void scale(float scale_log2) {
        const bool is_lse = remat_thread() % 32 < RowStats::kDeltaAt;
#pragma unroll
        for (int i = 0; i < kGroups; i++)
            x[i] = is_lse ? fmaf(x[i], scale_log2, kProbabilityBits) : x[i] * (1.f / kProbabilityUnit);
    }
    // Values of the lane's two queries in column tile n.
    __device__ __forceinline__ float2 lse_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kLseAt); }
    __device__ __forceinline__ float2 delta_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kDeltaAt); }

private:
    __device__ __forceinline__ float2 of(int n, const Lane& lane, int at) const {
        const float mine = kGroups == 1 || n < 2 ? x[0] : x[kGroups - 1];
        const int from = at + 8 * (n % 2) + KeysLayout<2>::first_query(lane);
        return make_float2(__shfl_sync(~0u, mine, from), __shfl_sync(~0u, mine, from + KeysLayout<2>::row_slot(1)));
    }
};

// Loads a step's rows of Q and dO, or of K and V, to registers, and stores them to shared memory. A thread takes one chunk of
// every kRowsAtOnce-th row of both.
//
// Rows that do not exist are zeros. Columns past headdim meet zeros of the block's own operands in S and dP, and produce only
// gradient columns that are not stored. So a thread there reads the last existing column again.
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

    // Loads rows from `row` of the tensor on, of which rows_left exist (may be negative or more than a step). Without a branch,
    // which would separate the products before and after it.
    static __device__ __forceinline__ void load(Part& x, const Operand& from, int head, int row, int rows_left, int headdim) {
        const u32 thread = remat_thread(), column = thread % kLanes * kChunk;
        const unsigned short* base = rows_after(head_base(from, blockIdx.z, head), row + thread / kLanes, from.row_stride) +
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
        const u32 row =
            kOneCallPerLane ? thread / kLanes / 8 * 8 + KeysLayout<2>::row_of_query(thread / kLanes % 8) : thread / kLanes;
        tile += remat_swizzled<S::kChunks>(row, thread % kLanes);
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (has_chunk()) store_shared(tile + i * kRowsAtOnce * S::kRowBytes, x[i]);
    }

    // Both tiles: s makes S, dp makes dP. `to`: address of the first tile.
    __device__ __forceinline__ void load(const BwdParams& p, const Operand& s, const Operand& dp, int head, int row,
                                         int rows_left) {
        load(s_, s, head, row, rows_left, p.problem.headdim);
        load(dp_, dp, head, row, rows_left, p.problem.headdim_v);
    }
    __device__ __forceinline__ void store(u32 to) const {
        store(s_, to);
        store(dp_, to + S::kStepTile);
    }

private:
    Part s_, dp_;
};

// Packs P * kProbabilityUnit by conversions, unlike pack_probabilities: the tensor cores leave the XU pipe time for them here,
// and dS needs the number itself.
__device__ __forceinline__ u32 pack_units(float x, float y) { return to_half2(x, y); }
// Returns dS, from P in that unit, dP, and -delta from StepStats::scale. fp32 until the result is packed, because dP - delta
// may be far beyond fp16 where P is small. Beyond 65504 packed dS becomes infinity, which a GradScaler detects.
__device__ __forceinline__ float score_gradient(float p, float dp, float neg_delta) {
    return p * fmaf(dp, 1.f / kProbabilityUnit, neg_delta);
}

// Masks scores of the dq kernels: c[n][m]. (apply_mask has the main kernels' order.)
template <int M, int N>
__device__ __forceinline__ void mask_scores(Accumulator (&s)[N][M], const BwdParams& p, int query, int key) {
    const Mask mask = mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z));
    const Lane lane = remat_lane();
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int m = 0; m < M; m++) mask_tile(s[n][m], mask, ScoreCoord<QueriesLayout>(lane, query + 16 * m, key + 8 * n));
}

// ---- products -------------------------------------------------------------------------------------

// S^T or dP^T: adds one pair of chunks of headdim, for all own rows and all step rows. `address`: of their matrices
// (by_chunks). Tiles of one column of the product are adjacent: c[n][m].
template <class S, int M, int N>
__device__ __forceinline__ void multiply_pair(Accumulator (&c)[N][M], const OperandA (&a)[M][2], u32 address) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices(b, address + n / 2 * 16 * S::kRowBytes);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) mma(c[n + i][m], a[m][k], b[2 * i + k]);
    }
}

// dV or dK: adds to a pair of column tiles, 2 * pair and its neighbor, from packed scores a[n][m] and the step rows. `address`:
// of their matrices (by_rows).
template <class S, int M, int N, int Tiles>
__device__ __forceinline__ void accumulate_pair(Accumulator (&c)[M][Tiles], const OperandA (&a)[N][M], u32 address, int pair) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, address + n / 2 * 16 * S::kRowBytes);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) mma(c[m][2 * pair + i], a[n + k][m], b[2 * i + k]);
    }
}

}  // namespace turing
