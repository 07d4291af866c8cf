// Sparse MLA (volta_fa::fwd_sparse_mla): each query attends to tokens that the caller chose for it, of its own cache of latents and
// of an optional extra one (DeepSeek V3.2 and V4). The main loop is MlaMainloop (volta/decode/mla.cuh); this file loads its tokens.
// A query is a sequence of its own, whose tokens are the entries of its list, made by shared/select/select.cuh: token n of the own
// cache is n, of the extra cache ~n. src/ops/sparse.rs launches it.
//
// A token's row (its latent) becomes fp16 in shared memory, with a factor of the token, a power of two, in fp32. So any magnitude
// fits. Formats, by KEY_FORMAT (kKeyFormat) and HEADDIM of the kernel's row in src/kernels; HEADDIM_V is 512:
//
//   E4m3, 576         512 e4m3 codes, four fp32 scales of 128 codes each, 64 numbers of 16 bits (the tail)
//   E4m3, 512         448 e4m3 codes and a tail of 64 numbers of 16 bits; after all rows of the page, eight bytes for each: the
//                     exponents (E8M0) of seven scales of 64 codes, and a byte of padding
//   Unquantized       HEADDIM numbers of the type of the queries: bf16 with decode::kBf16, else fp16
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

// A factor for fp16 pairs, held as the sum of two fp16 numbers: `low` is what rounding took from `high`. One fp16 number would add
// its own rounding error to every product: scales are fp32 numbers of any digits.
struct HalfFactor {
    unsigned high, low;

    __device__ __forceinline__ explicit HalfFactor(float x)
        : high(to_half2(x, x)), low(to_half2(x - to_float2(high).x, x - to_float2(high).x)) {}
    // Returns pair * (high + low), of two fp16.
    __device__ __forceinline__ unsigned times(unsigned pair) const { return half2_fma(pair, high, half2_mul(pair, low)); }
    __device__ __forceinline__ uint4 times(const uint4& x) const {
        return make_uint4(times(x.x), times(x.y), times(x.z), times(x.w));
    }
};

// Returns the biased exponent of x: |x| < 2^(biased - 126).
__device__ __forceinline__ int biased_exponent(float x) { return static_cast<int>(__float_as_uint(x) >> 23 & 0xff); }
// Returns the power of two with this biased exponent (1 to 254): 2^(biased - 127).
__device__ __forceinline__ float power(int biased) { return __uint_as_float(static_cast<unsigned>(biased) << 23); }

// Loads steps of 16 chosen tokens into registers, and stages them in shared memory a step later. kThreads neighboring threads of a
// warp share a token. The interface is that of MlaMainloop::LatentLoader. `s` is the work tile: query s.batch, rows (heads)
// from s.row on, and seqlen_k tokens in the query's list. In SparseMlaParams `own` is the main cache, `extra` the optional second
// one. Of the Mainloop: kTokens tokens of a step, kTokenThreads threads of a token, kPitch bytes of a staged token's row.
template <class Mainloop>
class SparseLoader {
    using M = Mainloop;
    // kPageScales: the format of 512 columns, whose scales lie at the end of a page
    static constexpr bool kFp8 = decode::kKeyFormat == CacheFormat::E4m3, kPageScales = kFp8 && HEADDIM == HEADDIM_V;
    static_assert(kFp8 || decode::kKeyFormat == CacheFormat::Unquantized, "the formats of sparse MLA");
    static constexpr int kThreads = M::kTokenThreads, kTokens = M::kTokens;
    // The tail is the last 64 columns, 16-bit numbers in every format. The kColumns before it come in chunks of 16 bytes.
    static constexpr int kTail = 64, kColumns = HEADDIM - kTail, kChunkColumns = kFp8 ? 16 : 8;
    static constexpr int kChunks = kColumns / kChunkColumns, kLoads = (kChunks + kThreads - 1) / kThreads;
    static constexpr int kTailWords = kTail / 2 / kThreads;
    // fp8: columns of a scale; chunks of 16 bytes in these; scales of a row; 32-bit words of a row's scales.
    static constexpr int kScaleColumns = kPageScales ? 64 : 128, kScaleChunks = kScaleColumns / 16,
                         kRowScales = kColumns / kScaleColumns, kScaleWords = kPageScales ? 2 : 4;

public:
    static constexpr bool kTokenScales = kFp8 || decode::kBf16;  // unquantized fp16 needs no scale

private:
    int tail_is_bf16_;  // fp8: type of the tail, else it is fp16
    const int* list_;  // the thread's entry in this query's list, of the step that is loaded next
    int chosen_;  // that entry
    unsigned words_[kLoads][4], tail_[kTailWords], scales_[kFp8 ? kScaleWords : 1];

    __device__ __forceinline__ static int token() { return threadIdx.x / kThreads; }
    __device__ __forceinline__ static int chunk() { return threadIdx.x % kThreads; }

    // Addresses of a chosen token's row and of its scales. `chosen`: an entry of the list. Strides are in bytes.
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
    // The list has only tokens that exist.
    __device__ __forceinline__ bool page_valid() const { return true; }
    __device__ __forceinline__ void advance(const DecodeParams&, const decode::WorkTile&) { list_ += kTokens; }
    // Loads the step that begins at token `first`, and the entries of the step after it; zeros for tokens that do not exist.
    // load_columns<0, n>(condition, x, from) loads n 32-bit words into x if the condition is true; load_int_if() one int.
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
            const int chunk_index = chunk() + i * kThreads;
            load_columns<0, 4>(exists && ((i + 1) * kThreads <= kChunks || chunk_index < kChunks), words_[i],
                               row.data + 16 * chunk_index);
        }
        // byte offset of the tail; 16 bytes of scales are between codes and tail, unless the page has them at its end
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
    // Stores the thread's part of the tail. word(i): its 32-bit word i, two fp16.
    template <class Word>
    __device__ __forceinline__ static void store_tail(char* to, Word word) {
        char* tail = to + 2 * kColumns + 4 * kTailWords * chunk();
        if constexpr (kTailWords == 4)
            *reinterpret_cast<uint4*>(tail) = make_uint4(word(0), word(1), word(2), word(3));
        else
            *reinterpret_cast<uint2*>(tail) = make_uint2(word(0), word(1));
    }
    __device__ __forceinline__ static int largest_of_token(int x) {
#pragma unroll
        for (int n = 1; n < kThreads; n *= 2) x = max(x, __shfl_xor_sync(~0u, x, n));
        return x;
    }
    // Returns the largest biased exponent of the token's tail.
    __device__ __forceinline__ static int tail_exponent(const float2 (&tail)[kTailWords]) {
        int largest = 0;
#pragma unroll
        for (const float2& x : tail) largest = max(largest, max(biased_exponent(x.x), biased_exponent(x.y)));
        return largest_of_token(largest);
    }
    // code_scale() returns a scale in fp32 from its bits. scale_bits() returns those of the row's scale `number`, an E8M0 byte
    // or an fp32 word.
    __device__ __forceinline__ float code_scale(unsigned byte_or_word) const {
        if constexpr (!kPageScales) return __uint_as_float(byte_or_word);
        // E8M0: 255 is NaN, and 0 is 2^-127, which is no normal number
        return byte_or_word == 0xff ? quiet_nan() : __uint_as_float(max(byte_or_word << 23, 0x00400000u));
    }
    __device__ __forceinline__ unsigned scale_bits(int number) const {
        if constexpr (!kPageScales)
            return number < 2 ? (number == 0 ? scales_[0] : scales_[1]) : number == 2 ? scales_[2] : scales_[3];
        return (number < 4 ? scales_[0] : scales_[1]) >> 8 * (number & 3) & 0xff;
    }
    // Stores the token's row in fp16, divided by a unit and times kScale = 144 (as codes are unpacked). The unit is a power of two
    // that no scale exceeds; `unit` is its biased exponent. Returns what the stored numbers must be multiplied by.
    __device__ __forceinline__ float stage_codes(char* to) const {
        float2 tail[kTailWords];
#pragma unroll
        for (int i = 0; i < kTailWords; i++) tail[i] = unpack2(tail_[i], tail_is_bf16_);
        int unit = 0;
#pragma unroll
        for (int t = 0; t < kRowScales; t++) unit = max(unit, biased_exponent(code_scale(scale_bits(t))) + 1);
        // The tail has room up to 2^8 units: 144 times that is below fp16's 65504. So unit is at least its exponent - 7, as |tail|
        // < 2^(exponent - 126) and the unit is 2^(unit - 127). Bounds of 16 and 252 keep the unit, unit / 144 and 1 / unit normal.
        unit = min(max(max(unit, tail_exponent(tail) - 7), 16), 252);
        const float inverse = power(254 - unit);
#pragma unroll
        for (int i = 0; i < kLoads; i++) {
            const int chunk_index = chunk() + i * kThreads;
            if ((i + 1) * kThreads > kChunks && chunk_index >= kChunks) continue;
            const HalfFactor factor(code_scale(scale_bits(chunk_index / kScaleChunks)) * inverse);
            uint4* chunks = reinterpret_cast<uint4*>(to) + 2 * chunk_index;
            chunks[0] = factor.times(decode::KeyElement::unpack8(words_[i]));
            chunks[1] = factor.times(decode::KeyElement::unpack8(words_[i] + 2));
        }
        const float scale = decode::KeyElement::kScale * inverse;
        store_tail(to, [&](int i) { return to_half2(tail[i].x * scale, tail[i].y * scale); });
        return power(unit) * (1.f / decode::KeyElement::kScale);
    }
    // Stores the token's bf16 numbers as fp16, scaled to below 2^15. Returns the factor that undoes it. 0x7f800000: exponent bits.
    __device__ __forceinline__ float stage_bf16(char* to) const {
        unsigned largest = 0;
        const auto add = [&](unsigned pair) { largest = max(largest, max(pair & 0x7f800000u, pair << 16 & 0x7f800000u)); };
#pragma unroll
        for (const auto& x : words_) add(x[0]), add(x[1]), add(x[2]), add(x[3]);
#pragma unroll
        for (unsigned x : tail_) add(x);
        const int exponent = max(largest_of_token(static_cast<int>(largest >> 23)), 16);
        // 2^(141 - exponent): brings numbers below 2^(exponent - 126) to below 2^15
        const float inverse = power(268 - exponent);
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
        return power(exponent - 14);  // 1 / inverse
    }
};

// The chosen tokens of a query: the Tokens policy of MlaMainloop. kTokenScales: each staged token has a factor. kScales: tokens or,
// in other policies, sequences have one. kNanIsInfinity: NaN codes are staged as infinity. kRowScales: rows of q have factors.
// kMaxLogits: rows' largest scores are written.
struct SparseTokens {
    static constexpr bool kFp8 = decode::kKeyFormat == CacheFormat::E4m3, kTokenScales = kFp8 || decode::kBf16,
                          kScales = kTokenScales, kNanIsInfinity = kFp8, kRowScales = decode::kBf16, kMaxLogits = true;
    template <class Mainloop>
    using Loader = SparseLoader<Mainloop>;

    // Returns what scores of a query row must be multiplied by: bf16 queries were scaled to fp16 (select.cuh).
    __device__ __forceinline__ static float row_scale(const DecodeParams& p, const decode::WorkTile& s, int row) {
        const long long first = static_cast<long long>(s.batch) * p.problem.nheads + s.row;
        return load_float_or_0(row < s.rows, sparse_params(p).row_scales + first + row);
    }
    // Raises the row's max_logits to `score` times softmax_scale, by an atomic, because other blocks may have tokens of the row.
    // Bits of fp32 compare as integers like their numbers, of negative ones in the opposite order. Adding 0 turns -0 into 0.
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
