// Loads K and V of a decode warp from global memory straight into operand registers, a step at a time: kStepTokens tokens, one or
// two tiles (kStepTiles) of eight (kTileTokens).
//
// A warp-wide load of 16 bytes per lane covers 64 contiguous bytes of K of eight tokens, or 128 bytes of V of four. Quantized
// caches with few columns load less. So each byte of the cache is loaded once, by one lane, without shared memory or barriers.
//
// DecodeMainloop computes from its registers. StagedLoader loads int4 steps by it, with its own Coords, to move them through shared
// memory. Where four warps need the same tokens, CooperativeLoader loads for all instead.
#pragma once

#include "decode/cache_registers.cuh"  // of tile_scheduler.cuh: WorkTile s, the block's tokens and rows; kStepTiles
#include "decode/column_groups.cuh"  // first_column(), kGroupHeaddim and the same of V
#include "decode/page_iterator.cuh"  // PageIterator: page numbers along a sequence
#include "decode/scales.cuh"  // StepScales: scales and zero points of a step, kRegisters of them in each lane

namespace decode {

// Which token and columns of a tile (eight tokens) a lane loads, by Layout ({volta,turing}/decode/layout.cuh). first_column(),
// kGroupHeaddim: first and number of the warp's columns (V: first_column_v(), kGroupHeaddimV). Above headdim 256 two warps divide a
// row (column_groups.cuh).
//
// A lane has a chunk of eight columns of every 32 of K and of every 64 of V. Keys<n> and Columns<format, n, 64> are a lane's n
// chunks (cache_registers.cuh). In the tensor the chunks of one 16-byte load are adjacent, but products take columns in another
// order: of() maps a column of a product to one of the tensor.
template <class Layout>
struct OperandCoords {
    static constexpr int kValueTokens = Layout::kValueTokens;
    __device__ __forceinline__ static int key_token() { return Layout::key_token(typename Layout::Lane()); }
    __device__ __forceinline__ static int value_token() { return Layout::value_token(typename Layout::Lane()); }
    __device__ __forceinline__ static int key_column() {
        return first_column() + Keys<kGroupHeaddim / 32>::of(Layout::key_column(typename Layout::Lane()));
    }
    __device__ __forceinline__ static int value_column() {
        return first_column_v() + Columns<kValueFormat, kGroupHeaddimV / 64, 64>::of(Layout::value_column(typename Layout::Lane()));
    }
};

// Loads the steps of a warp in token order. Coords: which token and columns of each tile the lane has. The constructor ignores its
// last three arguments, which CooperativeLoader and StagedLoader use.
template <class Coords>
class DirectLoader {
    PageIterator pages_;
    const CacheUnit *k_, *v_;  // the lane's columns of its token; a CacheUnit is 16 bits, or a byte of a quantized cache
    const float* scale_[StepScales::kRegisters];  // where the lane's scales are, if tokens have any (kTokenScales)
    const CacheUnit *k_base_, *v_base_;  // k_ and v_ at row 0 of page 0, kept because quantized steps enter pages often
    bool page_valid_;  // false: the block table names a page outside the cache
    int token_;  // the step's first; all lanes have the same, and add Coords' token of a tile

public:
    __device__ __forceinline__ DirectLoader(const DecodeParams& p, const WorkTile& s, int token, const void* = nullptr, int = 0,
                                            int = 0)
        : pages_(p, s, token), token_(token) {
        if constexpr (kQuantized) {
            k_base_ = bytes_of_page(p.cache.k, 0, Coords::key_token(), s.head_k) + unit_offset<kKeyFormat>(Coords::key_column());
            v_base_ =
                bytes_of_page(p.cache.v, 0, Coords::value_token(), s.head_k) + unit_offset<kValueFormat>(Coords::value_column());
        }
        enter_page(p, s);
    }
    // Advances by Tokens. No page boundary lies inside these tokens.
    template <int Tokens = kStepTokens>
    __device__ __forceinline__ void advance(const DecodeParams& p, const WorkTile& s) {
        token_ += Tokens;
        k_ += Tokens * p.cache.k.row_stride;
        v_ += Tokens * p.cache.v.row_stride;
        if constexpr (kTokenScales) {
#pragma unroll
            for (int i = 0; i < StepScales::kRegisters; i++) scale_[i] += Tokens * StepScales::lane_scale(p.scales, i).row_stride;
        }
        if (pages_.template advance<Tokens>(p, s)) enter_page(p, s);
    }
    // Returns false if the current page number is outside the cache. The caller then leaves its loop, and the output is NaN.
    __device__ __forceinline__ bool page_valid() const { return page_valid_; }
    __device__ __forceinline__ int token() const { return token_; }
    // Addresses of the lane's columns of its token.
    __device__ __forceinline__ const CacheUnit* keys() const { return k_; }
    __device__ __forceinline__ const CacheUnit* values() const { return v_; }
    // Loads a step's keys to registers for `Loads` chunks of eight columns. A missing token's registers keep old numbers:
    // DecodeMainloop masks its scores and clears its values. A token's missing columns stay 0.
    template <int Loads>
    __device__ __forceinline__ void load_keys(const DecodeParams& p, int seqlen_k, Keys<Loads> (&k)[kStepTiles]) const {
        const int columns = p.problem.headdim - Coords::key_column();
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++)
            k[tile].load(token_ + kTileTokens * tile + Coords::key_token() < seqlen_k ? columns : 0,
                         k_ + kTileTokens * tile * p.cache.k.row_stride);
    }
    // The same of values. A lane has two tokens of a tile, token[h], kValueTokens apart.
    template <int Loads>
    __device__ __forceinline__ void load_values(const DecodeParams& p, int seqlen_k, Values<Loads> (&v)[kStepTiles]) const {
        const int columns = p.problem.headdim_v - Coords::value_column();
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = kTileTokens * tile + Coords::kValueTokens * h;
                v[tile].token[h].load(token_ + row + Coords::value_token() < seqlen_k ? columns : 0,
                                      v_ + row * p.cache.v.row_stride);
            }
    }
    // Loads a step's scales and zero points. Register i of a lane gets that of token lane % kStepTokens, from the tensor
    // lane_scale(i). Lanes from kLanes on have none. Tokens that do not exist get 0. Predicated, without a branch.
    __device__ __forceinline__ void load_scales(const DecodeParams& p, int seqlen_k, StepScales& scales) const {
        const int lane = threadIdx.x & 31;
        const bool exists = lane < StepScales::kLanes && token_ + lane % kStepTokens < seqlen_k;
#pragma unroll
        for (int i = 0; i < StepScales::kRegisters; i++) scales.own[i] = load_float_or_0(exists, scale_[i]);
    }

private:
    // ..._of_page() (cache.cuh, quantized.cuh): addresses in a page, by strides; has_page(): whether the cache has the page.
    __device__ __forceinline__ void enter_page(const DecodeParams& p, const WorkTile& s) {
        const int page = pages_.number(), row = pages_.row;
        page_valid_ = has_page(p.cache, page);
        if constexpr (kQuantized) {
            k_ = k_base_ + page * p.cache.k.batch_stride;
            v_ = v_base_ + page * p.cache.v.batch_stride;
            if (row > 0) k_ += row * p.cache.k.row_stride, v_ += row * p.cache.v.row_stride;
        } else {
            k_ = row_of_page(p.cache.k, page, row + Coords::key_token()) + s.head_k * p.cache.k.head_stride + Coords::key_column();
            v_ = row_of_page(p.cache.v, page, row + Coords::value_token()) + s.head_k * p.cache.v.head_stride +
                 Coords::value_column();
        }
        if constexpr (kTokenScales) {
#pragma unroll
            for (int i = 0; i < StepScales::kRegisters; i++)
                scale_[i] = scale_of_page(StepScales::lane_scale(p.scales, i), page, row + threadIdx.x % kStepTokens, s.head_k);
        }
    }
};

}  // namespace decode
