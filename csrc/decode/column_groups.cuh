// Splits the columns of heads wider than 256 between two groups of warps of a decode kernel, because the registers of one warp hold
// at most 256 columns of Q, K, V and output. Used by mainloop.cuh and the loaders.
//
// A token group is the warps that take the same tokens. Its column groups take the same rows too. Each has partial scores, of its
// columns of Q and K. ScoreExchange adds them, so each warp has the whole scores and the same softmax. The output needs no
// exchange: each column group has its own columns of V.
#pragma once

#include "decode/tile_scheduler.cuh"
#include "ptx.cuh"  // named_sync(): a barrier of some warps

namespace decode {

constexpr int kColumnGroups = HEADDIM > 256 ? 2 : 1;
// Columns of a column group.
constexpr int kGroupHeaddim = HEADDIM / kColumnGroups, kGroupHeaddimV = HEADDIM_V / kColumnGroups;
// Row groups: warps with the same tokens and columns. Each has STEP of the block's BLOCK_ROWS query rows (macros from the kernel's
// row in src/kernels, as are HEADDIM and HEADDIM_V).
constexpr int kRowGroups = BLOCK_ROWS / STEP;

// Number of the warp's column group. Warps are numbered (token group, column group, row group), the last fastest.
__device__ __forceinline__ int column_group() {
    if constexpr (kColumnGroups == 1) return 0;
    return threadIdx.x / 32 / kRowGroups % kColumnGroups;
}
// The first column of the warp's column group.
__device__ __forceinline__ int first_column() { return column_group() * kGroupHeaddim; }
__device__ __forceinline__ int first_column_v() { return column_group() * kGroupHeaddimV; }

// Adds the scores of two warps, partners, with the same rows and tokens, through shared memory. With two buffers an exchange needs
// one barrier: the partner has read a buffer before the barrier that precedes the next store to it. Scores: float2 of a lane.
template <int Scores, bool = kColumnGroups == 2>
class ScoreExchange {
    static constexpr int kWarpBytes = 32 * Scores * static_cast<int>(sizeof(float2));
    char* own_;  // the lane's place in the current buffer
    int to_partner_, to_other_buffer_;  // bytes from own_
    int barrier_;  // named barrier of the two warps

public:
    static constexpr int kBytes = 2 * kWarpBytes;  // of a warp's two buffers
    // `first_barrier`: id of the first of THREADS / 64 named barriers, one for each pair of partners.
    __device__ __forceinline__ ScoreExchange(void* buffers, int first_barrier) {
        const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
        const int pair = warp / (2 * kRowGroups) * kRowGroups + warp % kRowGroups;
        own_ = static_cast<char*>(buffers) + warp * kBytes + lane * sizeof(float2);
        to_partner_ = (column_group() == 0 ? kRowGroups : -kRowGroups) * kBytes;
        to_other_buffer_ = kWarpBytes;
        barrier_ = first_barrier + pair;
    }
    // Adds the partner's scores to x. Both warps call it together, and get the same sums.
    template <int Tiles, int RowTiles>
    __device__ __forceinline__ void add(float2 (&x)[Tiles][RowTiles]) {
        static_assert(Tiles * RowTiles <= Scores, "scores of a buffer");
#pragma unroll
        for (int i = 0; i < Tiles * RowTiles; i++) *at(own_, i) = x[i / RowTiles][i % RowTiles];
        named_sync(barrier_, 2 * 32);
#pragma unroll
        for (int i = 0; i < Tiles * RowTiles; i++) {
            const float2 y = *at(own_ + to_partner_, i);
            float2& sum = x[i / RowTiles][i % RowTiles];
            sum = make_float2(sum.x + y.x, sum.y + y.y);
        }
        own_ += to_other_buffer_;
        to_other_buffer_ = -to_other_buffer_;
    }

private:
    __device__ __forceinline__ static float2* at(char* lane, int i) { return reinterpret_cast<float2*>(lane) + 32 * i; }
};

// Without column groups scores are whole.
template <int Scores>
class ScoreExchange<Scores, false> {
public:
    static constexpr int kBytes = 0;
    __device__ __forceinline__ ScoreExchange(void*, int) {}
    template <int Tiles, int RowTiles>
    __device__ __forceinline__ void add(float2 (&)[Tiles][RowTiles]) {}
};

}  // namespace decode
