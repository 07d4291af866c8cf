// Casts bf16 or fp32 q, k and v to fp16, scaled by powers of two so that fp16's range suffices: attention kernels multiply fp16
// only. src/ops/cast.rs launches it once for each Phase in this order: the second where a call may hide keys, the fourth before a
// backward pass with low parts, the last one after a forward pass. Grid: row blocks, heads of q, k and v, batch entries.
//
// A group is the rows of a KV head and its query heads, of one batch entry or of all packed sequences. It has an exponent each for
// q, k and v: the fp16 numbers are the given ones times 2^exponent. The largest magnitudes of the group decide these exponents.
//
// Keys that no query sees (hidden keys) may hold any finite numbers: what memory held before. So outlying ones change no exponent
// of a group, and those that are too large for fp16 become its largest number. A key is outlying if it is far larger than the
// group's smallest one: only then is it worth the time to find out whether a query sees it.
//
// Scores are products of q and k. So the exponents of q and k cancel (their sum is 0), as far as fp16 holds both factors, and no
// kernel needs to know them. Two cases are left:
// - Products too small for that are far below 1 and change no fp16 probability, whatever their scale. Only the gradients need the
//   digits of q and k.
// - Rows of q whose scores could exceed 2^max_score_exponent (log2 units: 26 forward, 23 backward) get a smaller exponent of their
//   own, which keeps scores where fp32 resolves them. Their largest score stays so far above the others that their probabilities
//   are 0 or 1 as before. An exception: scores that differ by less than about 2^-18 of their size. Lowered to about 2^19
//   (backward), they differ by less than 2 in log2 units, so both get a share of the probability.
//
// With low parts (low_column not 0) a number is the sum of two fp16 numbers: the rounded one and, low_column columns further, what
// rounding took. The first phase then casts nothing, and q and k get about the same size, so that low parts are not subnormal.
// Where all scores are tiny, low parts are subnormal all the same. Scores lose nothing by that, but dk and dq, which are products
// with q and k, would. So the backward pass casts q and k once more, with exponents that do not cancel.
//
// The kernel's row in src/kernels gives BLOCK_ROWS (rows that a block takes at a time) and THREADS (of a block).
#pragma once

#include "half.cuh"  // to_half2(), to_float2(), unpack8(): of fp16 or bf16
#include "seqlen_info.cuh"  // SeqlenInfo; CastParams, Operand, Output (src/params): strides in elements
#include "shared/cast/visible_keys.cuh"  // VisibleKeys: whether any query sees a key
#include "softmax.cuh"  // kLog2e
#include "tile.cuh"  // load_global(): 16 bytes

namespace cast {

enum Phase : int {  // CastParams::phase
    kTakeLargest,  // takes the largest magnitude of each group, and casts q and k as if no scale were needed, which is usual
    kLeaveOutHidden,  // of groups with outlying keys or values: takes the largest magnitude without those that no query sees
    kCastScaled,  // finds the groups' Exponents, and casts v, and q and k once more where they need a scale, which is rare
    kCastForGradients,  // with low parts: casts q and k to other memory, each with its largest magnitude in [1/2, 1)
    kRestoreLse,  // restores softmax_lse of rows that got an exponent of their own
};
enum Tensor : int { kQ, kK, kV };  // that a block casts
// Rows of CastParams::largest, which has a number for each group: the fp32 bits of a magnitude, which compare as integers. 0: none,
// as the host sets all before the first phase.
enum Magnitude : int {
    kLargest,  // rows 0 to 2: of q, k and v, finite elements
    kSmallest = 3,  // rows 3 and 4: of k and v, ~bits, for atomicMax: the least nonzero maximum of a lane's part of a row
    kLargestVisible = 5,  // rows 5 and 6: of k and v, if the group has outlying ones: the largest without hidden outlying ones
};

constexpr int kColumns = 8;  // that a lane has at a time, 16 bytes of bf16
constexpr int kLanes = 8;  // lanes that share a row
constexpr int kRowsAtOnce = THREADS / kLanes;

// A group is ordinary, and needs no scale, if its largest magnitude is from 2^(kMinOrdinary - 1) to below 2^kMaxOrdinary. fp16's
// normal numbers are from 2^-14 to below 2^16. So at least a factor of 8 is left up to fp16's end, and 2^6 down to subnormals.
constexpr int kMaxOrdinary = 13, kMinOrdinary = -7;
// Scaled q and k are below 2^kMaxScaled, so products of largest magnitudes up to 2^30 fit.
constexpr int kMaxScaled = 15;
// Outlying are magnitudes beyond 2^kSpread times kSmallest. With normally distributed numbers the ratio stays below 2^5.
constexpr int kSpread = 6;
constexpr float kLargestHalf = 65504.f;

// Returns e with 2^(e - 1) <= x < 2^e, from the bits of a positive fp32 number x; -126 for subnormal ones. "Exponent" means this e.
__device__ __forceinline__ int exponent_of(unsigned bits) { return static_cast<int>(bits >> 23) - 126; }

// Returns x * 2^exponent, where the result is in fp16's range. In two factors, because 2^exponent may be out of fp32's range.
__device__ __forceinline__ float times_power(float x, int exponent) {
    const int half = exponent / 2;
    const auto power = [](int e) { return __uint_as_float(static_cast<unsigned>(min(max(e, -126), 127) + 127) << 23); };
    return x * power(half) * power(exponent - half);
}

__device__ __forceinline__ bool is_finite(unsigned bits) { return bits < 0x7f800000u; }

// Returns the larger of a magnitude's bits and those of |x|; a number x that is not finite is ignored.
__device__ __forceinline__ unsigned larger_of(unsigned largest, float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return is_finite(bits) ? max(largest, bits) : largest;
}

// Returns x * 2^exponent, where finite numbers beyond fp16's range become its largest.
__device__ __forceinline__ float scaled(float x, int exponent) {
    const float y = exponent == 0 ? x : times_power(x, exponent);
    return is_finite(__float_as_uint(x) & 0x7fffffffu) ? fminf(fmaxf(y, -kLargestHalf), kLargestHalf) : y;
}

// Returns the bits of the largest magnitude of a group's k or v, without hidden outlying ones if those were left out.
__device__ __forceinline__ unsigned largest_of(const CastParams& p, Tensor tensor, int group) {
    const unsigned visible = p.largest[(kLargestVisible + tensor - kK) * p.groups + group];
    return visible ? visible : p.largest[(kLargest + tensor) * p.groups + group];
}

// Returns the exponent of a group's values, which brings the largest |v| below 2^largest_v_exponent (2, with low parts 13).
// Ordinary groups (kMinOrdinary to kMaxOrdinary), which would need no scale, are scaled too: so the caller's v times a power of two
// gives out times this power, bitwise. With keeps_ordinary_v (batch-invariant calls) they are not: the exponent depends on all
// tokens of the group, and bits of v must not.
__device__ __forceinline__ int value_exponent(const CastParams& p, int group) {
    const unsigned largest = largest_of(p, kV, group);
    const int exponent = exponent_of(largest);
    const bool is_ordinary = exponent >= kMinOrdinary && exponent <= kMaxOrdinary;
    return largest && !(p.keeps_ordinary_v && is_ordinary) ? min(p.largest_v_exponent - exponent, 126) : 0;
}

// Exponents of q and k of a group. p.scale_exponent: that of a power of two that q takes over from an unusual softmax_scale, else
// 0. p.score_exponent: that of headdim * |softmax_scale| * log2(e), so |scores| (log2 units) are below 2^(p.score_exponent +
// exponents of the largest |q| and |k|).
struct Exponents {
    int q, k;  // fp16 numbers are the given ones times 2^q and 2^k
    bool has_moved;  // q or k need a scale, or rows may need exponents of their own: kCastScaled casts them once more
    int keys;  // exponent of the largest scaled |k|

    __device__ __forceinline__ Exponents(const CastParams& p, int group) {
        const unsigned largest_q = p.largest[group], largest_k = largest_of(p, kK, group);
        const int exponent_q = exponent_of(largest_q) + p.scale_exponent, exponent_k = exponent_of(largest_k);
        const int sum = exponent_q + exponent_k;
        const bool are_factors = largest_q && largest_k && p.phase != kCastForGradients;  // of scores, which keep their size
        q = p.scale_exponent;
        k = 0;
        keys = exponent_k;
        const auto is_ordinary = [](unsigned bits, int exponent) {
            return !bits || (exponent >= kMinOrdinary && exponent <= kMaxOrdinary);
        };
        has_moved = !is_ordinary(largest_q, exponent_q) || !is_ordinary(largest_k, exponent_k) ||
                    (are_factors && sum + p.score_exponent > p.max_score_exponent);
        if (has_moved || p.low_column) {
            const auto in_range = [](int exponent) { return min(max(exponent, kMinOrdinary), kMaxScaled); };
            // Both factors get about the same size; where one of them is 0, the other's largest comes into [1/2, 1). Scores need
            // no more digits of a tiny q than fp16's subnormal numbers have: they are 0 for the softmax. Gradients do, unless q is
            // cast for them.
            const bool is_backward = p.lowered_score_exponent < p.max_score_exponent;
            const int least = is_backward && !p.low_column ? kMinOrdinary : -126;
            keys = are_factors ? in_range((sum + 1) >> 1) : 0;
            k = largest_k ? keys - exponent_k : 0;
            q += largest_q ? (are_factors ? max(sum - keys, least) : 0) - exponent_q : 0;
        }
    }
};

// Returns the further exponent of a row of q, at most 0: it lowers a row whose scores may exceed 2^max_score_exponent (log2 units)
// to 2^lowered_score_exponent (26 forward, 19 backward), and elements beyond 2^kMaxScaled to below. `largest`: of the row's |q|.
// `most`: at least its largest |q . k|, with the largest |k| below 1. Both are times 2^shift. `lse`: the row's softmax_lse in
// backward, else 0, also where it is not finite.
__device__ __forceinline__ int row_exponent(const CastParams& p, const Exponents& exponents, int shift, float largest, float most,
                                            float lse) {
    if (largest == 0.f) return 0;
    // lse (natural logarithm) is the largest score plus at most ln(seqlen_k), so |lse| stands for its size, whatever its sign; much
    // lower scores have probability 0. Without lse, |score| is at most `most` times the softmax scale in log2 units
    // (p.scale_log2_exponent: its exponent).
    const int score_exponent =
        lse != 0.f ? exponent_of(__float_as_uint(fabsf(lse * kLog2e)))
                   : exponent_of(__float_as_uint(most)) - shift + exponents.q + exponents.keys + p.scale_log2_exponent;
    const int excess = score_exponent > p.max_score_exponent ? score_exponent - p.lowered_score_exponent : 0;
    return -max(max(excess, exponent_of(__float_as_uint(largest)) - shift + exponents.q - kMaxScaled), 0);
}

// Rows of one head of one tensor and one sequence. `slot`: number of the head among those of q, then k, then v. first_entry: number
// of the launch's first batch entry. SeqlenInfo<true> takes lengths from GPU memory where the call has them there.
struct Head {
    const unsigned char* from;
    unsigned short* to;
    long long from_stride, to_stride;  // of rows; of `from` in bytes
    bool is_fp32;
    int rows, columns;
    int low_column;  // 0: no low parts
    int kv_head, group;
    Tensor tensor;

    __device__ __forceinline__ Head(const CastParams& p, const SeqlenInfo<true>& sequence, int slot, int batch) {
        const int nheads = p.problem.nheads, nheads_k = p.problem.nheads_k;
        tensor = slot < nheads ? kQ : slot < nheads + nheads_k ? kK : kV;
        const int head = tensor == kQ ? slot : (slot - nheads) % nheads_k;
        kv_head = tensor == kQ ? slot / (nheads / nheads_k) : head;
        group = (p.lengths.cu_seqlens_q ? 0 : p.first_entry + batch) * nheads_k + kv_head;
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
    // Loads one element as fp32, in fewer registers.
    __device__ __forceinline__ float element(int row, int column) const {
        const unsigned char* at = from + row * from_stride;
        if (is_fp32) return __ldg(reinterpret_cast<const float*>(at) + column);
        return __uint_as_float(static_cast<unsigned>(__ldg(reinterpret_cast<const unsigned short*>(at) + column)) << 16);
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

// Phase kTakeLargest.
__device__ __forceinline__ void cast_as_is(const CastParams& p, const Head& head) {
    const int exponent = head.tensor == kQ ? p.scale_exponent : 0;
    unsigned largest = 0, inverse_smallest = 0;
    for (int first = blockIdx.x * BLOCK_ROWS; first < head.rows; first += gridDim.x * BLOCK_ROWS) {
        const int end = min(first + BLOCK_ROWS, head.rows);
#pragma unroll 2
        for (int row = first + threadIdx.x / kLanes; row < end; row += kRowsAtOnce) {
            unsigned row_largest = 0;
            for (int column = threadIdx.x % kLanes * kColumns; column < head.columns; column += kLanes * kColumns) {
                float x[kColumns];
                head.load(row, column, x);
#pragma unroll
                for (int i = 0; i < kColumns; i++) {
                    row_largest = larger_of(row_largest, x[i]);
                    x[i] = scaled(x[i], exponent);
                }
                if (head.tensor != kV && !p.low_column) head.store(row, column, x);
            }
            largest = max(largest, row_largest);
            if (row_largest) inverse_smallest = max(inverse_smallest, ~row_largest);
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

// Phase kLeaveOutHidden. Rows that are not outlying count without a look at the masks.
__device__ __forceinline__ void leave_out_hidden(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence,
                                                 int batch) {
    if (head.tensor == kQ) return;
    const unsigned largest = p.largest[(kLargest + head.tensor) * p.groups + head.group];
    const unsigned smallest = ~p.largest[(kSmallest + head.tensor - kK) * p.groups + head.group];
    if (!largest || exponent_of(largest) - exponent_of(smallest) <= kSpread) return;
    const unsigned limit = smallest + (static_cast<unsigned>(kSpread) << 23);  // times 2^kSpread
    const int heads_of_group = p.problem.nheads / p.problem.nheads_k, first_head = head.kv_head * heads_of_group;
    const VisibleKeys visible(p, sequence, batch, first_head, first_head + heads_of_group);
    unsigned found = 0;
    for (int first = blockIdx.x * kRowsAtOnce; first < head.rows; first += gridDim.x * kRowsAtOnce) {
        const int row = first + threadIdx.x / kLanes;
        unsigned row_largest = 0;
        for (int column = threadIdx.x % kLanes * kColumns; row < head.rows && column < head.columns; column += kLanes * kColumns) {
            float x[kColumns];
            head.load(row, column, x);
#pragma unroll
            for (int i = 0; i < kColumns; i++) row_largest = larger_of(row_largest, x[i]);
        }
#pragma unroll
        for (int i = 1; i < kLanes; i *= 2) row_largest = max(row_largest, __shfl_xor_sync(~0u, row_largest, i));
        const bool is_outlying = row_largest > limit;  // other rows count anyway: contains() skips them, and their lanes only vote
        if (visible.contains(row, is_outlying) || !is_outlying) found = max(found, row_largest);
    }
#pragma unroll
    for (int i = kLanes; i < 32; i *= 2) found = max(found, __shfl_xor_sync(~0u, found, i));
    if (threadIdx.x % 32 == 0 && found) atomicMax(p.largest + (kLargestVisible + head.tensor - kK) * p.groups + head.group, found);
}

__device__ __forceinline__ int tensor_exponent(const CastParams& p, const Head& head, const Exponents& exponents) {
    return head.tensor == kQ ? exponents.q : head.tensor == kK ? exponents.k : value_exponent(p, head.group);
}

// Returns the largest |q . k| of a row of q and all keys of its KV head in this sequence, with q times 2^shift and k times
// 2^key_shift, which brings the largest |k| below 1; elements beyond it are of hidden keys, and count as 1. Only for rows whose
// scores could be too large: it reads all keys. A row's eight lanes call it together, with all lanes of their warp.
__device__ __forceinline__ float largest_product(const Head& head, const Head& keys, int row, int shift, int key_shift) {
    const auto number = [](float x, int by) {
        return is_finite(__float_as_uint(x) & 0x7fffffffu) ? fminf(fmaxf(times_power(x, by), -1.f), 1.f) : 0.f;
    };
    float most = 0.f;
#pragma unroll 1
    for (int key = 0; key < keys.rows; key++) {
        float product = 0.f;
#pragma unroll 1
        for (int column = threadIdx.x % kLanes; column < head.columns; column += kLanes)
            product = fmaf(number(head.element(row, column), shift), number(keys.element(key, column), key_shift), product);
#pragma unroll
        for (int i = 1; i < kLanes; i *= 2) product += __shfl_xor_sync(~0u, product, i);
        most = fmaxf(most, fabsf(product));
    }
    return most;
}

// Calls f(row, exponent of the group, further exponent of the row) for each row of a head, in the row's eight lanes. Lanes of
// missing rows only take part in shuffles. `lse_row`: index of the head's first row in softmax_lse.
template <class F>
__device__ __forceinline__ void each_row(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence, int batch,
                                         const Exponents& exponents, long long lse_row, F f) {
    const int group_exponent = tensor_exponent(p, head, exponents);
    const int shift = -exponent_of(p.largest[head.group]);  // brings the group's largest |q| below 1, so that sums stay finite
    for (int first = blockIdx.x * kRowsAtOnce; first < head.rows; first += gridDim.x * kRowsAtOnce) {
        const int row = first + threadIdx.x / kLanes;
        const bool exists = row < head.rows;
        int further = 0;
        if (head.tensor == kQ) {
            float largest = 0.f, sum = 0.f, lse = 0.f;
            if (p.phase == kCastScaled && p.softmax_lse && exists) lse = p.softmax_lse[lse_row + row];
            if (!is_finite(__float_as_uint(lse) & 0x7fffffffu)) lse = 0.f;
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
#pragma unroll
            for (int i = 1; i < kLanes; i *= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
                sum += __shfl_xor_sync(~0u, sum, i);
            }
            further = row_exponent(p, exponents, shift, largest, sum, lse);
            // Without lse the sum is a coarse bound: large |q| and |k| may be in different columns.
            if (__any_sync(~0u, further < 0 && lse == 0.f)) {
                const Head keys(p, sequence, p.problem.nheads + head.kv_head, batch);
                const float most =
                    largest_product(head, keys, min(row, head.rows - 1), shift, -exponent_of(largest_of(p, kK, head.group)));
                further = row_exponent(p, exponents, shift, largest, fminf(sum, most), lse);
            }
        }
        if (exists) f(row, group_exponent, further);
    }
}

// Phases kCastScaled and kCastForGradients.
__device__ __forceinline__ void cast_scaled(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence, int slot,
                                            int batch) {
    const Exponents exponents(p, head.group);
    // the host scales out and gradients back by these
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        p.exponents[head.tensor * p.groups + head.group] = tensor_exponent(p, head, exponents);
    }
    if (head.tensor != kV && !exponents.has_moved && !p.low_column) return;  // cast_as_is() has cast it
    const long long lse_row = sequence.lse_row(batch, slot);
    each_row(p, head, sequence, batch, exponents, lse_row, [&](int row, int group_exponent, int further) {
        for (int column = threadIdx.x % kLanes * kColumns; column < head.columns; column += kLanes * kColumns) {
            float x[kColumns];
            head.load(row, column, x);
#pragma unroll
            for (int i = 0; i < kColumns; i++) x[i] = scaled(x[i], group_exponent + further);
            head.store(row, column, x);
        }
        // the backward pass reads softmax_lse of the scores after the cast
        if (head.tensor == kQ && p.softmax_lse && further != 0 && threadIdx.x % kLanes == 0) {
            float& lse = p.softmax_lse[lse_row + row];
            lse = times_power(lse, further);
        }
    });
}

// Phase kRestoreLse: undoes the rows' further exponents in softmax_lse, which the forward kernel computed.
__device__ __forceinline__ void restore_lse(const CastParams& p, const Head& head, const SeqlenInfo<true>& sequence, int slot,
                                            int batch) {
    const Exponents exponents(p, head.group);
    if (!exponents.has_moved || head.tensor != kQ) return;
    const long long lse_row = sequence.lse_row(batch, slot);
    each_row(p, head, sequence, batch, exponents, lse_row, [&](int row, int, int further) {
        if (further == 0 || threadIdx.x % kLanes) return;
        float& lse = p.softmax_lse[lse_row + row];
        lse = times_power(lse, -further);
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
        else if (p.phase == kCastScaled || p.phase == kCastForGradients)
            cast_scaled(p, head, sequence, slot, batch);
        else
            restore_lse(p, head, sequence, slot, batch);
    }
};

}  // namespace cast
