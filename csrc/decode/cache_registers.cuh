// K, V and Q of a decode warp in registers. K and V keep the cache's format; eight columns at a time become fp16 when a product
// takes them (quantized.cuh has the conversions). Used by the decode loaders, mainloop.cuh and volta/decode/mla.cuh.
//
// A chunk is eight columns of one row as fp16: uint4. Products read all operands by chunk(number), whether they come from
// registers, from shared memory (CooperativeLoader) or are constants (Ones). A row tile is here eight query rows, of a warp.
#pragma once

#include "conditional.cuh"
#include "decode/tile_scheduler.cuh"  // kKeyFormat, kValueFormat: the cache's formats; kQuantized
#include "ptx.cuh"  // load_columns(): loads words if their columns exist
#include "quantized.cuh"  // Element: conversion of a format; CacheFormatInfo (src/kernels): its bits and scales

namespace decode {

// The formats' conversions.
using KeyElement = Element<kKeyFormat>;
using ValueElement = Element<kValueFormat>;
// What cache pointers count: 16-bit elements, or bytes if quantized.
using CacheUnit = Conditional<kQuantized, unsigned char, unsigned short>::Type;
// Offset of `column` in a row, in CacheUnits: one has kColumns columns, 2 in int4, else 1.
template <CacheFormat Format>
__device__ __forceinline__ constexpr int unit_offset(int column) {
    return column / CacheFormatInfo<Format>::kColumns;
}

// A lane's operands of Q: Chunks chunks (j) of a row in each row tile (mt). The first SharedChunks lie in shared memory, where only
// this lane reads them, because registers have no room for all.
template <int RowTiles, int Chunks, int SharedChunks>
struct Queries {
    static constexpr int kChunks = Chunks, kBytes = SharedChunks * RowTiles * 32 * sizeof(uint4);  // of shared memory, for a warp
    unsigned in_registers[RowTiles][SharedChunks < Chunks ? Chunks - SharedChunks : 1][4];  // C++ has no empty arrays
    uint4* in_shared;  // this lane's first chunk; its next are 32 further, past those of the other lanes

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

// A key of ones: its product with a query is the sum of the query's columns, by which zero points of int4 keys are multiplied.
struct Ones {
    static constexpr bool kTwoScales = false;
    // pairs of fp16 1
    __device__ __forceinline__ uint4 chunk(int) const { return make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00); }
};

// A lane's columns of one row (token) of K or V: Chunks chunks, one in every Spread columns of the product. Spread / 8 lanes share
// a row.
//
// In memory a lane's chunks are adjacent as far as a 16-byte load reaches (kChunksPerLoad). So a product's columns are a
// permutation of the tensor's, the same for Q and K: of() maps a column of the product to one of the tensor.
// Within a chunk Element::column(i) does: the column that unpack8() puts at place i (int4 permutes them, other formats do not).
template <CacheFormat Format, int Chunks, int Spread>
struct Columns {
    static constexpr int kWords = CacheFormatInfo<Format>::kBits / 4;  // 32-bit words of a chunk, eight columns
    static constexpr int kChunksPerLoad = Chunks < 4 / kWords ? Chunks : 4 / kWords;
    static_assert(Chunks % kChunksPerLoad == 0, "a row is a whole number of loads");
    // int4: elements 4 to 7 of an unpacked chunk keep their codes in bits 4 to 7, so they are 16 times as large as the others.
    static constexpr bool kTwoScales = Element<Format>::kTwoScales;
    unsigned words[Chunks * kWords];

    __device__ __forceinline__ static constexpr int of(int column) {
        // numbers of the chunk among its lane's, and of the lane among those of the row
        const int number = column / Spread, lane = column % Spread / 8;
        return number / kChunksPerLoad * (Spread * kChunksPerLoad) + lane * (8 * kChunksPerLoad) + number % kChunksPerLoad * 8 +
               Element<Format>::column(column % 8);
    }
    // Loads the lane's columns of a row. `columns`: number that exist from the lane's first on; chunks past them keep what they
    // held. J: number of the load; load() and load_columns() call each other, which unrolls the loads.
    template <int J = 0>
    __device__ __forceinline__ void load(int columns, const CacheUnit* from) {
        if constexpr (J < Chunks / kChunksPerLoad) {
            constexpr int kColumn = J * Spread * kChunksPerLoad;
            load_columns<kColumn>(columns, from);
        }
    }
    template <int Column>
    __device__ __forceinline__ void load_columns(int columns, const CacheUnit* from) {
        ::load_columns<Column, kChunksPerLoad * kWords>(columns, words + Column / Spread * kWords,
                                                        from + unit_offset<Format>(Column));
        load<Column / (Spread * kChunksPerLoad) + 1>(columns, from);
    }
    // Loads them from a row in shared memory, which has all columns.
    template <int J = 0>
    __device__ __forceinline__ void load_shared_row(const char* from) {
        if constexpr (J < Chunks / kChunksPerLoad) {
            struct alignas(4 * kChunksPerLoad * kWords) Load {
                unsigned words[kChunksPerLoad * kWords];
            };
            const Load x =
                *reinterpret_cast<const Load*>(from + unit_offset<Format>(J * Spread * kChunksPerLoad) * sizeof(CacheUnit));
#pragma unroll
            for (int i = 0; i < kChunksPerLoad * kWords; i++) words[J * kChunksPerLoad * kWords + i] = x.words[i];
            load_shared_row<J + 1>(from);
        }
    }
    __device__ __forceinline__ uint4 chunk(int j) const { return Element<Format>::unpack8(words + j * kWords); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Chunks * kWords; i++) words[i] = 0;
    }
};

// A lane's part of one key: one chunk of every 32 columns. Loads counts chunks: HEADDIM / 32.
template <int Loads>
using Keys = Columns<kKeyFormat, Loads, 32>;

// A lane's part of its two tokens' values: one chunk of every 64 columns. Loads counts chunks: HEADDIM_V / 64.
// chunk(j, h): chunk j of token h.
template <int Loads>
struct Values {
    Columns<kValueFormat, Loads, 64> token[2];
    __device__ __forceinline__ uint4 chunk(int j, int h) const { return token[h].chunk(j); }
};

}  // namespace decode
