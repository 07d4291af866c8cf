// Tiles of the backward kernels: the block's own rows and the rows of each step from global to shared memory, and gradients
// back. Used by the main and dq kernels of volta; turing's use clear_shared alone.
//
// A block of a main kernel owns keys (K and V) and visits queries (Q and dO) in steps; in dq kernels it is the other way round. "s"
// is the operand of S = Q K^T, "dp" that of dP = dO V^T. Rows are swizzled (tile.cuh). The Shape S of a kernel
// (volta/backward/shape.cuh) gives
//
//   kRows, kStep, kThreads  own rows; rows of a step; threads of the block
//   kChunks, kRowBytes      of a row: chunks of 16 bytes; bytes
//   kOwnS, kOwnDp           shared offsets, bytes, of the own tiles
//   kStepTile               bytes of a step tile; that of dp follows that of s
#pragma once

#include "tile.cuh"  // TileLoader; kChunk: 8 elements, 16 bytes; swizzled(): offset of a chunk; head_base(): row 0
#include "volta_fa_params.h"  // generated from src/params: BwdParams; Operand and Output, strides in elements

// Batch entry of a block: the grid's third axis. The stream-K grid, which has no such axis, passes a class of the same interface.
struct BatchAxis {
    __device__ __forceinline__ static int batch(const BwdParams&) { return blockIdx.z; }
};

// Loads the block's own rows of both operands, once, padded with zeros in rows and columns. The sequence has `rows` rows and begins
// at row `origin` of the tensors; the block's rows begin at first_row of the sequence. With a negative softmax_scale the own
// operand of S (K in main kernels, Q in dq) gets the other sign: kernels compute with |softmax_scale| (Problem::sign_flip).
template <class S, class Grid = BatchAxis>
__device__ __forceinline__ void load_own(const BwdParams& p, const Operand& s, const Operand& dp, int head, unsigned shared,
                                         int origin, int first_row, int rows, const Grid& grid = Grid()) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    using Loader = TileLoader<S::kChunks, kRowsAtOnce, S::kThreads>;
    Loader x(threadIdx.x, head_base(s, grid.batch(p), head) + (origin + first_row) * s.row_stride, s.row_stride, p.problem.headdim);
    Loader y(threadIdx.x, head_base(dp, grid.batch(p), head) + (origin + first_row) * dp.row_stride, dp.row_stride,
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

// Clears `Bytes` bytes of shared memory, by all threads of the block.
template <int Bytes, int Threads>
__device__ __forceinline__ void clear_shared(unsigned address) {
#pragma unroll 1
    for (int i = threadIdx.x * kChunkBytes; i < Bytes; i += Threads * kChunkBytes) store_shared(address + i, zero_chunk());
}

// Moves the step tiles of one head (Q and dO, or K and V): loads them into registers early, and stores them to shared memory
// when the previous tiles are free. A thread takes one chunk of every kRowsAtOnce-th row of both.
//
// Unlike TileLoader it pads only rows with zeros. Columns past headdim meet zeros of the block's own rows in S and dP, and
// produce only gradient columns that are not stored. So threads of these columns read the last existing chunk again.
template <class S>
class StepTiles {
    // lanes that share a row
    static constexpr int kLanes = S::kChunks <= 4 ? 4 : S::kChunks <= 8 ? 8 : S::kChunks <= 16 ? 16 : 32;
    static constexpr int kRowsAtOnce = S::kThreads / kLanes;
    static constexpr int kLoads = S::kStep / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && kLoads > 0, "the rows of a thread share their swizzle");

    const unsigned short *s_, *dp_;  // this thread's first chunk of the next tile
    uint4 tile_s_[kLoads], tile_dp_[kLoads];

    static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kLanes; }

public:
    // Offset in a shared tile, bytes, of this thread's first chunk.
    static __device__ __forceinline__ unsigned offset() { return swizzled<S::kChunks>(row(), chunk()); }

    // first_row: where the first tile begins, a row of the tensors (the sequence's origin included).
    template <class Grid = BatchAxis>
    __device__ __forceinline__ StepTiles(const BwdParams& p, const Operand& s, const Operand& dp, int head, int first_row,
                                         const Grid& grid = Grid()) {
        const long long thread_row = first_row + row();
        const int column = chunk() * kChunk;
        s_ = head_base(s, grid.batch(p), head) + thread_row * s.row_stride + min(column, p.problem.headdim - kChunk);
        dp_ = head_base(dp, grid.batch(p), head) + thread_row * dp.row_stride + min(column, p.problem.headdim_v - kChunk);
    }
    // Loads the next tile. `rows` of its rows exist (may be negative or more than a step).
    __device__ __forceinline__ void load(const Operand& s, const Operand& dp, int rows) {
        if (rows >= S::kStep) {
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                tile_s_[i] = load_global(s_ + i * kRowsAtOnce * s.row_stride);
                tile_dp_[i] = load_global(dp_ + i * kRowsAtOnce * dp.row_stride);
            }
        } else {
            __syncwarp();  // keeps the compiler from turning the branch into predicates, which every tile would pay for
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
    // Moves the next tile by this many rows, forward or back: listed steps need not be adjacent.
    __device__ __forceinline__ void skip(const Operand& s, const Operand& dp, int rows) {
        s_ += rows * s.row_stride;
        dp_ += rows * dp.row_stride;
    }
    // Stores both tiles. `to`: address of the first tile, plus offset().
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

// Copies the block's rows of a gradient from the shared tile at `tile` to the output: whole chunks of the rows and columns that
// exist. origin and first_row: as in load_own. all_rows: of the sequence.
template <class S, class Grid = BatchAxis>
__device__ __forceinline__ void shared_to_output(const BwdParams& p, const Output& out, int head, unsigned tile, int origin,
                                                 int first_row, int all_rows, int headdim, const Grid& grid = Grid()) {
    constexpr int kLanes = 8;  // of a row: their 16 bytes each are a 128-byte line
    unsigned short* base = head_base(out, grid.batch(p), head);
    const int rows = min(S::kRows, all_rows - first_row);
    for (int row = threadIdx.x / kLanes; row < rows; row += S::kThreads / kLanes)
        for (int chunk = threadIdx.x % kLanes; chunk < headdim / kChunk; chunk += kLanes)
            *reinterpret_cast<uint4*>(base + (origin + first_row + row) * out.row_stride + chunk * kChunk) =
                load_shared(tile + swizzled<S::kChunks>(row, chunk));
}
