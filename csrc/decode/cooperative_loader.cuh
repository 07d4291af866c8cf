// Steps of rows so many that four warps need them: each loads a part of a step, and lays it down in shared memory for all.
//
// The bytes that a neighbour has read are in the first cache, but there operands are dear: eight lanes have 16 bytes each of four
// tokens, and the cache gives one line a clock. A warp here loads lines, four tokens of 128 bytes at a time, and from shared memory
// eight lanes have their 16 bytes in a clock. The operands' registers are not needed for what is on its way.
//
// There are two buffers: what a warp lays down before a barrier, all have read before the barrier before.
//
// What is laid down is fp16: of a cache of bf16 it is converted once, by the warp that has loaded it.
//
// Of a Layout whose kShares is true
//   key_slot(token, chunk)    where, of a block of 64 slots, the chunk of eight of 64 columns lies
//   key_slot(lane)            where the lane's operands of the first 32 columns do. Those of the others lie at that ^ kKeySlots
//   value_slot(token, chunk), value_slot(lane)   the same of values: of the lane's token value_token; of the other 32 slots on
#pragma once

#include "decode/bf16_value.cuh"
#include "decode/cache_registers.cuh"
#include "decode/page_iterator.cuh"

namespace decode {

// Of a warp, number `group` of the four of a set: it loads keys or values of four tokens of each tile, 64 columns at a time.
template <class Layout>
class CooperativeLoader {
    static constexpr int kLoads = HEADDIM / 64;  // of a tile
    static constexpr int kSlotBytes = sizeof(uint4);
    static constexpr int kTileSlots = 2 * 64 * kLoads, kSlots = kStepTiles * kTileSlots;  // of a tile: keys, then values
    static_assert(HEADDIM == HEADDIM_V && HEADDIM % 64 == 0, "whole loads");

    PageIterator pages_;
    const unsigned short *base_, *from_;  // of this lane: row 0 of page 0; what it loads next
    long long page_stride_, row_stride_;
    int lane_token_;  // of a step's tokens the lane's
    int columns_;  // that its row has from the lane's on; kNone: a table has named a page that there is not
    int barrier_;  // of the set
    bool has_values_;  // what this warp loads
    char* buffer_;  // of the step that was laid down last
    int to_other_buffer_;  // from there to the other buffer
    int store_offset_, keys_offset_, values_offset_;  // in either, of this lane: its first load's place; its operands'
    int token_;  // the next step's first
    unsigned loaded_[kStepTiles * kLoads][4] = {};
    Bf16ValueScaler value_scaler_;  // what this warp's values of bf16 are multiplied with,
    float shared_factor_ = Bf16ValueScaler().factor();  // and all that have been laid down

    static constexpr int kInvalidPage = -(1 << 30);
    // Behind the slots the two warps that load values say what these have been multiplied with.
    static constexpr int kStepBytes = (kSlots + kBf16) * kSlotBytes;

public:
    static constexpr int kBytes = 2 * kStepBytes;  // of a set
    __device__ __forceinline__ CooperativeLoader(const DecodeParams& p, const WorkTile& s, int token, void* buffers, int set,
                                                 int group)
        : pages_(p, s, token), barrier_(1 + set), buffer_(static_cast<char*>(buffers) + set * kBytes), to_other_buffer_(kBytes / 2),
          token_(token) {
        const bool has_values = has_values_ = group & 2;
        const int lane = threadIdx.x & 31, chunk = lane & 7;
        const typename Layout::Lane layout_lane;
        const Operand &k = p.cache.k, &v = p.cache.v;
        lane_token_ = 4 * (group & 1) + (lane >> 3);
        columns_ = (has_values ? p.problem.headdim_v : p.problem.headdim) - 8 * chunk;
        store_offset_ =
            (has_values ? 64 * kLoads + Layout::value_slot(lane_token_, chunk) : Layout::key_slot(lane_token_, chunk)) * kSlotBytes;
        keys_offset_ = Layout::key_slot(layout_lane) * kSlotBytes;
        values_offset_ = (64 * kLoads + Layout::value_slot(layout_lane)) * kSlotBytes;
        // computed again at each step, these would be half of its instructions
        keep_in_register(lane_token_), keep_in_register(columns_), keep_in_register(store_offset_), keep_in_register(keys_offset_),
            keep_in_register(values_offset_);
        page_stride_ = select(has_values, k.batch_stride, v.batch_stride);
        row_stride_ = select(has_values, k.row_stride, v.row_stride);
        base_ = select(has_values, k.ptr, v.ptr) + s.head_k * select(has_values, k.head_stride, v.head_stride) + 8 * chunk +
                lane_token_ * row_stride_;
        enter_page(p);
        from_ += pages_.row * row_stride_;
        load(s.seqlen_k);
    }
    // Lays the step down, loads the next, if there is one, and waits for what the others lay down. Returns by what all that has
    // been accumulated is to be multiplied.
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
    // Operands of the step, as products take them.
    struct KeyOperands {
        static constexpr bool kTwoScales = false;
        const CooperativeLoader& loader;
        int tile;
        __device__ __forceinline__ uint4 chunk(int j) const {
            return *loader.at((loader.keys_offset_ ^ Layout::kKeySlots * (j % 2) * kSlotBytes) +
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
    // What makes outputs of what is accumulated.
    __device__ __forceinline__ float inverse() const { return 1.f / shared_factor_; }
    // False: a table has named a page that there is not. Nobody leaves for it: others wait for what this warp lays down.
    __device__ __forceinline__ bool page_valid() const { return columns_ != kInvalidPage; }

private:
    __device__ __forceinline__ void barrier() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "n"(4 * 32) : "memory"); }
    // Of the lane's loads, tile by tile.
    __device__ __forceinline__ static constexpr int load_offset(int i) {
        return (i / kLoads * kTileSlots + i % kLoads * 64) * kSlotBytes;
    }
    __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(buffer_ + kSlots * kSlotBytes); }
    // Of bf16, what is to be laid down: values by a factor that the others are told.
    __device__ __forceinline__ void convert() {
        if (has_values_) {
            value_scaler_.convert(loaded_, [](float) {});
            factors()[threadIdx.x / 32 % 2] = value_scaler_.factor();
        } else {
#pragma unroll
            for (auto& x : loaded_)
#pragma unroll
                for (unsigned& word : x) word = bf16x2_to_half2(word);
        }
    }
    // All that a step has is to have been multiplied with one factor, the least of them: where values grow beyond those of before,
    // the warps that had others lay down theirs anew.
    __device__ __forceinline__ float unify_value_scale() {
        const float2 both = *reinterpret_cast<const float2*>(factors());
        if (both.x == shared_factor_ && both.y == shared_factor_) return 1.f;
        const float least = fminf(both.x, both.y);
        if (has_values_ && value_scaler_.factor() != least) {
            // (0 would make NaN of infinities)
            const float own_change = fmaxf(least / value_scaler_.factor(), 0x1p-60f);
            value_scaler_.lower(least);
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
    // By a select: the compiler would index the parameters by a register.
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
    // Of tokens and columns that do not exist: zeros.
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
