// Schedules DeepSeek V3.2's lightning indexer (indexer.cuh: scores of keys for each query) on the device. A tile is Rows rows
// (heads of some queries of a batch entry) and the keys that any of these queries sees. A step is Step keys of a tile. The grid is
// as large as the GPU, and each block takes an equal share of all steps, counted from the lengths in memory: the host needs no
// lengths. Loading a tile's queries counts as kLoadSteps steps more, because causal prompts begin with many tiles of few keys.
// The kernel's row in src/kernels gives THREADS, of a block.
#pragma once

#include "volta_fa_params.h"  // generated from src/params: IndexerParams: strides count elements, page_stride bytes

namespace indexer {

// Keys first to end - 1; none if first >= end.
struct Range {
    int first, end;
};

// Returns the keys that a query sees. k_start and k_end are unvalidated device data: the range is cut to keys that exist. With
// is_causal, k_end is that of the last query, and each query before sees one key less than the next.
__device__ __forceinline__ Range keys_of(const IndexerParams& p, int batch, int query) {
    if (query >= p.seqlen_q) return {0, 0};
    int first = 0, end = max(p.k_end[batch * p.k_end_batch_stride + query * p.k_end_row_stride], 0);
    if (p.is_causal) end -= p.seqlen_q - 1 - query;
    if (p.k_start) first = max(p.k_start[batch * p.k_start_batch_stride + query * p.k_start_row_stride], 0);
    return {first, min(end, p.keys)};
}

// Returns the queries of a tile. Each takes 2^head_shift rows (32 or 64): one for each head, the rest empty.
template <int Rows>
__device__ __forceinline__ int queries_of_tile(const IndexerParams& p) {
    return Rows >> p.head_shift;
}

// Tile `number` of all batch entries' tiles: its batch entry, its first query, the end of its keys, the number of its first step
// (step i begins at key i * Step) and its steps.
template <int Rows, int Step>
struct Tile {
    // The time to load queries, in whole steps, from a simulated 7,000 cycles. A step takes 5,600 with 256 rows, 1,700 with 64:
    // 1.25 and 4.1 steps. The schedule counts 1 and 3.
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
    // Time of the tile, in steps; a tile without keys takes none.
    __device__ __forceinline__ int time() const { return steps ? steps + kLoadSteps : 0; }
    // Returns the step, counted from first_step, at which a block begins whose share starts at this time of the tile. Shares that
    // start while queries load begin at step 0.
    __device__ __forceinline__ static int step_at(int time) { return max(time - kLoadSteps, 0); }
};

// A block's share of the time of all tiles, in steps, loading included: it begins at time `begin` of tile `tile` and lasts `left`
// steps, in this tile and the next ones. `begin` is unset if `left` is 0. `scratch`: kScratchInts numbers in shared memory.
template <int Rows, int Step>
struct BlockTime {
    static constexpr int kWarps = THREADS / 32, kScratchInts = kWarps + 2;
    int tile, begin, left;

    __device__ __forceinline__ BlockTime(const IndexerParams& p, int* scratch) {
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        // A scan over all tiles' times: each thread sums consecutive tiles [from, to), then warps and the block scan the sums.
        const int tiles_per_thread = (p.tiles + THREADS - 1) / THREADS, from = min(thread * tiles_per_thread, p.tiles);
        const int to = min(from + tiles_per_thread, p.tiles);
        int thread_time = 0;
#pragma unroll 1
        for (int i = from; i < to; i++) thread_time += Tile<Rows, Step>(p, i).time();
        int time_until = thread_time;  // after the scan: time at the end of the thread's tiles, from tile 0 on
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int other = __shfl_up_sync(~0u, time_until, i);
            if (lane >= i) time_until += other;
        }
        if (lane == 31) scratch[warp] = time_until;
        if (thread == 0) scratch[kWarps] = p.tiles;
        __syncthreads();
        int total = 0;
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
            if (i == warp) time_until += total;
            total += scratch[i];
        }
        const auto share = [&](int block) { return static_cast<int>(static_cast<long long>(total) * block / gridDim.x); };
        const int first = share(blockIdx.x);
        left = share(blockIdx.x + 1) - first;
        if (first < time_until && first >= time_until - thread_time) {  // the block's share begins in this thread's tiles
            int before = time_until - thread_time;
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
