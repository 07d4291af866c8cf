// Prepare kernel of the fast forward (`volta_fa::fwd_fast`): makes what its forward kernel (forward.cuh) reads beside Q, from fp16
// or bf16 K and V and a boolean mask. src/ops/fast.rs launches it before that kernel, or alone for `volta_fa::prepare_fast`.
//
//   k_codes, k_scales  K as int8 codes; a number is code * scale (codes.cuh). Options: smooth_k takes K less its mean, for a
//                      smaller range; rotate spreads outliers over columns by a Hadamard transform
//   k_mean, v_max      mean of K over at most kMeanKeys (128) keys; largest finite |V| of the keys of each thread block
//   v_scaled           bf16 V as fp16, finite values below 1: a second launch, because it needs v_max of all keys
//   mask_bits          a bit for each element of the mask, 1 where the query sees the key
//
// A thread block takes BlockKeys keys of one sequence and KV head; grid: (parts of BlockKeys keys, KV heads, batch entries). Each
// takes the mean of the whole sequence itself, so that one launch suffices. BlockKeys, Threads, SHARED_BYTES: from the kernel's row
// in src/kernels.
//
//   scale block, chunk  kScaleKeys (64) keys with kScales (4) scales; kChunk (8) columns
//   KeyCodes          addresses of one sequence and KV head: `codes` from key 0 on, `scales`, `mean`, `v_max` (codes.cuh)
//   to_codes()        four numbers times code_factor(largest), rounded to int8; code_scale(largest): the codes' scale, its inverse
//   v_exponent(), times_power()  e, of 2^e above the largest |V|; x * 2^e
#pragma once

#include "tile.cuh"
#include "turing/fast/codes.cuh"

namespace turing {

// FastParams::phase of a launch of this kernel.
enum PreparePhase : int {
    kPrepareKeys,  // all but v_scaled
    kScaleValues,  // v_scaled, for bf16 only
    kPackMask,  // mask_bits alone, for calls with prepared K and V
};

template <int Headdim, int BlockKeys, int Threads>
struct FastPrepare {
    static constexpr int kChunks = Headdim / kChunk;  // chunks of a row, one for each of its lanes
    static constexpr int kRowsAtOnce = 32 / kChunks;  // rows of K that a warp loads at once
    static constexpr int kLoads = kScaleKeys / kScales / kRowsAtOnce;  // of a lane for the 16 keys that share a scale
    static constexpr int kBlockRowsAtOnce = Threads / kChunks;  // rows of K or V that the thread block loads at once
    static_assert(kBlockRowsAtOnce * Headdim * 4 == SHARED_BYTES, "the row in src/kernels and the kernel disagree");

    using Chunk = float[kChunk];  // a thread's columns of a row, as fp32

    __device__ __forceinline__ static bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

    // Sets `mean` to that of the thread's columns of K over the sequence's `keys` keys; k: its first row. Elements that are not
    // finite count as 0. `chunk`: number of the thread's chunk in a row; has_chunk: whether it exists (below p.problem.headdim).
    // All threads of the block call it together. `shared`: a row of fp32 sums for each of the kBlockRowsAtOnce rows. Sums are of
    // elements divided by kMeanKeys, a power of two: bf16's largest numbers do not overflow them.
    __device__ __forceinline__ static void take_mean(Chunk& mean, float* shared, const FastParams& p, const unsigned short* k,
                                                     int keys, int chunk, bool has_chunk, bool is_bf16) {
        const int samples = min(keys, kMeanKeys);
#pragma unroll
        for (int i = 0; i < kChunk; i++) mean[i] = 0.f;
        for (int i = threadIdx.x / kChunks; i < samples; i += kBlockRowsAtOnce) {
            const long long key = static_cast<long long>(i) * keys / samples;
            Chunk x;
            unpack8(x, has_chunk ? load_global(k + key * p.k.row_stride + chunk * kChunk) : zero_chunk(), is_bf16);
#pragma unroll
            for (int j = 0; j < kChunk; j++) mean[j] = fmaf(is_finite(x[j]) ? x[j] : 0.f, 1.f / kMeanKeys, mean[j]);
        }
        const int row = threadIdx.x / kChunks;
#pragma unroll
        for (int j = 0; j < kChunk; j++) shared[row * Headdim + chunk * kChunk + j] = mean[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kChunk; j++) {
            float sum = 0.f;
            for (int i = 0; i < kBlockRowsAtOnce; i++) sum += shared[i * Headdim + chunk * kChunk + j];
            mean[j] = sum / (static_cast<float>(samples) * (1.f / kMeanKeys));
        }
    }

    // Applies a Hadamard transform to a row. Each of kChunks lanes has a chunk of it. The row's norm grows by sqrt(Headdim).
    __device__ __forceinline__ static void rotate(Chunk& x) {
#pragma unroll
        for (int step = 1; step < kChunk; step *= 2)
#pragma unroll
            for (int i = 0; i < kChunk; i++)
                if (!(i & step)) butterfly(x[i], x[i + step]);
#pragma unroll
        for (int lane_bit = 1; lane_bit < kChunks; lane_bit *= 2)
#pragma unroll
            for (int i = 0; i < kChunk; i++) x[i] = butterfly_lanes(x[i], lane_bit);
    }

    // Writes the codes and scales of the thread block's keys. `keys`: of the sequence. Its last scale block is filled with zeros.
    __device__ __forceinline__ static void quantize(const FastParams& p, const KeyCodes<Headdim>& to, const unsigned short* k,
                                                    int keys, const Chunk& mean, int chunk, bool has_chunk, bool is_bf16) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        // a warp takes the 16 keys of one scale at a time; n: number of the scale among those of the thread block
        for (int n = warp; n < BlockKeys / kScaleKeys * kScales; n += Threads / 32) {
            const int scale_block = blockIdx.x * (BlockKeys / kScaleKeys) + n / kScales, scale = n % kScales;
            if (scale_block * kScaleKeys >= keys) continue;
            uint4 data[kLoads];
            // Keys 8i + 2t and 8i + 2t + 1 of a scale block share scale t: lanes with lane % 4 = t have them in the forward kernel.
            const auto key_of = [&](int load) {
                const int i = load * kRowsAtOnce + lane / kChunks;  // number among the 16 keys
                return scale_block * kScaleKeys + i / 2 * 8 + 2 * scale + i % 2;
            };
#pragma unroll
            for (int load = 0; load < kLoads; load++) {
                const int key = key_of(load);
                data[load] = has_chunk && key < keys ? load_global(k + key * p.k.row_stride + chunk * kChunk) : zero_chunk();
            }
            // `poison` is the sum of 0 * x: NaN if an element is not finite, else 0. Added to the scale, it makes the scores of
            // these keys NaN. (The maximum would drop a NaN.)
            float largest = 0.f, poison = 0.f;
            // Unpacks a load, less the mean, rotated. Called twice for each: loaded words take fewer registers than results.
            const auto unpack = [&](Chunk& x, int load) {
                unpack8(x, data[load], is_bf16);
                const bool exists = key_of(load) < keys;
#pragma unroll
                for (int i = 0; i < kChunk; i++) x[i] = exists ? x[i] - mean[i] : 0.f;
                if (p.rotate) rotate(x);
#pragma unroll
                for (int i = 0; i < kChunk; i++) poison = fmaf(x[i], 0.f, poison);
            };
#pragma unroll
            for (int load = 0; load < kLoads; load++) {
                Chunk x;
                unpack(x, load);
#pragma unroll
                for (int i = 0; i < kChunk; i++) largest = fmaxf(largest, fabsf(x[i]));
            }
#pragma unroll
            for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane_mask));
                poison += __shfl_xor_sync(~0u, poison, lane_mask);
            }
            const float factor = code_factor(largest);
#pragma unroll
            for (int load = 0; load < kLoads; load++) {
                Chunk x;
                unpack(x, load);
                const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
                *reinterpret_cast<uint2*>(to.codes + static_cast<long long>(key_of(load)) * Headdim + chunk * kChunk) =
                    make_uint2(to_codes(low, factor), to_codes(high, factor));
            }
            if (lane == 0) to.scales[scale_block * kScales + scale] = code_scale(largest) + poison;
        }
    }

    // Writes the largest finite |V| of the thread block's keys. `shared`: a float of each warp. v: the sequence's first row.
    __device__ __forceinline__ static void take_v_max(const FastParams& p, const KeyCodes<Headdim>& to, float* shared,
                                                      const unsigned short* v, int keys, int chunk, bool is_bf16) {
        float largest = 0.f;
        const int end = min(keys, static_cast<int>(blockIdx.x + 1) * BlockKeys);
        if (chunk * kChunk < p.problem.headdim_v)
            for (int key = blockIdx.x * BlockKeys + threadIdx.x / kChunks; key < end; key += kBlockRowsAtOnce) {
                Chunk x;
                unpack8(x, load_global(v + key * p.v.row_stride + chunk * kChunk), is_bf16);
#pragma unroll
                for (int i = 0; i < kChunk; i++)
                    if (is_finite(x[i])) largest = fmaxf(largest, fabsf(x[i]));
            }
        largest = warp_max(largest);
        __syncthreads();  // all threads have read the sums of take_mean()
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < Threads / 32; i++) largest = fmaxf(largest, shared[i]);
            to.v_max[blockIdx.x] = largest;
        }
    }

    // kScaleValues: writes V * 2^-e as fp16 to v_scaled, where 2^e exceeds the largest finite |V| of the sequence.
    __device__ __forceinline__ static void scale_v(const FastParams& p, const KeyCodes<Headdim>& from, int k_offset, int keys,
                                                   int chunk) {
        const int exponent = -v_exponent(from.v_max, keys, BlockKeys, p.element);
        if (chunk * kChunk >= p.problem.headdim_v) return;
        const unsigned short* v = rows_of(p.v, blockIdx.z, blockIdx.y, k_offset) + chunk * kChunk;
        unsigned short* to = rows_of(p.v_scaled, blockIdx.z, blockIdx.y, k_offset) + chunk * kChunk;
        const int end = min(keys, static_cast<int>(blockIdx.x + 1) * BlockKeys);
        for (int key = blockIdx.x * BlockKeys + threadIdx.x / kChunks; key < end; key += kBlockRowsAtOnce) {
            Chunk x;
            unpack8(x, load_global(v + key * p.v.row_stride), true);  // bf16: fp16 V stays as it is
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = to_half2(times_power(x[2 * i], exponent), times_power(x[2 * i + 1], exponent));
            *reinterpret_cast<uint4*>(to + key * p.v_scaled.row_stride) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    // Packs the boolean mask to bits, a word for 32 keys of a row (query). A warp packs a tile of 32 rows by 32 keys at a time;
    // lane i writes the word of row i. The warps of the launch divide the tiles. Batch entries or heads that share a mask have a
    // mask_bits stride of 0: it is packed once. A head has mask_words words by mask_rows rows: queries rounded up to 32, or 32 rows
    // if all queries share one. Keys and rows that do not exist get 0.
    __device__ __forceinline__ static void pack_mask(const FastParams& p) {
        const unsigned lane = threadIdx.x % 32, block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const unsigned blocks = gridDim.x * gridDim.y * gridDim.z, heads = p.mask_bits_head_stride ? p.problem.nheads : 1;
        const unsigned row_tiles = p.mask_rows / 32, head_tiles = row_tiles * p.mask_words;
        const unsigned tiles = (p.mask_bits_batch_stride ? p.problem.batch : 1) * heads * head_tiles;
        for (unsigned tile = block * (Threads / 32) + threadIdx.x / 32; tile < tiles; tile += blocks * (Threads / 32)) {
            const unsigned batch_head = tile / head_tiles, batch = batch_head / heads, head = batch_head % heads;
            const unsigned word = tile % head_tiles / row_tiles, row = tile % row_tiles * 32, key = word * 32 + lane;
            const unsigned char* mask = reinterpret_cast<const unsigned char*>(p.mask) + batch * p.mask_batch_stride +
                                        head * p.mask_head_stride + row * p.mask_row_stride + key * p.mask_key_stride;
            const int rows = key < p.problem.seqlen_k ? p.problem.seqlen_q - static_cast<int>(row) : 0;
            unsigned char seen[32];
#pragma unroll
            for (int i = 0; i < 32; i++) seen[i] = i < rows ? __ldg(mask + i * p.mask_row_stride) : 0;
            u32 bits = 0;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const u32 of_row = __ballot_sync(~0u, seen[i]);
                if (lane == i) bits = of_row;
            }
            p.mask_bits[batch * p.mask_bits_batch_stride + head * p.mask_bits_head_stride +
                        static_cast<long long>(word) * p.mask_rows + row + lane] = bits;
        }
    }

    __device__ __forceinline__ static void run(const FastParams& p) {
        if (p.phase != kScaleValues && p.mask_bits) pack_mask(p);
        if (p.phase == kPackMask) return;
        extern __shared__ __align__(16) unsigned char shared_bytes[];
        float* shared = reinterpret_cast<float*>(shared_bytes);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        const int keys = sequence.seqlen_k(), head = blockIdx.y, chunk = threadIdx.x % kChunks;
        if (static_cast<int>(blockIdx.x) * BlockKeys >= keys) return;
        const KeyCodes<Headdim> to(p, sequence, head);
        if (p.phase == kScaleValues) return scale_v(p, to, sequence.k_offset(), keys, chunk);
        const bool is_bf16 = p.element == ElementType::Bf16, has_chunk = chunk * kChunk < p.problem.headdim;
        const unsigned short* k = rows_of(p.k, blockIdx.z, head, sequence.k_offset());
        Chunk mean = {};
        if (p.smooth_k) take_mean(mean, shared, p, k, keys, chunk, has_chunk, is_bf16);
        // the first thread block writes the mean: the forward kernel adds its product with q to lse
        if (blockIdx.x == 0 && threadIdx.x < kChunks)
#pragma unroll
            for (int i = 0; i < kChunk; i++) to.mean[chunk * kChunk + i] = mean[i];
        quantize(p, to, k, keys, mean, chunk, has_chunk, is_bf16);
        take_v_max(p, to, shared, rows_of(p.v, blockIdx.z, head, sequence.k_offset()), keys, chunk, is_bf16);
    }
};

}  // namespace turing
