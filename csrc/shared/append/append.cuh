// Appends new K and V to a KV cache, with optional rotary embedding and quantization, and writes a rotated copy of Q (p.rotated_q).
// src/ops/kvcache/kernels.rs launches it before the attention over the cache.
//
// Grid: blocks of BLOCK_ROWS new tokens, KV heads, batch entries. A block has these tokens of K, of V and of the KV head's query
// heads. Bound by memory, and in decoding by latency, so each token's work is spread over threads: a unit is two columns (one
// 32-bit word) of a row, and a thread takes one unit per iteration. In a quantized cache a warp takes a whole row of K or V
// instead, because int8 and int4 rows need a scale from all of their columns. `row` is a token's number among the new ones; its
// `position` is its row in the sequence's pages (index: which of these pages; a dense cache has one, its entry).
// The kernel's row in src/kernels gives BLOCK_ROWS (tokens of a block), THREADS (of a block), KEY_FORMAT and VALUE_FORMAT.
#pragma once

#include "shared/append/quantize.cuh"  // RowScale: scale, zero point and codes of a row
#include "cache.cuh"  // CacheSeqlenInfo: lengths and offsets of a sequence; page_of(), has_page(), row_of_page()
#include "half.cuh"  // pack2(), unpack2(): pairs of fp16 or bf16
#include "volta_fa_params.h"  // generated from src/params: AppendParams; strides count elements, of quantized caches bytes

namespace append {

// Formats of keys and of values (int8 and int4 in one cache). One kernel for all formats would not fit the instruction cache.
constexpr CacheFormat kKeyFormat = CacheFormat::KEY_FORMAT, kValueFormat = CacheFormat::VALUE_FORMAT;
constexpr bool kQuantizes = kKeyFormat != CacheFormat::Unquantized;
constexpr bool kTokenScales = CacheFormatInfo<kKeyFormat>::kTokenScales;  // each row has a scale (int8, int4); fp8: the caller's
static_assert(kTokenScales == CacheFormatInfo<kValueFormat>::kTokenScales, "a warp takes rows of K and V in the same way");

constexpr int kUnitColumns = 2;  // columns of a unit

// is_word: whether the unit at p is an aligned word whose two columns exist. Else load and store access single columns. `left`:
// columns that exist from p on, at least one.
__device__ __forceinline__ bool is_word(const unsigned short* p, int left) {
    return left >= kUnitColumns && reinterpret_cast<size_t>(p) % sizeof(unsigned) == 0;
}
__device__ __forceinline__ unsigned load(const unsigned short* p, int left) {
    if (is_word(p, left)) return *reinterpret_cast<const unsigned*>(p);
    return p[0] | (left > 1 ? static_cast<unsigned>(p[1]) << 16 : 0);
}
__device__ __forceinline__ void store(unsigned short* p, unsigned x, int left) {
    if (is_word(p, left)) {
        *reinterpret_cast<unsigned*>(p) = x;
    } else {
        p[0] = static_cast<unsigned short>(x);
        if (left > 1) p[1] = static_cast<unsigned short>(x >> 16);
    }
}

template <ElementType Element>
__device__ __forceinline__ float2 to_floats(unsigned unit) {
    return unpack2(unit, Element == ElementType::Bf16);
}
template <ElementType Element>
__device__ __forceinline__ unsigned from_floats(float lo, float hi) {
    return pack2(lo, hi, Element == ElementType::Bf16);
}

// Element i of a row of cos or sin, as fp32.
__device__ __forceinline__ float table_value(const void* row, ElementType element, int i) {
    if (element == ElementType::Float) return static_cast<const float*>(row)[i];
    const unsigned x = static_cast<const unsigned short*>(row)[i];
    return unpack2(x, element == ElementType::Bf16).x;
}

// Rotary embedding: columns a, b of a pair become a cos - b sin, b cos + a sin. Tables: (rotary_rows, rotary_dim / 2).
class Rotation {
    const AppendParams& p_;
    const char *cos_, *sin_;
    bool exists_;

public:
    __device__ __forceinline__ Rotation(const AppendParams& p, int position)
        : p_(p), cos_(row(p.rotary_cos, p.rotary_cos_stride, position)), sin_(row(p.rotary_sin, p.rotary_sin_stride, position)),
          exists_(position < p.rotary_rows) {}

    // Returns columns `column` and column + 1, rotated. x: both as they were. `row`: address of column 0. Computed in fp32, rounded
    // once to the element type. rotary_dim and `column` are even. Positions past the cos and sin tables give NaN (0x7fc00000).
    template <ElementType Element>
    __device__ __forceinline__ unsigned apply(unsigned x, const unsigned short* row, int column) const {
        if (column >= p_.rotary_dim) return x;
        const int half = p_.rotary_dim / 2;
        // The pair's other column. Interleaved (GPT-J), pairs are neighbors: byte selector 0x1032 swaps the halves of x. Else
        // (GPT-NeoX) a pair is one column of each half of rotary_dim.
        const auto partner = [&](int c) { return c < half ? c + half : c - half; };
        const unsigned other = p_.rotary_interleaved ? __byte_perm(x, 0, 0x1032)
                                                     : row[partner(column)] | static_cast<unsigned>(row[partner(column + 1)]) << 16;
        const float2 own = to_floats<Element>(x), partners = to_floats<Element>(other);
        float rotated[kUnitColumns];
#pragma unroll
        for (int i = 0; i < kUnitColumns; i++) {
            const int c = column + i;
            const bool first = p_.rotary_interleaved ? i == 0 : c < half;
            const int angle = p_.rotary_interleaved ? c / 2 : c < half ? c : c - half;  // column of the tables
            const float cos = exists_ ? table_value(cos_, p_.rotary_element, angle) : __int_as_float(0x7fc00000);
            const float sin = exists_ ? table_value(sin_, p_.rotary_element, angle) : __int_as_float(0x7fc00000);
            // Each product and their sum are rounded to fp32, as in PyTorch: no fma.
            const float product = __fmul_rn(i == 0 ? partners.x : partners.y, sin);
            rotated[i] = __fadd_rn(__fmul_rn(i == 0 ? own.x : own.y, cos), first ? -product : product);
        }
        return from_floats<Element>(rotated[0], rotated[1]);
    }

private:
    __device__ __forceinline__ const char* row(const void* table, long long stride, int position) const {
        const int bytes = p_.rotary_element == ElementType::Float ? 4 : 2;
        return static_cast<const char*>(table) + position * stride * bytes;
    }
};

// Address of a row of one head of one batch entry.
__device__ __forceinline__ const unsigned short* row_of(const Operand& x, int batch, int head, long long row) {
    return x.ptr + batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
}

// Reduces `low` and `high` to the minimum and maximum over a warp. (x != x is true for NaN: one in any lane gives NaN.)
__device__ __forceinline__ void bounds_of_warp(float& low, float& high) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other_low = __shfl_xor_sync(~0u, low, distance), other_high = __shfl_xor_sync(~0u, high, distance);
        low = other_low != other_low || other_low < low ? other_low : low;
        high = other_high != other_high || other_high > high ? other_high : high;
    }
}

// Units that a lane holds: a warp's 8 * 32 cover the 512 columns that may share a scale. Else a warp takes 256 columns at a time.
constexpr int kUnitsPerLane = kTokenScales ? 8 : 4;
// Writes 64 * kUnitsPerLane columns of row `row` of page `page`, from `first` of `columns` on, and the row's scale. x[i] has
// columns first + 2 * (lane + 32 * i) and the next, packed, because fp32 would take too many registers. Called by a whole warp.
template <CacheFormat Format, ElementType Element>
__device__ __forceinline__ void write_row(const CacheScale& scales, const CacheScale& zero_points, const Operand& to, int batch,
                                          int head, int page, int row, int first, int columns, const unsigned (&x)[kUnitsPerLane]) {
    using Info = CacheFormatInfo<Format>;
    const int lane = threadIdx.x & 31;
    unsigned char* data = bytes_of_page(to, page, row, head);
    RowScale quant = {};
    if constexpr (Info::kTokenScales) {
        float low = __int_as_float(0x7f800000), high = __int_as_float(0xff800000);  // infinity, -infinity
#pragma unroll
        for (int i = 0; i < kUnitsPerLane; i++) {
            const int column = first + kUnitColumns * (lane + 32 * i);
            const float2 numbers = to_floats<Element>(x[i]);
            const float values[kUnitColumns] = {numbers.x, numbers.y};
#pragma unroll
            for (int c = 0; c < kUnitColumns; c++)
                if (column + c < columns) {
                    low = values[c] != values[c] || values[c] < low ? values[c] : low;
                    high = values[c] != values[c] || values[c] > high ? values[c] : high;
                }
        }
        bounds_of_warp(low, high);
        quant = RowScale::of<Format>(low, high);
        if (lane == 0) {
            const float nan = __int_as_float(0x7fc00000);
            *scale_of_page(scales, page, row, head) = quant.finite ? quant.scale : nan;
            if constexpr (Info::kZeroPoints) *scale_of_page(zero_points, page, row, head) = quant.finite ? quant.zero_point : nan;
        }
    } else {
        quant.scale = scale_of_sequence(scales, batch, head);
    }
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; i++) {
        const int column = first + kUnitColumns * (lane + 32 * i);
        if (column >= columns) continue;
        const float2 numbers = to_floats<Element>(x[i]);
        const int codes[kUnitColumns] = {quant.code<Format>(numbers.x), quant.code<Format>(numbers.y)};
        if constexpr (Info::kColumns == 2) {  // columns of a byte: int4
            data[column / 2] = static_cast<unsigned char>(codes[0] | codes[1] << 4);
        } else {
            data[column] = static_cast<unsigned char>(codes[0]);
            if (column + 1 < columns) data[column + 1] = static_cast<unsigned char>(codes[1]);
        }
    }
}

// Appends the block's rows of K and V to a quantized cache: new tokens `first` to first + new_rows - 1, one row per warp at a time.
template <ElementType Element>
__device__ __forceinline__ void append_quantized(const AppendParams& p, const CacheSeqlenInfo& sequence, int head_k, int batch,
                                                 int first, int new_rows) {
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x / 32; i < 2 * new_rows; i += THREADS / 32) {  // i even: K, odd: V, of row i / 2
        const int row = first + i / 2, position = sequence.k_offset() + sequence.seqlen_k_cache() + row;
        const int index = position / p.cache.rows, page = page_of(p.cache, batch, index);
        if (!has_page(p.cache, page)) continue;
        const bool is_v = i % 2;
        const Operand &from = is_v ? p.v : p.k, &to = is_v ? p.cache.v : p.cache.k;
        const int columns = is_v ? p.problem.headdim_v : p.problem.headdim;
        const unsigned short* source = row_of(from, batch, head_k, sequence.knew_offset() + row);
        const CacheScale &scale = is_v ? p.scales.v : p.scales.k, &zero = is_v ? p.scales.v_zero_point : p.scales.k_zero_point;
        const int page_row = position - index * p.cache.rows;
#pragma unroll 1
        for (int first_column = 0; first_column < (kTokenScales ? 1 : columns); first_column += 64 * kUnitsPerLane) {
            unsigned x[kUnitsPerLane] = {};
#pragma unroll
            for (int unit = 0; unit < kUnitsPerLane; unit++) {
                const int column = first_column + kUnitColumns * (lane + 32 * unit);
                if (column >= columns) continue;
                unsigned word = load(source + column, columns - column);
                if (!is_v) word = Rotation(p, position).apply<Element>(word, source, column);
                x[unit] = word;
            }
            if (kKeyFormat == kValueFormat || !is_v)
                write_row<kKeyFormat, Element>(scale, zero, to, batch, head_k, page, page_row, first_column, columns, x);
            else
                write_row<kValueFormat, Element>(scale, zero, to, batch, head_k, page, page_row, first_column, columns, x);
        }
    }
}

template <ElementType Element>
__device__ __forceinline__ void append(const AppendParams& p) {
    const Problem& problem = p.problem;
    const int head_k = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * BLOCK_ROWS;
    const CacheSeqlenInfo sequence(problem, p.lengths, p.cache, batch);
    const int group = p.rotary_dim > 0 ? problem.nheads / problem.nheads_k : 0;  // query heads of the KV head that are rotated
    const int seqlen_knew = sequence.valid() ? sequence.seqlen_knew() : 0;
    const int rows = min(max(seqlen_knew, group > 0 ? sequence.seqlen_q() : 0) - first, BLOCK_ROWS);
    // Units of a token: those of K, then of V, then of each query head. Past seqlen_knew a row has only Q; past seqlen_q, K and V.
    // Of a quantized cache, append_quantized() takes those of K and V.
    const int units_k = (problem.headdim + kUnitColumns - 1) / kUnitColumns,
              units_v = (problem.headdim_v + kUnitColumns - 1) / kUnitColumns;
    const int units = units_k + units_v + group * units_k;
    if constexpr (kQuantizes) append_quantized<Element>(p, sequence, head_k, batch, first, min(seqlen_knew - first, BLOCK_ROWS));
    for (int i = threadIdx.x; i < rows * units; i += THREADS) {
        const int row = first + i / units, unit = i % units;
        const int position = sequence.k_offset() + sequence.seqlen_k_cache() + row;
        if (unit < units_k + units_v) {
            if (kQuantizes || row >= seqlen_knew) continue;
            const int index = position / p.cache.rows, page = page_of(p.cache, batch, index);
            if (!has_page(p.cache, page)) continue;
            const bool is_v = unit >= units_k;
            const Operand &from = is_v ? p.v : p.k, &to = is_v ? p.cache.v : p.cache.k;
            const int column = (is_v ? unit - units_k : unit) * kUnitColumns, columns = is_v ? problem.headdim_v : problem.headdim;
            const unsigned short* source = row_of(from, batch, head_k, sequence.knew_offset() + row);
            unsigned x = load(source + column, columns - column);
            if (!is_v) x = Rotation(p, position).apply<Element>(x, source, column);
            const unsigned short* place = row_of_page(to, page, position - index * p.cache.rows) + head_k * to.head_stride;
            store(const_cast<unsigned short*>(place) + column, x, columns - column);
        } else if (row < sequence.seqlen_q()) {
            const int unit_of_q = unit - units_k - units_v, head = head_k * group + unit_of_q / units_k;
            const int column = unit_of_q % units_k * kUnitColumns;
            const unsigned short* source = row_of(p.q, batch, head, sequence.q_offset() + row);
            const int q_position = p.queries_have_positions ? position : position - row;
            // queries_have_positions: query i is at new token i's position, else all at the first's (without a mask, as in
            // flash-attn). Position rotary_rows is past the tables: queries of an invalid sequence become NaN
            const unsigned x = Rotation(p, sequence.valid() ? q_position : p.rotary_rows)
                                   .apply<Element>(load(source + column, problem.headdim - column), source, column);
            const Output& to = p.rotated_q;
            unsigned short* place =
                to.ptr + batch * to.batch_stride + head * to.head_stride + (sequence.q_offset() + row) * to.row_stride;
            store(place + column, x, problem.headdim - column);
        }
    }
}

struct Kernel {
    __device__ __forceinline__ static void run(const AppendParams& p) {
        if (p.element == ElementType::Bf16)
            append<ElementType::Bf16>(p);
        else
            append<ElementType::Half>(p);
    }
};

}  // namespace append
