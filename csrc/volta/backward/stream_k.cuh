// Stream-K grid of the volta main kernels (single_role.cuh, warp_specialized.cuh), their template argument Grid. Otherwise a thread
// block computes dk and dv of one key block: 64 or 128 keys of a KV head. Here several thread blocks share a key block of many
// steps, because few thread blocks of many steps leave SMs idle (planned by src/plan/backward/stream_k.rs). A step is Step (16 or
// 32) queries of one query head. Steps of a key block count over the query heads of its KV head, one head after the other.
//
// A split is consecutive steps of a key block, the work of a thread block. The kernels call clip() for each query head, and at the
// end combine_splits(). Of three or more splits each goes to scratch memory, and the last thread block to finish adds them in their
// order. Of two, the later one adds the other's to its own registers. No thread block waits, and dk and dv are deterministic.
#pragma once

#include "ptx.cuh"
#include "semaphore.cuh"
#include "volta/backward/products.cuh"

namespace volta {

// `params_.splits` holds, for each split of a head, its key block (`tile`), steps `first` to end - 1, and `part`: its number among
// the key block's splits (upper 8 of 16 bits) and how many these are (lower 8). The grid's first axis is KV heads of all batch
// entries, its second the splits of a head. remat_*() reads blockIdx or threadIdx again at its use, to hold no register in between.
class StreamKKeyBlock {
    // Also scratch memory `partials`, fp32: max_splits splits for each of `tiles` key blocks of a head, from number first_tile on.
    // Each key block has a semaphore, which counts thread blocks of the launch that has the unique launch_id (semaphore.cuh).
    const BwdSplits& params_;

    __device__ __forceinline__ const StreamKSplit& split() const { return params_.splits[remat_block_y()]; }

    // Calls f(chunk, four elements) for this thread's elements of a gradient c, dk or dv. `chunk`: this thread's first 16 bytes in
    // scratch memory; its next ones are `Threads` chunks apart. Returns the one after its last. Sums: Gradient<M, J>
    // (products.cuh), accumulators of eight floats: [16 keys][panel of 32 columns][half of its columns].
    template <int Threads, class Chunk, class Sums, class F>
    static __device__ __forceinline__ Chunk* each_chunk(Chunk* chunk, Sums& c, F f) {
#pragma unroll
        for (auto& keys : c)
#pragma unroll
            for (auto& panel : keys)
#pragma unroll
                for (auto& half : panel)
#pragma unroll
                    for (int v = 0; v < 8; v += 4, chunk += Threads) f(*chunk, half[v], half[v + 1], half[v + 2], half[v + 3]);
        return chunk;
    }
    // Stores a gradient to scratch memory, in L2 (__stcg), because a thread block of another SM may read it.
    template <int Threads, class Sums>
    static __device__ __forceinline__ uint4* store(uint4* to, const Sums& c) {
        return each_chunk<Threads>(to, c, [](uint4& chunk, float x, float y, float z, float w) {
            __stcg(&chunk, make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)));
        });
    }
    template <int Threads, class Sums>
    static __device__ __forceinline__ const uint4* add(Sums& c, const uint4* from) {
        return each_chunk<Threads>(from, c, [](const uint4& chunk, float& x, float& y, float& z, float& w) {
            const uint4 stored = __ldcg(&chunk);
            x += __uint_as_float(stored.x), y += __uint_as_float(stored.y);
            z += __uint_as_float(stored.z), w += __uint_as_float(stored.w);
        });
    }
    // 16-byte chunks of scratch memory that a thread needs for its accumulators of dk and dv.
    template <class... Gradients>
    static constexpr int kChunks = (0 + ... + sizeof(Gradients)) / 16;

public:
    static constexpr bool kStreamK = true;  // a block visits the steps of its split (clip())
    __device__ __forceinline__ explicit StreamKKeyBlock(const BwdSplits& params) : params_(params) {}

    // Key block, batch entry and KV head of this thread block. All blocks add dq to one fp32 accumulator, by atomics.
    __device__ __forceinline__ int number(const BwdParams&) const { return split().tile; }
    __device__ __forceinline__ int batch(const BwdParams& p) const { return remat_block_x() / p.problem.nheads_k; }
    __device__ __forceinline__ int head(const BwdParams& p) const { return remat_block_x() % p.problem.nheads_k; }
    __device__ __forceinline__ float* dq_accum(const BwdParams& p) const { return p.dq_accum; }

    // Clips the queries `first` to end - 1 of a query head, which see the key block, to those of the split: changes `first`, and
    // returns the end. The split has none of this head if the result is not after `first`.
    template <int Step>
    __device__ __forceinline__ int clip(const BwdParams& p, int query_head, int& first, int end) const {
        const int head_in_kv_head = query_head % (p.problem.nheads / p.problem.nheads_k);
        // Query heads of a KV head have the same number of `steps` each. `before`: steps of those before this one.
        const int head_first = first, steps = (end - first + Step - 1) / Step, before = head_in_kv_head * steps;
        first += max(split().first - before, 0) * Step;
        return min(end, head_first + max(split().end - before, 0) * Step);
    }

    // Stores this split's gradients to scratch memory. Returns true in the last thread block of the key block, after it has added
    // all splits: the caller then stores them as dk and dv. Returns true at once if there is one split.
    template <int Threads, class... Gradients>
    __device__ __forceinline__ bool combine_splits(Gradients&... gradients) const {
        const int splits = split().part & 0xff, index = split().part >> 8;
        if (splits == 1) return true;
        constexpr int kSplitChunks = kChunks<Gradients...> * Threads;
        // number of the key block among those of all heads with scratch memory
        const int key_block = remat_block_x() * params_.tiles + split().tile - params_.first_tile;
        unsigned long long* semaphore = params_.semaphores + key_block;
        uint4* first = reinterpret_cast<uint4*>(params_.partials) +
                       static_cast<long long>(key_block * params_.max_splits) * kSplitChunks + remat_thread_index();
        // The sum of two does not depend on their order, so the later of two thread blocks adds the other's to its own. It need not
        // store its own if the other has stored its split and counted itself at the semaphore: one_arrived().
        const bool keeps_own = splits == 2;
        const bool is_second = keeps_own && __syncthreads_or(threadIdx.x == 0 && one_arrived(semaphore, params_.launch_id));
        if (!is_second) {
            uint4* own = first + index * kSplitChunks;
            ((own = store<Threads>(own, gradients)), ...);
            __threadfence();  // this thread's split is visible before the semaphore counts it
        }
        if (!is_last_block(semaphore, params_.launch_id, splits)) return false;  // counts it; the last of `splits` goes on
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
