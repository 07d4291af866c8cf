// Converts a quantized KV cache to contiguous fp16 or bf16 rows, for forward kernels (prefill with many query rows), which read no
// quantized cache. Converts only tokens that some query sees. src/ops/kvcache/kernels.rs launches it.
//
// Bound by memory. Grid: blocks of BLOCK_ROWS tokens, KV heads, batch entries. A unit is eight columns of a token's row of K or V:
// 16 bytes of output, which a thread converts at a time. Computed in fp32 and rounded once, bitwise identical to
// python/volta_fa/kv_cache/formats.py.
// The kernel's row in src/kernels gives BLOCK_ROWS, THREADS (of a block), and STEP, the most keys of a forward kernel's step.
#pragma once

#include "cache.cuh"  // CacheSeqlenInfo: lengths and offsets of a sequence; page_of(), has_page()
#include "half.cuh"  // pack2(): two fp32 to fp16 or bf16
#include "quantized.cuh"  // bytes_of_page(), scale_of_page(): addresses; CacheFormatInfo: facts of a format
#include "volta_fa_params.h"  // generated from src/params: DequantizeParams; Output, strides in elements

namespace dequantize {

constexpr int kColumns = 8;  // of a unit

// Loads the codes of eight columns, Bytes bytes from p on, in column order from the lowest bits; 0 past `left` bytes.
template <int Bytes>
__device__ __forceinline__ uint2 load(const unsigned char* p, int left) {
    uint2 x = make_uint2(0, 0);
    if (left >= Bytes && reinterpret_cast<size_t>(p) % Bytes == 0) {
        if constexpr (Bytes == 8) return *reinterpret_cast<const uint2*>(p);
        x.x = *reinterpret_cast<const unsigned*>(p);
        return x;
    }
#pragma unroll
    for (int i = 0; i < Bytes; i++)
        if (i < left) (i < 4 ? x.x : x.y) |= static_cast<unsigned>(p[i]) << i % 4 * 8;
    return x;
}

// Stores eight columns, or the `left` that exist.
__device__ __forceinline__ void store(unsigned short* p, const uint4& x, int left) {
    if (left >= kColumns && reinterpret_cast<size_t>(p) % sizeof(uint4) == 0) {
        *reinterpret_cast<uint4*>(p) = x;
        return;
    }
    const unsigned words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < kColumns; i++)
        if (i < left) p[i] = static_cast<unsigned short>(words[i / 2] >> i % 2 * 16);
}

// Converts eight of the `columns` columns of row `row` of page `page` of K or V, from `column` on: (code - zero point) * scale.
// fp8 has a scale for each sequence and head, others for each row. ::Element decodes the codes of a format (quantized.cuh); the
// template parameter Element is the output's type.
template <CacheFormat Format, ElementType Element>
__device__ __forceinline__ uint4 dequantize8(const DequantizeParams& p, bool is_v, int batch, int head, int page, int row,
                                             int column, int columns) {
    using Info = CacheFormatInfo<Format>;
    constexpr int kBits = Info::kBits, kBytes = kColumns * kBits / 8;
    const CacheScale& scales = is_v ? p.scales.v : p.scales.k;
    const float scale = Info::kTokenScales ? *scale_of_page(scales, page, row, head) : scale_of_sequence(scales, batch, head);
    const float zero =
        Info::kZeroPoints ? *scale_of_page(is_v ? p.scales.v_zero_point : p.scales.k_zero_point, page, row, head) : 0.f;
    const unsigned char* bytes = bytes_of_page(is_v ? p.cache.v : p.cache.k, page, row, head);
    const uint2 codes = load<kBytes>(bytes + column * kBits / 8, (columns - column) * kBits / 8);
    float x[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        const unsigned word = i * kBits < 32 ? codes.x : codes.y;
        x[i] = ::Element<Format>::value(word >> i * kBits % 32 & ((1u << kBits) - 1));
        if constexpr (Info::kZeroPoints) x[i] = __fsub_rn(x[i], zero);
        x[i] = __fmul_rn(x[i], scale);
    }
    const auto pair = [&](int i) { return pack2(x[2 * i], x[2 * i + 1], Element == ElementType::Bf16); };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
}

// Runs the kernel for one format and output type. Lengths and pages are unvalidated: missing pages give zeros, bad lengths no rows.
template <CacheFormat Format, ElementType Element>
__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
    const Problem& problem = p.problem;
    const int head = blockIdx.y, batch = blockIdx.z, first = blockIdx.x * BLOCK_ROWS;
    const CacheSeqlenInfo sequence(problem, p.lengths, p.cache, batch);
    const int seqlen_q = sequence.seqlen_q(), end = min(sequence.seqlen_k(), problem.seqlen_k);
    // `seen`: first token that some query sees (without a window window_left is the sum of the lengths, see src/params/shared.rs).
    // STEP tokens before it become zeros: forward kernels may load and mask them.
    const int seen = seqlen_q > 0 ? min(max(end - seqlen_q - problem.window_left, 0), end) : end;
    // The cast kernel scans bf16 output for its largest magnitude (cast.cuh), so all of it is written.
    const int begin = max(first, Element == ElementType::Bf16 ? 0 : seen - STEP);
    // Writes the sequence's length for the attention kernel; -1, which makes its output NaN, if lengths or pages are invalid.
    if (p.seqlens_k_out && first == 0 && head == 0) {
        bool complete = sequence.valid();
        if (p.cache.block_table)
            for (int i = seen / p.cache.rows + threadIdx.x; i * p.cache.rows < end; i += THREADS)
                complete &= has_page(p.cache, page_of(p.cache, batch, i));
        complete = __syncthreads_and(complete);
        if (threadIdx.x == 0) p.seqlens_k_out[batch] = complete ? end : -1;
    }
    const int units_k = (problem.headdim + kColumns - 1) / kColumns, units_v = (problem.headdim_v + kColumns - 1) / kColumns;
    const int units = units_k + units_v, rows = min(first + BLOCK_ROWS, end) - begin;
    for (int i = threadIdx.x; i < rows * units; i += THREADS) {
        const int row = begin + i / units, unit = i % units;
        const bool is_v = unit >= units_k;
        const int column = (is_v ? unit - units_k : unit) * kColumns, columns = is_v ? problem.headdim_v : problem.headdim;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row >= seen) {
            const int position = sequence.k_offset() + row, index = position / p.cache.rows;  // k_offset: 0 if paged
            const int page = page_of(p.cache, batch, index);
            if (has_page(p.cache, page))
                x = dequantize8<Format, Element>(p, is_v, batch, head, page, position - index * p.cache.rows, column, columns);
        }
        const Output& to = is_v ? p.v : p.k;
        store(to.ptr + batch * to.batch_stride + row * to.row_stride + head * to.head_stride + column, x, columns - column);
    }
}

template <CacheFormat Format>
__device__ __forceinline__ void dequantize(const DequantizeParams& p) {
    if (p.element == ElementType::Bf16)
        dequantize<Format, ElementType::Bf16>(p);
    else
        dequantize<Format, ElementType::Half>(p);
}

struct Kernel {
    __device__ __forceinline__ static void run(const DequantizeParams& p) {
        switch (p.scales.format) {  // QUANTIZED_FORMATS: generated from src/kernels/formats.rs
#define CASE(format)          \
    case CacheFormat::format: \
        return dequantize<CacheFormat::format>(p);
            QUANTIZED_FORMATS(CASE)
#undef CASE
            case CacheFormat::Unquantized:
                return;
        }
    }
};

}  // namespace dequantize
