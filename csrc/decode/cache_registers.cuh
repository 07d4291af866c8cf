// A warp's keys and values in registers as the cache has them, whatever its format: eight columns at a time become fp16 where a
// product takes them. And what scales do to the scores and probabilities of a step.
#pragma once

#include "decode/memory.cuh"
#include "decode/tile_scheduler.cuh"
#include "quantized.cuh"

namespace decode {

using CacheElement = Element<kFormat>;
// What pointers into the cache count.
template <bool Quantized>
struct CacheUnitOf {
    using Type = unsigned short;
};
template <>
struct CacheUnitOf<true> {
    using Type = unsigned char;
};
using CacheUnit = CacheUnitOf<kQuantized>::Type;
// Columns before `column`, in units of Stored.
__device__ __forceinline__ constexpr int unit_offset(int column) { return kFormat == CacheFormat::Int4 ? column / 2 : column; }

// A warp's operands of queries, Units of each tile of rows. As many as registers have no room for, the first Stored, lie in shared
// memory, where their lane alone finds them.
template <int RowTiles, int Chunks, int SharedChunks>
struct Queries {
    static constexpr int kChunks = Chunks, kBytes = SharedChunks * RowTiles * 32 * sizeof(uint4);  // of a warp
    unsigned in_registers[RowTiles][Chunks - SharedChunks][4];
    uint4* in_shared;  // of this lane

    __device__ __forceinline__ uint4 chunk(int mt, int j) const {
        if (j < SharedChunks) return in_shared[(j * RowTiles + mt) * 32];
        const unsigned* x = in_registers[mt][j - SharedChunks];
        return make_uint4(x[0], x[1], x[2], x[3]);
    }
    __device__ __forceinline__ void set(int mt, int j, const uint4& x) {
        if (j < SharedChunks) {
            in_shared[(j * RowTiles + mt) * 32] = x;
        } else {
            unsigned* to = in_registers[mt][j - SharedChunks];
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
    }
};

// Keys whose product with a query is the sum of its columns.
struct Ones {
    static constexpr bool kTwoScales = false;
    __device__ __forceinline__ uint4 chunk(int) const { return make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00); }
};

// What a lane has of rows: Units times eight columns of fp16, of each `Spread` columns. In memory the lane's columns lie together
// as far as a load of 16 bytes reaches: kTogether units. (Columns are counted as if it were one: a layout's `first` column
// and then each Spread further. of() says which of the tensor these are.)
template <int Chunks, int Spread>
struct Columns {
    static constexpr int kWords = CacheElement::kBits / 4;  // of eight columns
    static constexpr int kChunksPerLoad = Chunks < 4 / kWords ? Chunks : 4 / kWords;
    static_assert(Chunks % kChunksPerLoad == 0, "whole loads");
    static constexpr bool kTwoScales = CacheElement::kTwoScales;
    unsigned words[Chunks * kWords];

    __device__ __forceinline__ static constexpr int of(int column) {
        const int unit = column / Spread, lane = column % Spread / 8;
        return unit / kChunksPerLoad * (Spread * kChunksPerLoad) + lane * (8 * kChunksPerLoad) + unit % kChunksPerLoad * 8 +
               CacheElement::column(column % 8);
    }
    // Of a row whose lane has `columns` columns left, from its first on.
    template <int J = 0>
    __device__ __forceinline__ void load(int columns, const CacheUnit* from) {
        if constexpr (J < Chunks / kChunksPerLoad) {
            constexpr int kColumn = J * Spread * kChunksPerLoad;
            load_columns<kColumn>(columns, from);
        }
    }
    template <int Column>
    __device__ __forceinline__ void load_columns(int columns, const CacheUnit* from) {
        decode::load_columns<Column, kChunksPerLoad * kWords>(columns, words + Column / Spread * kWords,
                                                              from + unit_offset(Column));
        load<Column / (Spread * kChunksPerLoad) + 1>(columns, from);
    }
    // The same of a row in shared memory, which has all columns.
    template <int J = 0>
    __device__ __forceinline__ void load_shared_row(const char* from) {
        if constexpr (J < Chunks / kChunksPerLoad) {
            struct alignas(4 * kChunksPerLoad * kWords) Load {
                unsigned words[kChunksPerLoad * kWords];
            };
            const Load x = *reinterpret_cast<const Load*>(from + unit_offset(J * Spread * kChunksPerLoad) * sizeof(CacheUnit));
#pragma unroll
            for (int i = 0; i < kChunksPerLoad * kWords; i++) words[J * kChunksPerLoad * kWords + i] = x.words[i];
            load_shared_row<J + 1>(from);
        }
    }
    __device__ __forceinline__ uint4 chunk(int j) const { return CacheElement::unpack8(words + j * kWords); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Chunks * kWords; i++) words[i] = 0;
    }
};

template <int Loads>
using Keys = Columns<Loads, 32>;

// Of a lane's two tokens.
template <int Loads>
struct Values {
    Columns<Loads, 64> token[2];
    __device__ __forceinline__ uint4 chunk(int j, int h) const { return token[h].chunk(j); }
};

}  // namespace decode
