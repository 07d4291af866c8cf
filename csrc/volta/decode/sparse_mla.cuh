// Sparse MLA: each query attends to tokens that it chose, of one cache of latents or of two (DeepSeek V3.2 and V4). The main loop
// is that of volta/decode/mla.cuh. A query is a sequence of its own, whose tokens are the entries of its list
// (shared/select/select.cuh). src/ops/sparse.rs launches it.
//
// A row of a cache becomes fp16 in shared memory, as a number of at most 2^16 times a scale of the token, a power of two. So
// any magnitude fits. Formats, by CACHE_FORMAT and HEADDIM:
//
//   E4m3, 576         512 e4m3 codes, four fp32 scales of 128 codes each, 64 numbers of 16 bits
//   E4m3, 512         448 e4m3 codes and 64 numbers of 16 bits; after all rows of the page, eight bytes for each: the exponents
//                     (E8M0) of seven scales of 64 codes, and a byte of padding
//   Unquantized       HEADDIM numbers of the type of the queries
#pragma once

#include "volta/decode/mla.cuh"

namespace volta {

__device__ __forceinline__ const SparseMlaParams& sparse_params(const DecodeParams& p) {
    return reinterpret_cast<const SparseMlaParams&>(p);  // its first member
}

__device__ __forceinline__ unsigned half2_fma(unsigned a, unsigned b, unsigned c) {
    unsigned r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// A factor of fp16 pairs, as the sum of two fp16 numbers: products are rounded once.
struct HalfFactor {
    unsigned high, low;

    __device__ __forceinline__ explicit HalfFactor(float x)
        : high(to_half2(x, x)), low(to_half2(x - to_float2(high).x, x - to_float2(high).x)) {}
    __device__ __forceinline__ unsigned times(unsigned pair) const { return half2_fma(pair, high, half2_mul(pair, low)); }
    __device__ __forceinline__ uint4 times(const uint4& x) const {
        return make_uint4(times(x.x), times(x.y), times(x.z), times(x.w));
    }
};

// The biased exponent of a magnitude: |x| < 2^(biased - 126).
__device__ __forceinline__ int biased_exponent(float x) { return static_cast<int>(__float_as_uint(x) >> 23 & 0xff); }
// The power of two with this biased exponent, 1 to 254.
__device__ __forceinline__ float power(int biased) { return __uint_as_float(static_cast<unsigned>(biased) << 23); }

// Loads steps of 16 chosen tokens. Each token has neighboring threads of a warp.
template <class Mainloop>
class SparseLoader {
    using M = Mainloop;
    static constexpr bool kFp8 = decode::kFormat == CacheFormat::E4m3, kPageScales = kFp8 && HEADDIM == HEADDIM_V;
    static_assert(kFp8 || decode::kFormat == CacheFormat::Unquantized, "the formats of sparse MLA");
    static constexpr int kThreads = M::kTokenThreads, kTokens = M::kTokens;
    // Columns before the last 64, which are 16-bit numbers in every format, and a chunk of 16 bytes of them.
    static constexpr int kTail = 64, kColumns = HEADDIM - kTail, kChunkColumns = kFp8 ? 16 : 8;
    static constexpr int kChunks = kColumns / kChunkColumns, kLoads = (kChunks + kThreads - 1) / kThreads;
    static constexpr int kTailWords = kTail / 2 / kThreads;
    // fp8: codes of a scale, and the words of a row's scales.
    static constexpr int kTileColumns = kPageScales ? 64 : 128, kTileChunks = kTileColumns / 16, kTiles = kColumns / kTileColumns,
                         kScaleWords = kPageScales ? 2 : 4;

public:
    // Unquantized fp16 needs no scale.
    static constexpr bool kTokenScales = kFp8 || decode::kBf16;

private:
    int tail_is_bf16_;  // fp8: type of the tail, else it is fp16
    const int* list_;  // of this query, from the first token of the step after the next on
    int chosen_;  // of the token of the step that is loaded next
    unsigned words_[kLoads][4], tail_[kTailWords], scales_[kFp8 ? kScaleWords : 1];

    __device__ __forceinline__ static int token() { return threadIdx.x / kThreads; }
    __device__ __forceinline__ static int chunk() { return threadIdx.x % kThreads; }

    // Address of a chosen token's row, and of its scales.
    struct Row {
        const unsigned char *data, *scales;

        __device__ __forceinline__ Row(const SparseMlaParams& p, int chosen) {
            const bool is_extra = chosen < 0;
            const unsigned number = static_cast<unsigned>(is_extra ? ~chosen : chosen);
            const unsigned page_size = is_extra ? p.extra.page_size : p.own.page_size;
            const unsigned page = number / page_size, row = number - page * page_size;
            const unsigned char* base = reinterpret_cast<const unsigned char*>(is_extra ? p.extra.rows : p.own.rows);
            base += page * (is_extra ? p.extra.page_stride : p.own.page_stride);
            data = base + row * (is_extra ? p.extra.row_stride : p.own.row_stride);
            scales = kPageScales ? base + page_size * static_cast<long long>(kColumns + 2 * kTail) + 8 * row : data + kColumns;
        }
    };

public:
    __device__ __forceinline__ SparseLoader(const DecodeParams& p, const decode::WorkTile& s, int first)
        : list_(sparse_params(p).lists + s.batch * sparse_params(p).list_stride + first + token()), chosen_(0),
          tail_is_bf16_(sparse_params(p).tail_is_bf16) {
        load_int_if(first + token() < s.seqlen_k, chosen_, list_);
    }
    __device__ __forceinline__ bool page_valid() const { return true; }
    __device__ __forceinline__ void advance(const DecodeParams&, const decode::WorkTile&) { list_ += kTokens; }
    // Loads the step that begins at token `first`, and the entries of the step after it; zeros for tokens that do not exist.
    __device__ __forceinline__ void load(const DecodeParams& p, int first, int end) {
        const int exists = first + token() < end;
        if (first + kTokens > end) {
#pragma unroll
            for (auto& x : words_) x[0] = x[1] = x[2] = x[3] = 0;
#pragma unroll
            for (unsigned& x : tail_) x = 0;
#pragma unroll
            for (unsigned& x : scales_) x = 0;
        }
        const Row row(sparse_params(p), chosen_);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int at = chunk() + i * kThreads;
            load_columns<0, 4>(exists && ((i + 1) * kThreads <= kChunks || at < kChunks), words_[i], row.data + 16 * at);
        }
        // between codes and tail: the scales, unless the page has them at its end
        constexpr int kTailAt = kColumns * (kFp8 ? 1 : 2) + (kFp8 && !kPageScales ? 16 : 0);
        load_columns<0, kTailWords>(exists, tail_, row.data + kTailAt + 4 * kTailWords * chunk());
        if constexpr (kFp8) load_columns<0, kScaleWords>(exists, scales_, row.scales);
        load_int_if(first + kTokens + token() < end, chosen_, list_ + kTokens);
    }
    __device__ __forceinline__ void prefetch_next(const DecodeParams&, int, int) const {}
    // Stores the loaded tokens to shared memory as fp16, and their scales.
    __device__ __forceinline__ void stage(typename M::Shared& shared) const {
        char* to = reinterpret_cast<char*>(shared.latents) + token() * M::kPitch;
        uint4* chunks = reinterpret_cast<uint4*>(to);
        float scale = 1.f;
        if constexpr (kFp8)
            scale = stage_codes(to);
        else if constexpr (decode::kBf16)
            scale = stage_bf16(to);
        else {
#pragma unroll
            for (int i = 0; i < kLoads; i++)
                if (chunk() + i * kThreads < kChunks)
                    chunks[chunk() + i * kThreads] = make_uint4(words_[i][0], words_[i][1], words_[i][2], words_[i][3]);
            store_tail(to, [&](int i) { return tail_[i]; });
        }
        if (kTokenScales && chunk() == 0) shared.scales[token()] = scale;
    }

private:
    template <class Word>
    __device__ __forceinline__ static void store_tail(char* to, Word word) {
        char* at = to + 2 * kColumns + 4 * kTailWords * chunk();
        if constexpr (kTailWords == 4)
            *reinterpret_cast<uint4*>(at) = make_uint4(word(0), word(1), word(2), word(3));
        else
            *reinterpret_cast<uint2*>(at) = make_uint2(word(0), word(1));
    }
    // The largest over the threads of a token.
    __device__ __forceinline__ static int largest_of_token(int x) {
#pragma unroll
        for (int n = 1; n < kThreads; n *= 2) x = max(x, __shfl_xor_sync(~0u, x, n));
        return x;
    }
    // The largest biased exponent of the tail.
    __device__ __forceinline__ static int tail_exponent(const float2 (&tail)[kTailWords]) {
        int largest = 0;
#pragma unroll
        for (const float2& x : tail) largest = max(largest, max(biased_exponent(x.x), biased_exponent(x.y)));
        return largest_of_token(largest);
    }
    // Scale t of the row, seven of one byte or four of four.
    __device__ __forceinline__ float code_scale(unsigned byte_or_word) const {
        if constexpr (!kPageScales) return __uint_as_float(byte_or_word);
        // E8M0: 255 is NaN, and 0 is 2^-127, which is no normal number
        return byte_or_word == 0xff ? quiet_nan() : __uint_as_float(max(byte_or_word << 23, 0x00400000u));
    }
    __device__ __forceinline__ unsigned scale_bits(int tile) const {
        if constexpr (!kPageScales) return tile < 2 ? (tile == 0 ? scales_[0] : scales_[1]) : tile == 2 ? scales_[2] : scales_[3];
        return (tile < 4 ? scales_[0] : scales_[1]) >> 8 * (tile & 3) & 0xff;
    }
    // Stores codes times their scales over a unit of the row, which no scale exceeds. Returns the factor of what is stored.
    __device__ __forceinline__ float stage_codes(char* to) const {
        float2 tail[kTailWords];
#pragma unroll
        for (int i = 0; i < kTailWords; i++) tail[i] = unpack2(tail_[i], tail_is_bf16_);
        int unit = 0;
#pragma unroll
        for (int t = 0; t < kTiles; t++) unit = max(unit, biased_exponent(code_scale(scale_bits(t))) + 1);
        // The tail has room up to 2^8 units: 144 times that is below fp16's largest. The bounds keep the unit's power and its
        // inverse normal.
        unit = min(max(max(unit, tail_exponent(tail) - 7), 16), 252);
        const float inverse = power(254 - unit);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int at = chunk() + i * kThreads;
            if ((i + 1) * kThreads > kChunks && at >= kChunks) continue;
            const HalfFactor factor(code_scale(scale_bits(at / kTileChunks)) * inverse);
            uint4* chunks = reinterpret_cast<uint4*>(to) + 2 * at;
            chunks[0] = factor.times(decode::CacheElement::unpack8(words_[i]));
            chunks[1] = factor.times(decode::CacheElement::unpack8(words_[i] + 2));
        }
        const float scale = decode::CacheElement::kScale * inverse;
        store_tail(to, [&](int i) { return to_half2(tail[i].x * scale, tail[i].y * scale); });
        return power(unit) * (1.f / decode::CacheElement::kScale);
    }
    // Stores bf16 numbers, the largest below 2^15. Returns the factor of what is stored.
    __device__ __forceinline__ float stage_bf16(char* to) const {
        unsigned largest = 0;
        const auto add = [&](unsigned pair) { largest = max(largest, max(pair & 0x7f800000u, pair << 16 & 0x7f800000u)); };
#pragma unroll
        for (const auto& x : words_) add(x[0]), add(x[1]), add(x[2]), add(x[3]);
#pragma unroll
        for (unsigned x : tail_) add(x);
        const int exponent = max(largest_of_token(static_cast<int>(largest >> 23)), 16);
        const float inverse = power(268 - exponent);  // 2^(141 - exponent), as in select.cuh
        const auto scaled = [&](unsigned pair) {
            const float2 x = bf16x2_to_float2(pair);
            return to_half2(x.x * inverse, x.y * inverse);
        };
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            if ((i + 1) * kThreads > kChunks && chunk() + i * kThreads >= kChunks) continue;
            const unsigned* x = words_[i];
            reinterpret_cast<uint4*>(to)[chunk() + i * kThreads] =
                make_uint4(scaled(x[0]), scaled(x[1]), scaled(x[2]), scaled(x[3]));
        }
        store_tail(to, [&](int i) { return scaled(tail_[i]); });
        return power(exponent - 14);
    }
};

// The chosen tokens of a query, as a policy of the main loop.
struct SparseTokens {
    static constexpr bool kFp8 = decode::kFormat == CacheFormat::E4m3, kTokenScales = kFp8 || decode::kBf16, kScales = kTokenScales,
                          kNanIsInfinity = kFp8, kRowScales = decode::kBf16, kMaxLogits = true;
    template <class Mainloop>
    using Loader = SparseLoader<Mainloop>;

    // Factor of a row of queries as it was given over the fp16 row.
    __device__ __forceinline__ static float row_scale(const DecodeParams& p, const decode::WorkTile& s, int row) {
        const long long first = static_cast<long long>(s.batch) * p.problem.nheads + s.row;
        return load_float_or_0(row < s.rows, sparse_params(p).row_scales + first + row);
    }
    // Raises the row's largest score to `score`, which is before the softmax's scale. Other blocks may have tokens of the row. Bits
    // of fp32 are in the order of their numbers, those of negative ones in the opposite order.
    __device__ __forceinline__ static void write_max_logit(const DecodeParams& p, const decode::WorkTile& s, int row, float score) {
        if (row >= s.rows) return;
        float* to = sparse_params(p).max_logits + static_cast<long long>(s.batch) * p.problem.nheads + s.row + row;
        const float logit = score * p.problem.scale + 0.f;
        if (logit >= 0.f)
            atomicMax(reinterpret_cast<int*>(to), __float_as_int(logit));
        else
            atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(logit));
    }
};

}  // namespace volta
