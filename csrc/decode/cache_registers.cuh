// A warp's keys and values in registers as the cache has them, whatever its format: eight columns at a time become fp16 where a
// product takes them. And what scales do to the scores and probabilities of a step.
#pragma once

#include "decode/block.cuh"
#include "decode/page_iterator.cuh"
#include "quantized.cuh"

namespace decode {

using CacheElement = Element<kFormat>;
// What pointers into the cache count.
template <bool Quantized>
struct CacheUnit {
    using Type = unsigned short;
};
template <>
struct CacheUnit<true> {
    using Type = unsigned char;
};
using Stored = CacheUnit<kQuantized>::Type;
// Columns before `column`, in units of Stored.
__device__ __forceinline__ constexpr int stored(int column) { return kFormat == CacheFormat::Int4 ? column / 2 : column; }

// A warp's operands of queries, Units of each tile of rows. As many as registers have no room for, the first Stored, lie in shared
// memory, where their lane alone finds them.
template <int RowTiles, int Units, int Stored>
struct Queries {
    static constexpr int kUnits = Units, kBytes = Stored * RowTiles * 32 * sizeof(uint4);  // of a warp
    unsigned held[RowTiles][Units - Stored][4];
    uint4* stored;  // of this lane

    __device__ __forceinline__ uint4 unit(int mt, int j) const {
        if (j < Stored) return stored[(j * RowTiles + mt) * 32];
        const unsigned* x = held[mt][j - Stored];
        return make_uint4(x[0], x[1], x[2], x[3]);
    }
    __device__ __forceinline__ void set(int mt, int j, const uint4& x) {
        if (j < Stored) {
            stored[(j * RowTiles + mt) * 32] = x;
        } else {
            unsigned* to = held[mt][j - Stored];
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
    }
};

// Keys whose product with a query is the sum of its columns.
struct Ones {
    static constexpr bool kSplit = false;
    __device__ __forceinline__ uint4 unit(int) const { return make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00); }
};

// What a lane has of rows: Units times eight columns of fp16, of each `Spread` columns. In memory the lane's columns lie together
// as far as a load of 16 bytes reaches: kTogether units. (Columns are counted as if it were one: a layout's `first` column
// and then each Spread further. of() says which of the tensor these are.)
template <int Units, int Spread>
struct Columns {
    static constexpr int kWords = CacheElement::kBits / 4;  // of eight columns
    static constexpr int kTogether = Units < 4 / kWords ? Units : 4 / kWords;
    static_assert(Units % kTogether == 0, "whole loads");
    static constexpr bool kSplit = CacheElement::kSplit;
    unsigned words[Units * kWords];

    __device__ __forceinline__ static constexpr int of(int column) {
        const int unit = column / Spread, lane = column % Spread / 8;
        return unit / kTogether * (Spread * kTogether) + lane * (8 * kTogether) + unit % kTogether * 8 +
               CacheElement::column(column % 8);
    }
    // Of a row whose lane has `columns` columns left, from its first on.
    template <int J = 0>
    __device__ __forceinline__ void load(int columns, const Stored* from) {
        if constexpr (J < Units / kTogether) {
            constexpr int kColumn = J * Spread * kTogether;
            load_columns<kColumn>(columns, from);
        }
    }
    template <int Column>
    __device__ __forceinline__ void load_columns(int columns, const Stored* from) {
        decode::load_columns<Column, kTogether * kWords>(columns, words + Column / Spread * kWords, from + stored(Column));
        load<Column / (Spread * kTogether) + 1>(columns, from);
    }
    // The same of a row in shared memory, which has all columns.
    template <int J = 0>
    __device__ __forceinline__ void take(const char* from) {
        if constexpr (J < Units / kTogether) {
            struct alignas(4 * kTogether * kWords) Load {
                unsigned words[kTogether * kWords];
            };
            const Load x = *reinterpret_cast<const Load*>(from + stored(J * Spread * kTogether) * sizeof(Stored));
#pragma unroll
            for (int i = 0; i < kTogether * kWords; i++) words[J * kTogether * kWords + i] = x.words[i];
            take<J + 1>(from);
        }
    }
    __device__ __forceinline__ uint4 unit(int j) const { return CacheElement::eight(words + j * kWords); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Units * kWords; i++) words[i] = 0;
    }
};

template <int Loads>
using Keys = Columns<Loads, 32>;

// Of a lane's two tokens.
template <int Loads>
struct Values {
    Columns<Loads, 64> token[2];
    __device__ __forceinline__ uint4 unit(int j, int h) const { return token[h].unit(j); }
};

// The scales of a step's tokens, each in a lane: a register has those of kTensors tensors, one after the other.
struct StepScales {
    // in the order of lanes, and then of registers
    static constexpr int kKeyScale = 0, kValueScale = 1, kKeyZeroPoint = 2, kValueZeroPoint = 3;
    static constexpr int kAll = kZeroPoints ? 4 : 2;
    static constexpr int kTensors = kAll * kUnit < 32 ? kAll : 32 / kUnit, kLanes = kTensors * kUnit, kRegisters = kAll / kTensors;
    float own[kRegisters];

    // What a lane has in register i.
    __device__ __forceinline__ static const CacheScale& of_lane(const CacheScales& s, int i) {
        const int tensor = (threadIdx.x & 31) / kUnit % kTensors;
        if (kTensors == 4) return tensor < 2 ? tensor == 0 ? s.k : s.v : tensor == 2 ? s.k_zero_point : s.v_zero_point;
        if (i == 0) return tensor == 0 ? s.k : s.v;
        return tensor == 0 ? s.k_zero_point : s.v_zero_point;
    }
    // Of two neighbouring tokens.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        const int first = tensor % kTensors * kUnit + token;
        const float x = own[tensor / kTensors];
        return make_float2(__shfl_sync(~0u, x, first), __shfl_sync(~0u, x, first + 1));
    }
};

constexpr float kTwo112 = 5.1922969e33f;  // 2^112: probabilities are 2^-112 of what is packed (softmax.cuh)

// The scales of values, on their way into probabilities.
//
// Packed probabilities, which softmax.cuh keeps between 2^-14 and 2^15, have little room for a factor. So a row has a unit, a power
// of two: what is packed is probability * scale / unit, and accumulated output counts units. Like the softmax's reference it moves
// lazily: where a product does not fit, and, so that small scales lose no bits, wherever the reference moved. Scales that are
// negative or not finite make a row's sum NaN.
struct ProbabilityScale {
    float inverse = 1.f;  // 1 / unit
    float offset = 0.f;  // int4: what zero points add to all columns, in units, times 2^-112 as the probabilities

    // The largest that may be packed, in probabilities' own scale: bits of 2^(15 - 112). Compared as an integer, so that NaN and
    // what is negative exceed it.
    static constexpr unsigned kLargest = (127u - 97u) << 23;
    __device__ __forceinline__ static bool exceeds(float2 p) {
        return __float_as_uint(p.x) > kLargest || __float_as_uint(p.y) > kLargest;
    }
    // (adding 0 makes 0 of -0)
    __device__ __forceinline__ float2 scaled(float2 p, float2 scale) const {
        return make_float2(fmaf(p.x, scale.x * inverse, 0.f), fmaf(p.y, scale.y * inverse, 0.f));
    }
    // Of probabilities as they are packed: their rounding is the output's too, and most of both cancels out.
    __device__ __forceinline__ void add_zero_points(unsigned packed, float2 zero) {
        offset = fmaf(-__uint_as_float((packed & 0x7fff) << 13), zero.x, offset);
        offset = fmaf(-__uint_as_float(packed >> 16 << 13), zero.y, offset);
    }
    // Where `largest` is the row's largest product of a probability (1 is 1) and a scale. Returns the factor for what is
    // accumulated.
    __device__ __forceinline__ float move(float largest) {
        // between 2^-40 and 2^40: outputs are fp16, whatever is beyond
        const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -40), 40);
        const float moved = largest > 0.f ? __uint_as_float((127 - exponent) << 23) : inverse;
        const float factor = moved / inverse;
        inverse = moved;
        offset *= factor;
        return factor;
    }
};

}  // namespace decode
