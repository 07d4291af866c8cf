// Casts bf16 or fp32 q, k and v to fp16, scaled by powers of two so that fp16's range suffices. For all families. src/ops/cast.rs
// launches it for each Phase in this order: the second where a call may hide keys, the last one only after a forward pass.
//
// Keys that no query sees may hold any finite numbers: what memory held before. So they change no exponent, and those that are too
// large for fp16 become its largest number.
//
// With low parts (low_column) a number is the sum of two fp16 numbers, and the first phase casts nothing. Both factors of a product
// then get about the same size, which leaves the low parts above fp16's subnormal numbers.
//
// Scores are products of q and k. So the exponents of q and k cancel, as far as fp16 holds both factors, and no kernel needs to
// know them. Two cases are left. Products too small for that are far below 1 and change no probability, whatever their scale;
// only the gradients need the digits of q and k. Rows of q whose scores could exceed 2^max_score_exponent get a smaller exponent
// of their own, which keeps scores where fp32 resolves them. Their largest score stays so far above the others that their
// probabilities are 0 or 1 as before, unless two scores agree to about 18 bits.
//
// The kernel's row in src/kernels gives BLOCK_ROWS (rows that a block takes at a time) and THREADS (of a block).
#pragma once

#include "half.cuh"
#include "seqlen_info.cuh"
#include "shared/cast/visible_keys.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace cast {

// CastParams::phase. A group is the rows of a KV head and its query heads: those of a batch entry, or of all packed sequences.
enum Phase : int {
    kTakeLargest,  // takes the largest magnitude of each group, and casts q and k as if no scale were needed
    kLeaveOutHidden,  // of groups with outlying keys or values: takes the largest magnitude that a query sees
    kCastScaled,  // finds the groups' Exponents, and casts v, and q and k once more where they need a scale, which is rare
    kRestoreLse,  // restores softmax_lse of rows that got an exponent of their own
};
// Which tensor a block casts.
enum Tensor : int { kQ, kK, kV };
// Rows of CastParams::largest, one number for each group. 0: none.
enum Magnitude : int {
    kLargest,  // of q, k and v, finite elements
    kSmallest = 3,  // of k and v, bits inverted: the smallest but 0 that a lane has of a row
    kLargestVisible = 5,  // of k and v, if the group has outlying ones: the largest without hidden outlying ones
};

constexpr int kColumns = 8;  // that a lane has at a time, 16 bytes of bf16
constexpr int kLanes = 8;  // lanes of a row
constexpr int kRowsAtOnce = THREADS / kLanes;

// Magnitudes of q and k that need no scale are below 2^kMaxOrdinary, and their largest at least 2^(kMinOrdinary - 1).
constexpr int kMaxOrdinary = 13, kMinOrdinary = -7;
// Exponent of the ratio up to which hidden keys may count. Numbers with a normal distribution stay below 2^5.
constexpr int kSpread = 6;
constexpr float kLargestHalf = 65504.f;

// Returns e with 2^(e - 1) <= x < 2^e, from the bits of a positive fp32 number; less for subnormal ones.
__device__ __forceinline__ int exponent_of(unsigned bits) { return static_cast<int>(bits >> 23) - 126; }

// Returns x * 2^exponent, where the result is in fp16's range. The power alone may be out of fp32's.
__device__ __forceinline__ float times_power(float x, int exponent) {
    const int half = exponent / 2;
    const auto power = [](int e) { return __uint_as_float(static_cast<unsigned>(min(max(e, -126), 127) + 127) << 23); };
    return x * power(half) * power(exponent - half);
}

__device__ __forceinline__ bool is_finite(unsigned bits) { return bits < 0x7f800000u; }

// Returns the larger of a magnitude's bits and those of a number, if that is finite.
__device__ __forceinline__ unsigned larger_of(unsigned largest, float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return is_finite(bits) ? max(largest, bits) : largest;
}

// Returns x * 2^exponent, where finite numbers beyond fp16's range become its largest.
__device__ __forceinline__ float scaled(float x, int exponent) {
    const float y = exponent == 0 ? x : times_power(x, exponent);
    return is_finite(__float_as_uint(x) & 0x7fffffffu) ? fminf(fmaxf(y, -kLargestHalf), kLargestHalf) : y;
}

// Bits of the largest magnitude of a group of keys or values.
__device__ __forceinline__ unsigned largest_of(const CastParams& p, Tensor tensor, int group) {
    const unsigned visible = p.largest[(kLargestVisible + tensor - kK) * p.groups + group];
    return visible ? visible : p.largest[(kLargest + tensor) * p.groups + group];
}

// Exponent of a group's values. All of v is scaled, so that powers of two in v are those of out, bitwise. With keeps_ordinary_v
// only what fp16 cannot hold is.
__device__ __forceinline__ int value_exponent(const CastParams& p, int group) {
    const unsigned largest = largest_of(p, kV, group);
    const int exponent = exponent_of(largest);
    const bool is_ordinary = exponent >= kMinOrdinary && exponent <= kMaxOrdinary;
    return largest && !(p.keeps_ordinary_v && is_ordinary) ? min(p.largest_v_exponent - exponent, 126) : 0;
}

// Exponents of a group: fp16 numbers are the given ones times 2^exponent. p.scale_exponent: the power of two that q takes over from
// softmax_scale. p.score_exponent is the exponent of headdim * scale_log2, rounded up; p.scale_log2_exponent is that of scale_log2.
// Rows whose scores may exceed 2^max_score_exponent (log2 units) get an exponent that lowers them to 2^lowered_score_exponent.
struct Exponents {
    int q, k;
    bool has_moved;  // q or k need a scale, or rows may need exponents of their own
    int keys;  // of the largest scaled |k|

    __device__ __forceinline__ Exponents(const CastParams& p, int group) {
        const unsigned of_q = p.largest[group], of_k = largest_of(p, kK, group);
        const int exponent_q = exponent_of(of_q) + p.scale_exponent, exponent_k = exponent_of(of_k);
        const int sum = exponent_q + exponent_k;
        const bool some = of_q && of_k;
        q = p.scale_exponent;
        k = 0;
        keys = exponent_k;
        const auto is_ordinary = [](unsigned bits, int exponent) {
            return !bits || (exponent >= kMinOrdinary && exponent <= kMaxOrdinary);
        };
        has_moved = !is_ordinary(of_q, exponent_q) || !is_ordinary(of_k, exponent_k) ||
                    (some && sum + p.score_exponent > p.max_score_exponent);
        if (has_moved || p.low_column) {
            const auto in_range = [](int exponent) { return min(max(exponent, kMinOrdinary), kMaxOrdinary); };
            // Both factors get about the same size; where one of them is 0, the other gets that of 1.
            keys = some ? in_range((sum + 1) >> 1) : 0;
            k = of_k ? keys - exponent_k : 0;
            q += of_q ? (some ? max(sum - keys, kMinOrdinary) : 0) - exponent_q : 0;
        }
    }
};

// A row's exponent beyond its group's, 0 or negative. Its eight lanes call it together. `largest` and `sum`: of the lane's
// magnitudes, both times 2^shift. `lse`: of the row in a backward pass, else 0.
__device__ __forceinline__ int row_exponent(const CastParams& p, const Exponents& of, int shift, float largest, float sum,
                                            float lse) {
#pragma unroll
    for (int i = 1; i < kLanes; i *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
        sum += __shfl_xor_sync(~0u, sum, i);
    }
    if (sum == 0.f) return 0;
    // The largest score is at most lse. Without it, |score| is at most the sum times the largest |k|.
    const bool has_lse = lse != 0.f && is_finite(__float_as_uint(lse) & 0x7fffffffu);
    const int of_scores = has_lse ? exponent_of(__float_as_uint(fabsf(lse * kLog2e)))
                                  : exponent_of(__float_as_uint(sum)) - shift + of.q + of.keys + p.scale_log2_exponent;
    const int excess = of_scores > p.max_score_exponent ? of_scores - p.lowered_score_exponent : 0;
    return -max(max(excess, exponent_of(__float_as_uint(largest)) - shift + of.q - kMaxOrdinary), 0);
}

// Rows of one head of one tensor. `slot`: number of the head among those of q, then k, then v.
struct Head {
    const unsigned char* from;
    unsigned short* to;
    long long from_stride, to_stride;  // of rows; of `from` in bytes
    bool is_fp32;
    int rows, columns;
    int low_column;  // 0: no low parts
    int of_keys;  // KV head of its group
    int group;
    Tensor tensor;

    __device__ __forceinline__ Head(const CastParams& p, const SeqlenInfo<true>& sequence, int slot, int batch) {
        const int nheads = p.problem.nheads, nheads_k = p.problem.nheads_k;
        tensor = slot < nheads ? kQ : slot < nheads + nheads_k ? kK : kV;
        const int head = tensor == kQ ? slot : (slot - nheads) % nheads_k;
        of_keys = tensor == kQ ? slot / (nheads / nheads_k) : head;
        group = (p.lengths.cu_seqlens_q ? 0 : p.first_entry + batch) * nheads_k + of_keys;
        const Operand& source = tensor == kQ ? p.q : tensor == kK ? p.k : p.v;
        const Output& target = tensor == kQ ? p.q_fp16 : tensor == kK ? p.k_fp16 : p.v_fp16;
        rows = tensor == kQ ? sequence.seqlen_q() : sequence.seqlen_k();
        columns = tensor == kV ? p.problem.headdim_v : p.problem.headdim;
        low_column = tensor == kV ? p.low_column_v : p.low_column;
        const int first = tensor == kQ ? sequence.q_offset() : sequence.k_offset();
        is_fp32 = p.element == ElementType::Float;
        const int bytes = is_fp32 ? 4 : 2;
        from_stride = source.row_stride * bytes, to_stride = target.row_stride;
        from = reinterpret_cast<const unsigned char*>(source.ptr) +
               (batch * source.batch_stride + first * source.row_stride + head * source.head_stride) * bytes;
        to = target.ptr + batch * target.batch_stride + first * to_stride + head * target.head_stride;
    }
    __device__ __forceinline__ void load(int row, int column, float (&x)[kColumns]) const {
        const unsigned char* at = from + row * from_stride;
        if (is_fp32) {
            const float4* numbers = reinterpret_cast<const float4*>(at + column * 4);
            const float4 low = __ldg(numbers), high = __ldg(numbers + 1);
            x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
            x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
            return;
        }
        unpack8(x, load_global(reinterpret_cast<const unsigned short*>(at + column * 2)), true);
    }
    // Stores the rounded numbers and, from low_column on unless it is 0, what rounding took from them.
    __device__ __forceinline__ void store(int row, int column, const float (&x)[kColumns]) const {
        uint4* at = reinterpret_cast<uint4*>(to + row * to_stride + column);
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high[i] = to_half2(x[2 * i], x[2 * i + 1]);
            const float2 rounded = to_float2(high[i]);
            low[i] = to_half2(x[2 * i] - rounded.x, x[2 * i + 1] - rounded.y);
        }
        at[0] = make_uint4(high[0], high[1], high[2], high[3]);
        if (low_column) at[low_column / kColumns] = make_uint4(low[0], low[1], low[2], low[3]);
    }
};

// kTakeLargest. Elements that are not finite change no exponent. A row's magnitudes are those of its lanes.
__device__ __forceinline__ void cast_as_is(const CastParams& p, const Head& head) {
    const int exponent = head.tensor == kQ ? p.scale_exponent : 0;
    unsigned largest = 0, inverse_smallest = 0;
    for (int first = blockIdx.x * BLOCK_ROWS; first < head.rows; first += gridDim.x * BLOCK_ROWS) {
        const int end = min(first + BLOCK_ROWS, head.rows);
#pragma unroll 2
        for (int row = first + threadIdx.x / kLanes; row < end; row += kRowsAtOnce) {
            unsigned of_row = 0;
            for (int column = threadIdx.x % kLanes * kColumns; column < head.columns; column += kLanes * kColumns) {
                float x[kColumns];
                head.load(row, column, x);
#pragma unroll
                for (int i = 0; i < kColumns; i++) {
                    of_row = larger_of(of_row, x[i]);
                    x[i] = scaled(x[i], exponent);
                }
                if (head.tensor != kV && !p.low_column) head.store(row, column, x);
            }
            largest = max(largest, of_row);
            if (of_row) inverse_smallest = max(inverse_smallest, ~of_row);
        }
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, i));
        inverse_smallest = max(inverse_smallest, __shfl_xor_sync(~0u, inverse_smallest, i));
    }
    if (threadIdx.x % 32 != 0 || !largest) return;
    atomicMax(p.largest + (kLargest + head.tensor) * p.groups + head.group, largest);
    if (head.tensor != kQ) atomicMax(p.largest + (kSmallest + head.tensor - kK) * p.groups + head.group, inverse_smallest);
}

// kLeaveOutHidden. Rows that are not far above the smallest count without a look at the masks.
__device__ __forceinline__ void leave_out_hidden(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence,
                                                 int batch) {
    if (head.tensor == kQ) return;
    const unsigned largest = p.largest[(kLargest + head.tensor) * p.groups + head.group];
    const unsigned smallest = ~p.largest[(kSmallest + head.tensor - kK) * p.groups + head.group];
    if (!largest || exponent_of(largest) - exponent_of(smallest) <= kSpread) return;
    const unsigned limit = smallest + (static_cast<unsigned>(kSpread) << 23);  // times 2^kSpread
    const int heads_of_group = p.problem.nheads / p.problem.nheads_k, first_head = head.of_keys * heads_of_group;
    const VisibleKeys visible(p, sequence, batch, first_head, first_head + heads_of_group);
    unsigned found = 0;
    for (int first = blockIdx.x * kRowsAtOnce; first < head.rows; first += gridDim.x * kRowsAtOnce) {
        const int row = first + threadIdx.x / kLanes;
        unsigned of_row = 0;
        for (int column = threadIdx.x % kLanes * kColumns; row < head.rows && column < head.columns; column += kLanes * kColumns) {
            float x[kColumns];
            head.load(row, column, x);
#pragma unroll
            for (int i = 0; i < kColumns; i++) of_row = larger_of(of_row, x[i]);
        }
#pragma unroll
        for (int i = 1; i < kLanes; i *= 2) of_row = max(of_row, __shfl_xor_sync(~0u, of_row, i));
        const bool is_outlying = of_row > limit;
        if (visible.contains(row, is_outlying) || !is_outlying) found = max(found, of_row);
    }
#pragma unroll
    for (int i = kLanes; i < 32; i *= 2) found = max(found, __shfl_xor_sync(~0u, found, i));
    if (threadIdx.x % 32 == 0 && found) atomicMax(p.largest + (kLargestVisible + head.tensor - kK) * p.groups + head.group, found);
}

// Exponent of a head's rows.
__device__ __forceinline__ int of_tensor(const CastParams& p, const Head& head, const Exponents& of) {
    return head.tensor == kQ ? of.q : head.tensor == kK ? of.k : value_exponent(p, head.group);
}

// Calls f(row, exponent of the group, further exponent of the row) for each row of a head. Lanes of rows that do not exist only
// take part in shuffles. `lse_row`: of the head's first row.
template <class F>
__device__ __forceinline__ void each_row(const CastParams& p, const Head& head, const Exponents& of, long long lse_row, F f) {
    const int of_group = of_tensor(p, head, of);
    // brings the largest |q| of the group to 1, so that sums stay finite
    const int shift = -exponent_of(p.largest[head.group]);
    for (int first = blockIdx.x * kRowsAtOnce; first < head.rows; first += gridDim.x * kRowsAtOnce) {
        const int row = first + threadIdx.x / kLanes;
        const bool exists = row < head.rows;
        int of_row = 0;
        if (head.tensor == kQ) {
            float largest = 0.f, sum = 0.f, lse = 0.f;
            if (p.phase == kCastScaled && p.softmax_lse && exists) lse = p.softmax_lse[lse_row + row];
            for (int column = threadIdx.x % kLanes * kColumns; exists && column < head.columns; column += kLanes * kColumns) {
                float x[kColumns];
                head.load(row, column, x);
#pragma unroll
                for (int i = 0; i < kColumns; i++) {
                    if (!is_finite(__float_as_uint(x[i]) & 0x7fffffffu)) continue;
                    const float scaled = fabsf(times_power(x[i], shift));
                    largest = fmaxf(largest, scaled);
                    sum += scaled;
                }
            }
            of_row = row_exponent(p, of, shift, largest, sum, lse);
        }
        if (exists) f(row, of_group, of_row);
    }
}

// kCastScaled.
__device__ __forceinline__ void cast_scaled(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence, int slot,
                                            int batch) {
    const Exponents of(p, head.group);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.exponents[head.tensor * p.groups + head.group] = of_tensor(p, head, of);
    }
    if (head.tensor != kV && !of.has_moved && !p.low_column) return;  // cast_as_is() has cast it
    const long long lse_row = sequence.lse_row(batch, slot);
    each_row(p, head, of, lse_row, [&](int row, int of_group, int of_row) {
        for (int column = threadIdx.x % kLanes * kColumns; column < head.columns; column += kLanes * kColumns) {
            float x[kColumns];
            head.load(row, column, x);
#pragma unroll
            for (int i = 0; i < kColumns; i++) x[i] = scaled(x[i], of_group + of_row);
            head.store(row, column, x);
        }
        // the backward pass takes softmax_lse of these scores
        if (head.tensor == kQ && p.softmax_lse && of_row != 0 && threadIdx.x % kLanes == 0) {
            float& lse = p.softmax_lse[lse_row + row];
            lse = times_power(lse, of_row);
        }
    });
}

// kRestoreLse: softmax_lse of the scores as they were given.
__device__ __forceinline__ void restore_lse(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence, int slot,
                                            int batch) {
    const Exponents of(p, head.group);
    if (!of.has_moved || head.tensor != kQ) return;
    const long long lse_row = sequence.lse_row(batch, slot);
    each_row(p, head, of, lse_row, [&](int row, int, int of_row) {
        if (of_row == 0 || threadIdx.x % kLanes) return;
        float& lse = p.softmax_lse[lse_row + row];
        lse = times_power(lse, -of_row);
    });
}

struct Kernel {
    __device__ __forceinline__ static void run(const CastParams& p) {
        const int slot = blockIdx.y, batch = blockIdx.z;
        const SeqlenInfo<true> sequence(p.problem, p.lengths, batch);
        const Head head(p, sequence, slot, batch);
        if (p.phase == kTakeLargest)
            cast_as_is(p, head);
        else if (p.phase == kLeaveOutHidden)
            leave_out_hidden(p, head, sequence, batch);
        else if (p.phase == kCastScaled)
            cast_scaled(p, head, sequence, slot, batch);
        else
            restore_lse(p, head, sequence, slot, batch);
    }
};

}  // namespace cast
