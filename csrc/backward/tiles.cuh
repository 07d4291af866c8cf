// fp16 rows between global and shared memory: a block's own rows, the tiles of each step, and gradients on their way out.
//
// The same for every family. A kernel's shape S says how much and where to: kRows rows that the block owns, steps of kStep,
// rows of kChunks chunks (kRowBytes), swizzled (tile.cuh), kThreads threads, and the shared addresses of the block's own tiles
// kOwnS and kOwnDp and of kStepTile bytes for each of two step tiles, one behind the other.
#pragma once

#include "tile.cuh"
#include "volta_fa_params.h"

// The block's own rows of both operands, once, padded with zeros in both directions. Of `rows` rows those
// from first_row are the block's; the sequence begins at row `origin` of the tensors.
template <class S>
__device__ __forceinline__ void load_own(const BwdParams& p, const Operand& s, const Operand& dp, int head, unsigned shared,
                                         int origin, int first_row, int rows) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    using Loader = TileLoader<S::kChunks, kRowsAtOnce, S::kThreads>;
    Loader x(threadIdx.x, head_base(s, blockIdx.z, head) + (origin + first_row) * s.row_stride, s.row_stride, p.problem.headdim);
    Loader y(threadIdx.x, head_base(dp, blockIdx.z, head) + (origin + first_row) * dp.row_stride, dp.row_stride,
             p.problem.headdim_v);
    const unsigned to = shared + swizzled<S::kChunks>(x.row, x.chunk);
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kRowsAtOnce) {
        const int rows_left = rows - first_row - r;
        x.load(rows_left);
        y.load(rows_left);
        x.flip_signs(p.problem.sign_flip);
        x.store(to + S::kOwnS + r * S::kRowBytes, S::kRowBytes);
        y.store(to + S::kOwnDp + r * S::kRowBytes, S::kRowBytes);
    }
}

// Zeros for `Bytes` bytes of shared memory, by all threads of the block.
template <int Bytes, int Threads>
__device__ __forceinline__ void clear_shared(unsigned address) {
#pragma unroll 1
    for (int i = threadIdx.x * kChunkBytes; i < Bytes; i += Threads * kChunkBytes) store_shared(address + i, zero_chunk());
}

// The walk over the tiles of one head: Q and dO, or K and V, from global memory, early into registers. A
// thread takes one chunk of every kRowsAtOnce-th row of both.
//
// Other than TileLoader it pads only rows with zeros. Columns beyond headdim meet the zeros of the block's
// own rows in S and dP, and in the gradients are columns that nobody stores, so there a thread reads the last
// column that exists once more; and no thread keeps two chunks of one row, whose existence it would have to
// remember.
template <class S>
class StepTiles {
    static constexpr int kLanes = S::kChunks <= 4 ? 4 : S::kChunks <= 8 ? 8 : S::kChunks <= 16 ? 16 : 32;  // that share a row
    static constexpr int kRowsAtOnce = S::kThreads / kLanes;
    static constexpr int kLoads = S::kStep / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && kLoads > 0, "the rows of a thread share their swizzle");

    const unsigned short *s_, *dp_;  // this thread's first chunk of the next tile
    uint4 tile_s_[kLoads], tile_dp_[kLoads];

    static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kLanes; }

public:
    // Shared address, relative to the tile, where this thread's first chunk goes.
    static __device__ __forceinline__ unsigned offset() { return swizzled<S::kChunks>(row(), chunk()); }

    __device__ __forceinline__ StepTiles(const BwdParams& p, const Operand& s, const Operand& dp, int head, int first_row) {
        const long long thread_row = first_row + row();
        const int column = chunk() * kChunk;
        s_ = head_base(s, blockIdx.z, head) + thread_row * s.row_stride + min(column, p.problem.headdim - kChunk);
        dp_ = head_base(dp, blockIdx.z, head) + thread_row * dp.row_stride + min(column, p.problem.headdim_v - kChunk);
    }
    // Loads the next tile, of which `rows` rows exist (may be negative or more than a step).
    __device__ __forceinline__ void load(const Operand& s, const Operand& dp, int rows) {
        if (rows >= S::kStep) {
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                tile_s_[i] = load_global(s_ + i * kRowsAtOnce * s.row_stride);
                tile_dp_[i] = load_global(dp_ + i * kRowsAtOnce * dp.row_stride);
            }
        } else {
            __syncwarp();  // keeps the compiler from turning the branch into predicates that every tile pays for
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                tile_s_[i] = tile_dp_[i] = zero_chunk();
                if (row() + i * kRowsAtOnce < rows) {
                    tile_s_[i] = load_global(s_ + i * kRowsAtOnce * s.row_stride);
                    tile_dp_[i] = load_global(dp_ + i * kRowsAtOnce * dp.row_stride);
                }
            }
        }
        s_ += S::kStep * s.row_stride;
        dp_ += S::kStep * dp.row_stride;
    }
    // `to` is the address of the first tile plus offset().
    __device__ __forceinline__ void store(unsigned to) const {
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (S::kChunks == kLanes || chunk() < S::kChunks) {
                const unsigned row_address = to + i * kRowsAtOnce * S::kRowBytes;
                store_shared(row_address, tile_s_[i]);
                store_shared(row_address + S::kStepTile, tile_dp_[i]);
            }
    }
};

// The block's rows of a gradient from shared memory to the output, whole chunks of the rows and columns that exist.
template <class S>
__device__ __forceinline__ void shared_to_output(const Output& out, int head, unsigned tile, int origin, int first_row,
                                                 int all_rows, int headdim) {
    constexpr int kLanes = 8;
    unsigned short* base = head_base(out, blockIdx.z, head);
    const int rows = min(S::kRows, all_rows - first_row);
    for (int row = threadIdx.x / kLanes; row < rows; row += S::kThreads / kLanes)
        for (int chunk = threadIdx.x % kLanes; chunk < headdim / kChunk; chunk += kLanes)
            *reinterpret_cast<uint4*>(base + (origin + first_row + row) * out.row_stride + chunk * kChunk) =
                load_shared(tile + swizzled<S::kChunks>(row, chunk));
}
