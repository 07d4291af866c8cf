// The kernel of volta_fa::merge_attention_states (src/ops/merge.rs launches it): merges attention outputs a and b over disjoint
// sets of keys (cascade and ring attention). Each is weighted by its share of the sums of exponentials:
//
//   out = (exp(lse_a) * out_a + exp(lse_b) * out_b) / (exp(lse_a) + exp(lse_b)),  lse = log(exp(lse_a) + exp(lse_b))
//
// Each lse is fp32 (batch, nheads, seqlen_q); heads of lse_a and lse are lse_stride apart. Bound by memory. Grid: blocks of
// BLOCK_ROWS queries, heads, batch entries. A thread takes eight columns of a row at a time. out may be out_a, and lse may be
// lse_a: only the thread that writes an element reads it.
// The kernel's row in src/kernels gives BLOCK_ROWS (rows of a block) and THREADS (of a block).
#pragma once

#include "half.cuh"  // unpack8(), pack2(): fp16 or bf16, from and to fp32
#include "softmax.cuh"  // positive_infinity(), negative_infinity()
#include "volta_fa_params.h"  // generated from src/params: MergeParams, whose strides count elements

namespace merge {

constexpr int kColumns = 8;  // that a thread has at a time

// Loads eight elements of a row as floats; store() rounds them back.
template <ElementType Element>
__device__ __forceinline__ void load(const char* from, float (&x)[kColumns]) {
    const uint4* words = reinterpret_cast<const uint4*>(from);
    if (Element == ElementType::Float) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 w = words[half];
            const unsigned parts[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) x[4 * half + i] = __uint_as_float(parts[i]);
        }
    } else {
        unpack8(x, *words, Element == ElementType::Bf16);
    }
}

template <ElementType Element>
__device__ __forceinline__ void store(char* to, const float (&x)[kColumns]) {
    uint4* words = reinterpret_cast<uint4*>(to);
    if (Element == ElementType::Float) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            words[half] = make_uint4(__float_as_uint(x[4 * half]), __float_as_uint(x[4 * half + 1]),
                                     __float_as_uint(x[4 * half + 2]), __float_as_uint(x[4 * half + 3]));
    } else {
        unsigned parts[4];
#pragma unroll
        for (int i = 0; i < 4; i++) parts[i] = pack2(x[2 * i], x[2 * i + 1], Element == ElementType::Bf16);
        *words = make_uint4(parts[0], parts[1], parts[2], parts[3]);
    }
}

// Returns log(sum of exponentials) of one row. As in flash-attn, softmax_lse is +inf for a row without keys, whose sum is 0.
__device__ __forceinline__ float log_sum(float lse) { return lse == positive_infinity() ? negative_infinity() : lse; }

// Returns log(sum of exponentials) of both results together.
__device__ __forceinline__ float joint_log_sum(float a, float b) {
    const float larger = fmaxf(a, b);
    // If both are -inf, their difference would be NaN. Their sum is -inf too, or the NaN that fmaxf drops.
    return larger == negative_infinity() ? a + b : larger + log1pf(expf(-fabsf(a - b)));
}

template <class Tensor>
__device__ __forceinline__ long long first_element(const Tensor& x, int batch, int head) {
    return batch * x.batch_stride + head * x.head_stride;
}

template <ElementType Element>
constexpr int kBytes = Element == ElementType::Float ? 4 : 2;  // of an element

// Merges the block's BLOCK_ROWS rows of one head. Element: type of out_a and out. Part: type of out_b.
template <ElementType Element, ElementType Part>
__device__ __forceinline__ void merge_rows(const MergeParams& p) {
    extern __shared__ float weights_a[];  // weights of out_a, then of out_b
    float* const weights_b = weights_a + BLOCK_ROWS;
    const int head = blockIdx.y, batch = blockIdx.z;
    const int first = blockIdx.x * BLOCK_ROWS, rows = min(BLOCK_ROWS, p.seqlen_q - first);
    const int chunks = p.headdim_v / kColumns;
    const char* out_a = reinterpret_cast<const char*>(p.out_a.ptr) + first_element(p.out_a, batch, head) * kBytes<Element>;
    const char* out_b = reinterpret_cast<const char*>(p.out_b.ptr) + first_element(p.out_b, batch, head) * kBytes<Part>;
    char* out = reinterpret_cast<char*>(p.out.ptr) + first_element(p.out, batch, head) * kBytes<Element>;
    const long long entry = static_cast<long long>(batch) * p.nheads + head;

    // One thread reads and writes a row's lse, and leaves the weights to the others.
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        const long long at = entry * p.lse_stride + first + i;
        const float sum_a = log_sum(p.lse_a[at]), sum_b = log_sum(p.lse_b[entry * p.seqlen_q + first + i]);
        const float joint = joint_log_sum(sum_a, sum_b);
        // exp(sum_a - joint), but from the difference of the sums: the rounding of `joint` would affect both weights
        weights_a[i] = sum_a == negative_infinity() ? 0.f : 1.f / (1.f + expf(sum_b - sum_a));
        weights_b[i] = sum_b == negative_infinity() ? 0.f : 1.f / (1.f + expf(sum_a - sum_b));
        p.lse[at] = joint == negative_infinity() ? positive_infinity() : joint;
    }
    __syncthreads();

    for (int i = threadIdx.x; i < rows * chunks; i += THREADS) {
        const int row = i / chunks, column = i % chunks * kColumns;
        const float weight_a = weights_a[row], weight_b = weights_b[row];
        float a[kColumns], b[kColumns], merged[kColumns];
        load<Element>(out_a + ((first + row) * p.out_a.row_stride + column) * kBytes<Element>, a);
        load<Part>(out_b + ((first + row) * p.out_b.row_stride + column) * kBytes<Part>, b);
        // not 0 * x, because x may be infinite or NaN in a row without keys
#pragma unroll
        for (int c = 0; c < kColumns; c++)
            merged[c] = (weight_a == 0.f ? 0.f : weight_a * a[c]) + (weight_b == 0.f ? 0.f : weight_b * b[c]);
        store<Element>(out + ((first + row) * p.out.row_stride + column) * kBytes<Element>, merged);
    }
}

struct Kernel {
    __device__ __forceinline__ static void run(const MergeParams& p) {
        using E = ElementType;
        if (p.element == E::Bf16)
            merge_rows<E::Bf16, E::Bf16>(p);
        else if (p.element == E::Half)
            merge_rows<E::Half, E::Half>(p);
        else if (p.part == E::Bf16)
            merge_rows<E::Float, E::Bf16>(p);
        else if (p.part == E::Half)
            merge_rows<E::Float, E::Half>(p);
        else
            merge_rows<E::Float, E::Float>(p);
    }
};

}  // namespace merge
