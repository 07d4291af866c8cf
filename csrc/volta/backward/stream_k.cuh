// Stream-K grid of the volta main kernels (single_role.cuh, warp_specialized.cuh), their template argument Grid: key blocks (the
// keys of one thread block) with many steps are split among several thread blocks, because few blocks of many steps leave SMs idle.
// src/plan/backward/stream_k.rs decides which block takes which steps.
//
// A step is Step queries of one query head. Steps of a key block count over the query heads of its KV head, one head after the
// other. A split is consecutive steps. Of three or more splits each goes to scratch memory, and the last block to finish adds them
// in their order. Of two, the later block adds the other's to its own registers. No block waits, and dk and dv are deterministic.
#pragma once

#include "ptx.cuh"
#include "semaphore.cuh"
#include "volta/backward/products.cuh"

namespace volta {

// `params.splits` holds, for each split of a head, its key block (`tile`), steps `first` to end - 1, and `part`, 256 times its
// number among the key block's splits plus their number. The grid's first axis is KV heads of all batch entries, its second the
// splits of a head. All members read blockIdx from its special register again (remat_*), so that they hold no register in between.
class StreamKKeyBlock {
    // The splits; scratch memory `partials`, fp32, max_splits splits for each key block that is split, and a semaphore for each.
    // launch_id is unique to a call: one_arrived() and is_last_block() count blocks of this launch alone (semaphore.cuh).
    const BwdSplits& params_;

    __device__ __forceinline__ const StreamKSplit& split() const { return params_.splits[remat_block_y()]; }

    // Calls f(chunk, four elements) for all elements of a gradient c. `chunk`: this thread's first 16 bytes in scratch memory; its
    // next ones follow after those of the other threads, `Threads` chunks further each. Returns the one after its last.
    template <int Threads, class Chunk, class Tiles, class F>
    static __device__ __forceinline__ Chunk* each_chunk(Chunk* chunk, Tiles& c, F f) {
#pragma unroll
        for (auto& row : c)
#pragma unroll
            for (auto& pair : row)
#pragma unroll
                for (auto& tile : pair)
#pragma unroll
                    for (int v = 0; v < 8; v += 4, chunk += Threads) f(*chunk, tile[v], tile[v + 1], tile[v + 2], tile[v + 3]);
        return chunk;
    }
    // Stores a gradient to scratch memory.
    template <int Threads, class Tiles>
    static __device__ __forceinline__ uint4* store(uint4* to, const Tiles& c) {
        return each_chunk<Threads>(to, c, [](uint4& chunk, float x, float y, float z, float w) {
            __stcg(&chunk, make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)));
        });
    }
    // Adds a gradient in scratch memory to c.
    template <int Threads, class Tiles>
    static __device__ __forceinline__ const uint4* add(Tiles& c, const uint4* from) {
        return each_chunk<Threads>(from, c, [](const uint4& chunk, float& x, float& y, float& z, float& w) {
            const uint4 stored = __ldcg(&chunk);
            x += __uint_as_float(stored.x), y += __uint_as_float(stored.y);
            z += __uint_as_float(stored.z), w += __uint_as_float(stored.w);
        });
    }
    // 16-byte chunks of a thread in a split.
    template <class... Gradients>
    static constexpr int kChunks = (0 + ... + sizeof(Gradients)) / 16;

public:
    static constexpr bool kStreamK = true;  // a block visits the steps of its split (clip())
    __device__ __forceinline__ explicit StreamKKeyBlock(const BwdSplits& params) : params_(params) {}

    // Key block, batch entry and KV head of this thread block. All blocks add dq to one accumulator, by atomics.
    __device__ __forceinline__ int number(const BwdParams&) const { return split().tile; }
    __device__ __forceinline__ int batch(const BwdParams& p) const { return remat_block_x() / p.problem.nheads_k; }
    __device__ __forceinline__ int head(const BwdParams& p) const { return remat_block_x() % p.problem.nheads_k; }
    __device__ __forceinline__ float* dq_accum(const BwdParams& p) const { return p.dq_accum; }

    // Clips the queries `first` to `end` of a query head, which see the key block, to those of the split: changes `first`, and
    // returns the end. The split has none of this head if the result is not after `first`.
    template <int Step>
    __device__ __forceinline__ int clip(const BwdParams& p, int query_head, int& first, int end) const {
        const int head_in_group = query_head % (p.problem.nheads / p.problem.nheads_k);
        // all heads have the same number of `steps`; the split counts its steps over all heads; `before` are those of earlier heads
        const int head_first = first, steps = (end - first + Step - 1) / Step, before = head_in_group * steps;
        first += max(split().first - before, 0) * Step;
        return min(end, head_first + max(split().end - before, 0) * Step);
    }

    // Stores this split's gradients to scratch memory. Returns true for the last thread block of the key block, after it has added
    // all splits: it stores them as dk and dv. Returns true at once if there is one split.
    template <int Threads, class... Gradients>
    __device__ __forceinline__ bool combine_splits(Gradients&... gradients) const {
        const int splits = split().part & 0xff, index = split().part >> 8;  // of the tile's splits: how many, and this one's number
        if (splits == 1) return true;
        constexpr int kSplitChunks = kChunks<Gradients...> * Threads;
        // number of the key block among those with scratch memory: `tiles` of each head, from first_tile on
        const int tile = remat_block_x() * params_.tiles + split().tile - params_.first_tile;
        unsigned long long* semaphore = params_.semaphores + tile;
        uint4* first = reinterpret_cast<uint4*>(params_.partials) +
                       static_cast<long long>(tile * params_.max_splits) * kSplitChunks + remat_thread_index();
        // The sum of two does not depend on their order, so the later of two blocks adds the other's to its own.
        const bool keeps_own = splits == 2;
        const bool is_second = keeps_own && __syncthreads_or(threadIdx.x == 0 && one_arrived(semaphore, params_.launch_id));
        if (!is_second) {
            uint4* own = first + index * kSplitChunks;
            ((own = store<Threads>(own, gradients)), ...);
            __threadfence();  // this thread's split is visible before the semaphore counts it
        }
        if (!is_last_block(semaphore, params_.launch_id, splits)) return false;
        if (!keeps_own) (clear_tiles(gradients), ...);
#pragma unroll 1
        for (int i = 0; i < splits; i++, first += kSplitChunks) {
            if (keeps_own && i == index) continue;
            const uint4* from = first;
            ((from = add<Threads>(gradients, from)), ...);
        }
        return true;
    }
};

}  // namespace volta
