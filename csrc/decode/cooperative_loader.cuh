// Loads K and V for four warps of a decode kernel (mainloop.cuh) that need the same tokens: in blocks with 64 query rows, from
// headdim 256 on with 32. Each warp loads a part of a step, and stores it in shared memory for all four. A step is kStepTiles tiles
// of eight tokens (kTileTokens), kStepTokens in all.
//
// Without this, the other warps' loads would hit L1, but L1 serves one 128-byte line a cycle, and eight lanes of an operand touch
// four. Here a warp loads whole lines, shared memory serves eight lanes' 16 bytes a cycle, and loads in flight have more registers.
//
// There are two buffers, so a step needs one barrier: all warps have read a buffer before the barrier that precedes its next
// store. Shared memory holds fp16: the warp that loads bf16 (kBf16: queries, cache and output are) converts it once.
//
// A Layout with kCooperative says where chunks of eight columns lie, in blocks of 64 slots of 16 bytes, without bank conflicts:
//
//   key_slot(token, chunk)    where a key's chunk lies (eight chunks are 64 columns)
//   key_slot(lane)            where the lane's chunk of the first 32 columns lies; its chunk of the other 32: that ^ kKeySlotXor
//   value_slot(token, chunk)  where a value's chunk lies
//   value_slot(lane)          for the first of the lane's two tokens of a tile (Layout::value_token); the other's is 32 slots on
#pragma once

#include "decode/bf16_value.cuh"  // Bf16Scaler: multiplies bf16 by a power of two, factor(), that makes them fit fp16
#include "decode/cache_registers.cuh"  // of tile_scheduler.cuh: WorkTile s, the block's tokens and rows; kStepTiles
#include "decode/column_groups.cuh"  // kGroupHeaddim, first_column(): columns of this warp
#include "decode/page_iterator.cuh"  // PageIterator: page numbers along a sequence; has_page(): whether one is in the cache

namespace decode {

// A set is the four warps with the same tokens and columns, each for other query rows; `set` is its number in the block.
// `row_group` is the warp's number in its set: 0 and 1 load keys, 2 and 3 values, of four tokens of each tile.
template <class Layout>
class CooperativeLoader {
    // A warp loads kGroupHeaddim columns from first_column() on: half of a head above 256 columns (column_groups.cuh).
    static constexpr int kLoads = kGroupHeaddim / 64;  // of a tile, 64 columns each
    static constexpr int kSlotBytes = sizeof(uint4);
    static constexpr int kTileSlots = 2 * 64 * kLoads, kSlots = kStepTiles * kTileSlots;  // of a tile: keys, then values
    static_assert(HEADDIM == HEADDIM_V && kGroupHeaddim % 64 == 0, "a row is a whole number of loads");

    PageIterator pages_;
    const unsigned short *base_, *from_;  // of this lane: row 0 of page 0; its next load
    long long page_stride_, row_stride_;
    int lane_token_;  // the lane's token in a tile
    int columns_;  // columns that exist from the lane's first on; kInvalidPage after a table entry outside the cache
    int barrier_;  // named barrier of the set
    bool has_values_;  // whether this warp loads values, else keys
    char* buffer_;  // of the step stored last
    int to_other_buffer_;  // distance to the other buffer, bytes
    // of this lane, in a buffer, bytes: first store; operands of keys and of values
    int store_offset_, keys_offset_, values_offset_;
    int token_;  // first token of the next load
    unsigned loaded_[kStepTiles * kLoads][4] = {};
    Bf16Scaler scaler_;  // factor of this warp's bf16 keys or values
    float shared_factor_ = Bf16Scaler().factor();  // factor of all values in the buffer

    static constexpr int kInvalidPage = -(1 << 30);
    // bf16: after the slots come eight floats, in two slots' space: the Bf16Scaler factors of the two warps that load values, of
    // the two that load keys, and the inverse factors of all four warps' queries.
    static constexpr int kStepBytes = (kSlots + 2 * kBf16) * kSlotBytes;

public:
    static constexpr int kBytes = 2 * kStepBytes;  // of a set
    __device__ __forceinline__ CooperativeLoader(const DecodeParams& p, const WorkTile& s, int token, void* buffers, int set,
                                                 int row_group)
        : pages_(p, s, token), barrier_(1 + set), buffer_(static_cast<char*>(buffers) + set * kBytes), to_other_buffer_(kBytes / 2),
          token_(token) {
        const bool has_values = has_values_ = row_group & 2;
        const int lane = threadIdx.x & 31, chunk = lane & 7;
        const typename Layout::Lane layout_lane;
        const Operand &k = p.cache.k, &v = p.cache.v;
        lane_token_ = 4 * (row_group & 1) + (lane >> 3);
        columns_ = (has_values ? p.problem.headdim_v : p.problem.headdim) - first_column() - 8 * chunk;
        store_offset_ =
            (has_values ? 64 * kLoads + Layout::value_slot(lane_token_, chunk) : Layout::key_slot(lane_token_, chunk)) * kSlotBytes;
        keys_offset_ = Layout::key_slot(layout_lane) * kSlotBytes;
        values_offset_ = (64 * kLoads + Layout::value_slot(layout_lane)) * kSlotBytes;
        // Hides how these are computed (ptx.cuh): recomputed in each step they would be half of its instructions.
        make_opaque(lane_token_), make_opaque(columns_), make_opaque(store_offset_), make_opaque(keys_offset_),
            make_opaque(values_offset_);
        page_stride_ = select(has_values, k.batch_stride, v.batch_stride);
        row_stride_ = select(has_values, k.row_stride, v.row_stride);
        base_ = select(has_values, k.ptr, v.ptr) + s.head_k * select(has_values, k.head_stride, v.head_stride) + first_column() +
                8 * chunk + lane_token_ * row_stride_;
        enter_page(p);
        from_ += pages_.row * row_stride_;
        load(s.seqlen_k);
    }
    // Stores this step, loads the next if there is one, waits for the other warps. Returns the factor for the accumulated output.
    __device__ __forceinline__ float next_step(const DecodeParams& p, const WorkTile& s, int seqlen_k, bool has_next) {
        buffer_ += to_other_buffer_;
        to_other_buffer_ = -to_other_buffer_;
        if constexpr (kBf16) convert();
#pragma unroll
        for (int i = 0; i < kStepTiles * kLoads; i++)
            *at(store_offset_ + load_offset(i)) = make_uint4(loaded_[i][0], loaded_[i][1], loaded_[i][2], loaded_[i][3]);
        if (has_next) {
            token_ += kStepTokens;
            from_ += kStepTokens * row_stride_;
            if (pages_.advance(p, s)) enter_page(p);
            load(seqlen_k);
        }
        barrier();
        if constexpr (kBf16) return unify_value_scale();
        return 1.f;
    }
    // A tile's operands of the current step: of the lane's token of K, its eight of columns 32 * j to 32 * j + 31; of the lane's
    // token h (0 or 1) of V, its eight of columns 64 * j to 64 * j + 63.
    struct KeyOperands {
        static constexpr bool kTwoScales = false;  // the loader has no int4 cache, whose chunks have two scales
        const CooperativeLoader& loader;
        int tile;
        __device__ __forceinline__ uint4 chunk(int j) const {
            return *loader.at((loader.keys_offset_ ^ Layout::kKeySlotXor * (j % 2) * kSlotBytes) +
                              (tile * kTileSlots + 64 * (j / 2)) * kSlotBytes);
        }
    };
    struct ValueOperands {
        const CooperativeLoader& loader;
        int tile;
        __device__ __forceinline__ uint4 chunk(int j, int h) const {
            return *loader.at(loader.values_offset_ + (tile * kTileSlots + 64 * j + 32 * h) * kSlotBytes);
        }
    };
    __device__ __forceinline__ KeyOperands keys(int tile) const { return {*this, tile}; }
    __device__ __forceinline__ ValueOperands values(int tile) const { return {*this, tile}; }
    // Factor from the accumulated output to the output.
    __device__ __forceinline__ float inverse() const { return inverse_power(shared_factor_); }
    // Keeps the inverse factor of this warp's bf16 queries in both buffers, because registers have no room.
    __device__ __forceinline__ void set_query_inverse(float inverse) {
        for (float* to : {factors(), factors() + to_other_buffer_ / static_cast<int>(sizeof(float))})
            to[4 + threadIdx.x / 32 % 4] = inverse;
    }
    // Factor from the products of fp16 operands to those of bf16 ones, for this token of a tile and its neighbor.
    __device__ __forceinline__ float score_factor(int token) const {
        const volatile float* own = factors();  // volatile: loaded here, not before the products, where registers are few
        // token / 4: which of the two warps that load keys has loaded it
        return own[4 + threadIdx.x / 32 % 4] * inverse_power(own[2 + token / 4]);
    }
    // Returns false after a block-table entry outside the cache. The warp stays in the loop: the others wait at the barrier.
    __device__ __forceinline__ bool page_valid() const { return columns_ != kInvalidPage; }

private:
    __device__ __forceinline__ void barrier() const { named_sync(barrier_, 4 * 32); }
    // Offset of load i of the lane, from its first.
    __device__ __forceinline__ static constexpr int load_offset(int i) {
        return (i / kLoads * kTileSlots + i % kLoads * 64) * kSlotBytes;
    }
    __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(buffer_ + kSlots * kSlotBytes); }
    // Scales loaded bf16 and converts it to fp16 in place. The factor goes to shared memory. Outlying keys saturate: they decide
    // the softmax anyway, and the other keys keep their digits. Values do not saturate. The lambda, called when a factor falls, is
    // for rescaling earlier results: here unify_value_scale() does that, and score_factor() divides scores by each step's factor.
    __device__ __forceinline__ void convert() {
        if (has_values_)
            scaler_.convert(loaded_, [](float) {});
        else
            scaler_.convert<Outliers::kSaturate>(loaded_, [](float) {});
        factors()[(has_values_ ? 0 : 2) + threadIdx.x / 32 % 2] = scaler_.factor();
    }
    // Gives all values of the step one factor, the smaller of the two warps'. If values have grown, the warp with the larger
    // factor rescales what it stored. Returns the factor for the accumulated output.
    __device__ __forceinline__ float unify_value_scale() {
        const float2 both = *reinterpret_cast<const float2*>(factors());
        if (both.x == shared_factor_ && both.y == shared_factor_) return 1.f;
        const float least = fminf(both.x, both.y);
        if (has_values_ && scaler_.factor() != least) {
            // The bound keeps it above 0, which would turn infinities into NaN.
            const float own_change = fmaxf(least / scaler_.factor(), 0x1p-60f);
            scaler_.lower(least);
#pragma unroll 1
            for (int i = 0; i < kStepTiles * kLoads; i++) {
                uint4 x = *at(store_offset_ + load_offset(i));
                for (unsigned* word : {&x.x, &x.y, &x.z, &x.w}) {
                    const float2 y = to_float2(*word);
                    *word = to_half2(y.x * own_change, y.y * own_change);
                }
                *at(store_offset_ + load_offset(i)) = x;
            }
        }
        barrier();
        const float change = least / shared_factor_;
        shared_factor_ = least;
        return change;
    }
    // Returns `other` if `second`, else `first`. The empty asm keeps `first` in a register: else the compiler would index the
    // kernel parameters by a register, from local memory.
    template <class T>
    __device__ __forceinline__ static T select(bool second, T first, T other) {
        asm("" : "+l"(first));
        return second ? other : first;
    }
    __device__ __forceinline__ uint4* at(int offset) const { return reinterpret_cast<uint4*>(buffer_ + offset); }
    __device__ __forceinline__ void enter_page(const DecodeParams& p) {
        const int page = pages_.number();
        if (!has_page(p.cache, page)) columns_ = kInvalidPage;
        from_ = base_ + page * page_stride_;
    }
    // Loads the lane's part of the next step; zeros for tokens and columns that do not exist.
    __device__ __forceinline__ void load(int seqlen_k) {
        int columns = columns_;
        if (token_ + kStepTokens > seqlen_k) {
#pragma unroll
            for (auto& x : loaded_)
#pragma unroll
                for (unsigned& word : x) word = 0;
        }
        load_from<0>(columns, seqlen_k);
    }
    // Load I and those after it: eight columns, 4 words, each. load_columns<N, 4> does nothing unless `columns` > N.
    template <int I>
    __device__ __forceinline__ void load_from(int columns, int seqlen_k) {
        if constexpr (I < kStepTiles * kLoads) {
            constexpr int kTileToken = I / kLoads * kTileTokens, kColumn = I % kLoads * 64;
            if (I % kLoads == 0 && token_ + kTileToken + lane_token_ >= seqlen_k) columns = 0;
            load_columns<kColumn, 4>(columns, loaded_[I], from_ + kTileToken * row_stride_ + kColumn);
            load_from<I + 1>(columns, seqlen_k);
        }
    }
};

}  // namespace decode
