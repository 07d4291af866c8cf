// Score modifiers: score function, ALiBi and bias of one head of one batch entry, and tests whether a problem uses them. Included
// by the forward, backward and decode kernels.
//
// Scores go through these steps in this order, each only if the problem uses it. In generic kernels parameters say so: branches
// that the whole grid takes alike.
//
//   x = softmax_scale * q.k
//   x = f(x), softcap                    ScoreFunction (score_function.cuh), of fp32 tensors PreciseScoreFunction
//   x = x - slope * |i + o - j|          Alibi; query i, key j, o = seqlen_k - seqlen_q
//   x = x + bias[i, j]                   Bias
//
// Results are in log2 units (multiplied by log2(e)), ready for exp2. Code that applies these steps:
//
//   forward                             forward/scores.cuh; f of fp32 tensors forward/split.cuh
//   forward, required features          turing/forward/one_feature.cuh, volta/forward/feature_*.cuh
//   backward                            backward/modifiers.cuh
//   backward, required features         turing/backward/one_feature.cuh, volta/backward/joint_scores.cuh; else as above
//   decode                              decode/mainloop.cuh
//
// Kernels that require features (compiled for problems that all use one, or in volta's forward pass two) fold ALiBi and bias into
// their products where they can: turing's ALiBi and fp16 bias, and mostly volta's in the forward pass, are initial accumulators.
#pragma once

#include "conditional.cuh"
#include "features.cuh"  // kHas..., kRequired...: score features that the kernel has code for
#include "half.cuh"  // to_float2(): packed fp16 to fp32; halves()
#include "philox.cuh"  // Philox, DropoutRule: dropout, for includers
#include "score_function.cuh"
#include "softmax.cuh"  // kLog2e; kLargestScore: 2^24
#include "volta_fa_params.h"  // generated from src/params: Problem, ScoreOptions (strides in elements; null: not used)

// Whether the problem uses a feature. Kernels that require features (kRequiredFeatures, compile time) need no test.
__device__ __forceinline__ bool uses_score_function(const ScoreOptions& o) {
    return kHasScoreFunction && (kRequiredFeatures || ScoreFunction::parameter(o) > 0.f);
}
__device__ __forceinline__ bool uses_alibi(const ScoreOptions& o) { return kHasAlibi && (kRequiredFeatures || o.alibi_slopes); }
__device__ __forceinline__ bool uses_bias(const ScoreOptions& o) { return kHasBias && (kRequiredFeatures || o.bias); }
__device__ __forceinline__ bool uses_fp32_bias(const ScoreOptions& o) { return kHasFp32Bias && o.bias_is_fp32; }
__device__ __forceinline__ bool uses_dropout(const ScoreOptions& o) { return kHasDropout && (kRequiredFeatures || o.rng_state); }

// Subtracts slope * |i + o - j|.
struct Alibi {
    float slope;  // in log2 units
    int offset;  // o = seqlen_k - seqlen_q

    __device__ __forceinline__ Alibi(const ScoreOptions& o, int batch, int head, int seqlen_q, int seqlen_k)
        : slope(load_slope(o, batch, head) * kLog2e), offset(seqlen_k - seqlen_q) {}
    __device__ __forceinline__ static float load_slope(const ScoreOptions& o, int batch, int head) {
        return __ldg(o.alibi_slopes + batch * o.alibi_batch_stride + head);
    }

    // Returns i + o - j.
    __device__ __forceinline__ float distance(int row, int key) const { return static_cast<float>(row + offset - key); }
    __device__ __forceinline__ float operator()(float x, float distance) const { return of(slope, x, distance); }
    // The formula, for code that keeps a slope without an object of this class.
    __device__ __forceinline__ static float of(float slope, float x, float distance) { return fmaf(-slope, fabsf(distance), x); }
};

// Additive bias of one head: fp16 or fp32, with rows and keys for the longest sequence. Callers multiply its values by kLog2e.
class Bias {
    const char* base_;
    long long row_bytes_;
    int last_key_;

public:
    __device__ __forceinline__ Bias(const Problem& p, const ScoreOptions& o, int batch, int head) : last_key_(p.seqlen_k - 1) {
        const int bytes = uses_fp32_bias(o) ? 4 : 2;
        base_ = reinterpret_cast<const char*>(o.bias) + (batch * o.bias_batch_stride + head * o.bias_head_stride) * bytes;
        row_bytes_ = o.bias_row_stride * bytes;
    }

    // Keys (2 or 4) consecutive bias elements as they lie in memory; the upper half is 0 if they are fp16.
    template <int Keys>
    using Loaded = typename Conditional<Keys == 4, uint4, uint2>::Type;

    // Loads the bias of Keys consecutive keys. `row` must exist. `key` is a multiple of Keys. Keys past the last give the last
    // group's bias: the host pads rows to a multiple of 4 keys.
    template <int Keys>
    __device__ __forceinline__ Loaded<Keys> load(const ScoreOptions& o, int row, int key) const {
        if constexpr (Keys == 4)
            return load4(o, row, key);
        else
            return load2(o, row, key);
    }
    __device__ __forceinline__ uint2 load2(const ScoreOptions& o, int row, int key) const {
        const char* from = base_ + row * row_bytes_;
        key = min(key, last_key_ & ~1);
        if (uses_fp32_bias(o)) return __ldg(reinterpret_cast<const uint2*>(from + key * 4));
        return make_uint2(__ldg(reinterpret_cast<const unsigned*>(from + key * 2)), 0);
    }
    __device__ __forceinline__ uint4 load4(const ScoreOptions& o, int row, int key) const {
        const char* from = base_ + row * row_bytes_;
        key = min(key, last_key_ & ~3);
        if (uses_fp32_bias(o)) return __ldg(reinterpret_cast<const uint4*>(from + key * 4));
        const uint2 x = __ldg(reinterpret_cast<const uint2*>(from + key * 2));
        return make_uint4(x.x, x.y, 0, 0);
    }
    // Convert loaded elements to fp32.
    __device__ __forceinline__ static void to_float(const ScoreOptions& o, const uint4& loaded, float (&x)[4]) {
        if (uses_fp32_bias(o)) {
            const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = bounded(__uint_as_float(words[i]));
        } else {
            const float2 low = to_float2(loaded.x), high = to_float2(loaded.y);
            x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
        }
    }
    __device__ __forceinline__ static void to_float(const ScoreOptions& o, const uint2& loaded, float (&x)[2]) {
        if (uses_fp32_bias(o)) {
            x[0] = bounded(__uint_as_float(loaded.x)), x[1] = bounded(__uint_as_float(loaded.y));
        } else {
            const float2 both = to_float2(loaded.x);
            x[0] = both.x, x[1] = both.y;
        }
    }
    // Of every four loaded elements, returns the second and fourth if `second`, else the first and third (lanes with two of four
    // keys).
    template <int N>
    __device__ __forceinline__ static void every_second(const ScoreOptions& o, const uint4 (&loaded)[N], bool second,
                                                        float2 (&x)[N]) {
        if (uses_fp32_bias(o)) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                x[i].x = bounded(__uint_as_float(second ? loaded[i].y : loaded[i].x));
                x[i].y = bounded(__uint_as_float(second ? loaded[i].w : loaded[i].z));
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = to_float2(halves(loaded[i].x, loaded[i].y, second));
        }
    }

private:
    // Clamps an fp32 bias to the softmax's range (softmax.cuh). Infinity and NaN stay: they belong in the result. Low values need
    // no clamp, because row_max never falls below the range.
    __device__ __forceinline__ static float bounded(float bias) {
        constexpr float kLargest = kLargestScore / 2 / kLog2e;  // leaves the other half of the range to the score itself
        return bias > kLargest && bias < positive_infinity() ? kLargest : bias;
    }
};
