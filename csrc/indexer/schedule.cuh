// Schedules the tiles of the lightning indexer (indexer.cuh) on the device. A tile is some queries of a sequence and the keys that
// any of them sees. The grid is as large as the GPU, and its blocks take equal numbers of steps of keys, so the host needs no
// lengths. Loading the queries of a tile counts as steps too: causal prompts begin with many tiles of few keys.
//
// The kernel's row in src/kernels gives THREADS, of a block.
#pragma once

#include "volta_fa_params.h"

namespace indexer {

// Keys first to end - 1; none if first >= end.
struct Range {
    int first, end;
};

// Returns the keys of a query. k_start and k_end are device data that the host has not checked: only keys that exist are left. With
// is_causal, k_end is that of the last query, and each query before sees one key less.
__device__ __forceinline__ Range keys_of(const IndexerParams& p, int batch, int query) {
    if (query >= p.seqlen_q) return {0, 0};
    int first = 0, end = max(p.k_end[batch * p.k_end_batch_stride + query * p.k_end_row_stride], 0);
    if (p.is_causal) end -= p.seqlen_q - 1 - query;
    if (p.k_start) first = max(p.k_start[batch * p.k_start_batch_stride + query * p.k_start_row_stride], 0);
    return {first, min(end, p.keys)};
}

// Queries of a tile of Rows rows. Each has 2^head_shift rows, one for a head; the last rows may have none.
template <int Rows>
__device__ __forceinline__ int queries_of_tile(const IndexerParams& p) {
    return Rows >> p.head_shift;
}

// A tile: its first query, the end of its keys, and its steps of Step keys.
template <int Rows, int Step>
struct Tile {
    // The time to load queries, in steps. Simulated: 7,000 cycles, and a step has 5,600 with 256 rows, 1,700 with 64.
    static constexpr int kLoadSteps = Rows > 64 ? 1 : 3;
    int batch, query, key_end, first_step, steps;

    __device__ __forceinline__ Tile(const IndexerParams& p, int number) {
        const int queries = queries_of_tile<Rows>(p), tiles = (p.seqlen_q + queries - 1) / queries;
        batch = number / tiles;
        query = number % tiles * queries;
        int first = 0x7fffffff;
        key_end = 0;
#pragma unroll 1
        for (int i = 0; i < queries; i++) {
            const Range keys = keys_of(p, batch, query + i);
            if (keys.first >= keys.end) continue;
            first = min(first, keys.first);
            key_end = max(key_end, keys.end);
        }
        first_step = first / Step;
        steps = key_end ? (key_end + Step - 1) / Step - first_step : 0;
    }
    // Time of the tile, in steps.
    __device__ __forceinline__ int time() const { return steps ? steps + kLoadSteps : 0; }
    // The step, counted from first_step, with which a block begins at this time. It loads the queries in any case.
    __device__ __forceinline__ static int step_at(int time) { return max(time - kLoadSteps, 0); }
};

// A block's part of the time of all tiles, in steps, loading included: `left`, from time `begin` of tile `tile` on, over this tile
// and the next ones. `begin` is unset if `left` is 0. `scratch`: shared memory for a number of each warp and two more.
template <int Rows, int Step>
struct BlockTime {
    int tile, begin, left;

    __device__ __forceinline__ BlockTime(const IndexerParams& p, int* scratch) {
        constexpr int kWarps = THREADS / 32;
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        // each thread has consecutive tiles
        const int of_thread = (p.tiles + THREADS - 1) / THREADS, from = min(thread * of_thread, p.tiles);
        const int to = min(from + of_thread, p.tiles);
        int own = 0;
#pragma unroll 1
        for (int i = from; i < to; i++) own += Tile<Rows, Step>(p, i).time();
        int until = own;  // the end of the thread's tiles
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(~0u, until, i);
            if (lane >= i) until += other;
        }
        if (lane == 31) scratch[warp] = until;
        if (thread == 0) scratch[kWarps] = p.tiles;
        __syncthreads();
        int total = 0;
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
            if (i == warp) until += total;
            total += scratch[i];
        }
        const auto share = [&](int block) { return static_cast<int>(static_cast<long long>(total) * block / gridDim.x); };
        const int first = share(blockIdx.x);
        left = share(blockIdx.x + 1) - first;
        if (first < until && first >= until - own) {
            int before = until - own;
#pragma unroll 1
            for (int i = from; i < to; i++) {
                const int time = Tile<Rows, Step>(p, i).time();
                if (first < before + time) {
                    scratch[kWarps] = i;
                    scratch[kWarps + 1] = first - before;
                    break;
                }
                before += time;
            }
        }
        __syncthreads();
        tile = scratch[kWarps];
        begin = scratch[kWarps + 1];
    }
};

}  // namespace indexer
