// What a block of the main kernels (small.cuh, split.cuh) owns, and where it lies in shared memory. docs/turing-backward.md tells
// the design.
//
// A block owns some keys and walks over the queries that see them, a step at a time:
//
//   S^T  = K Q^T          P = exp(scale * S - lse)      dV += P^T dO
//   dP^T = V dO^T         dS = P * (dP - delta)         dK += dS^T Q        dQ += dS K  (atomically)
//
// dK and dV stay in registers, as operands P^T and dS^T do, and fragments of V, or of both K and V. Shared memory has K, for dQ and
// for a warp that has no registers for its fragments, two tiles of Q and of dO, and dS^T, for dQ alone.
#pragma once

#include "backward/walk.cuh"
#include "turing/backward/dq_product.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// Slots: of tiles of Q and dO, and of dS: with two, a step needs one barrier. PartnerTiles: of P^T, which goes from warp to warp.
template <int Headdim, int Rows, int Step, int Threads, int Slots, int PartnerTiles>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads, kSlots = Slots;
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of a row of Q, K, V, dO
    static constexpr int kScoreChunks = kStep / kChunk, kScoreRowBytes = kScoreChunks * kChunkBytes;

    // Shared memory, bytes.
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes, kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kSlotBytes = 2 * kStepTile;  // Q, then dO
    static constexpr int kOwn = 0, kStepTiles = kOwnTile, kScores = kStepTiles + kSlots * kSlotBytes;
    static constexpr int kPartner = kScores + kSlots * kScoreTile;
    static constexpr int kSharedBytes = kPartner + PartnerTiles * kScoreTile;
};

// The block's K, once, in the order of KeysLayout, padded with zeros in both directions.
template <class S>
__device__ __forceinline__ void load_own_keys(const BwdParams& p, u32 shared, int origin, int first_key, int keys) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    static_assert(kRowsAtOnce % 16 == 0, "the rows of a thread have one place in 16");
    TileLoader<S::kChunks, kRowsAtOnce, S::kThreads> k(
        threadIdx.x, head_base(p.k, blockIdx.z, blockIdx.y) + (origin + first_key) * p.k.row_stride, p.k.row_stride, p.problem.headdim);
    const u32 to = shared + S::kOwn + swizzled<S::kChunks>(KeysLayout::row_of_key(k.row), k.chunk);
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kRowsAtOnce) {
        k.load(keys - first_key - r);
        k.flip_signs(p.problem.sign_flip);
        k.store(to + r * S::kRowBytes, S::kRowBytes);
    }
}

// As the common range, but with the mask at every step of a block some of whose keys do not exist: their P has to be 0.
template <class S>
struct Queries : QueryRange<S::kRows, S::kStep> {
    __device__ __forceinline__ Queries(const Mask& mask, int first_key) : QueryRange<S::kRows, S::kStep>(mask, first_key) {
        if (first_key + S::kRows > mask.seqlen_k) this->unmasked.first = 0x7fffffff, this->unmasked.span = 0;
    }
};

// The lane's part of the statistics of a step: in lanes 0 to 15 something of -lse/scale of a query each, in the others -delta.
template <class S>
struct StepStats {
    static constexpr int kGroups = S::kStep / RowStats::kGroupRows;
    float x[kGroups];

    // `from` is where the step's lie, plus the lane.
    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
            const float* group = from + i * RowStats::kGroupFloats;
            asm volatile("ld.global.f32 %0, [%1];" : "=f"(x[i]) : "l"(group));
        }
    }
    // Of the lane's two queries of column tile n: lse in units of log2 and the exponent's shift, see minus_lse().
    __device__ __forceinline__ float2 lse_of(int n, const Lane& lane) const { return of(n, lane, 0); }
    __device__ __forceinline__ float2 delta_of(int n, const Lane& lane) const { return of(n, lane, RowStats::kDeltaAt); }

private:
    __device__ __forceinline__ float2 of(int n, const Lane& lane, int at) const {
        const float mine = x[n / 2];
        const int from = at + 8 * (n % 2) + 2 * lane.quad;
        return make_float2(__shfl_sync(~0u, mine, from), __shfl_sync(~0u, mine, from + 1));
    }
};

// ---- products -------------------------------------------------------------------------------------

// S^T or dP^T: one pair of chunks of headdim of all own rows and all rows of the step, whose matrices by_chunks are at `address`.
template <class S, int M, int N>
__device__ __forceinline__ void multiply_pair(Accumulator (&c)[M][N], const OperandA (&a)[M][2], u32 address) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices(b, address + n / 2 * 16 * S::kRowBytes);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) mma(c[m][n + i], a[m][k], b[2 * i + k]);
    }
}

// dV or dK: one pair of column tiles, 2 * pair and its neighbour, from the packed scores a and the rows of the step, whose matrices
// by_rows are at `address`.
template <class S, int M, int N, int Tiles>
__device__ __forceinline__ void accumulate_pair(Accumulator (&c)[M][Tiles], const OperandA (&a)[M][N], u32 address, int pair) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, address + n / 2 * 16 * S::kRowBytes);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int m = 0; m < M; m++) mma(c[m][2 * pair + i], a[m][n + k], b[2 * i + k]);
    }
}

}  // namespace turing
