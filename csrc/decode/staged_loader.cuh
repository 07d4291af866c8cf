// Loads tiles of int4 keys and values in stages, because direct loads keep too few bytes in flight to hide DRAM latency.
// mainloop.cuh uses it where kStaged (tile_scheduler.cuh). A step is the tokens that a warp computes at once, kStepTokens:
// kStepTiles tiles of kTileTokens. Addresses count bytes: a CacheUnit of a quantized cache is a byte, two int4 numbers.
//
// Each warp has loads in flight, into registers, for the next kSteps steps (one or two). It computes from the kSteps steps
// before, which lie in its own part of shared memory. When those are used up, it stores the registers there and loads again.
// Only this warp reads or writes its part, so __syncwarp is the only synchronization. Scales travel the same way.
#pragma once

#include "decode/direct_loader.cuh"  // DirectLoader; OperandCoords; StepScales (scales.cuh): scales in registers

namespace decode {

// Scales and zero points of a step's tokens in shared memory: StepScales::kCount tensors of one float a token, one tensor after the
// other. StepScales holds them in flight, kRegisters in each lane.
struct StagedScales {
    const float* own;
    // The values of two neighboring tokens.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        return *reinterpret_cast<const float2*>(own + tensor * kStepTokens + token);
    }
};

// A set is the RowGroups warps with the same tokens and columns, each for other query rows. `row_group` is the warp's number in its
// set, `set` that of the set in the block. Layout says which token and columns each lane needs as an operand.
template <class Layout, int RowGroups>
class StagedLoader {
    // Steps in flight. A warp's step (K, V and scales) has 1280, 2304 and 2176 bytes at headdims 64, 128 and 256. With 16, 12 or 8
    // warps an SM and 2, 1 or 2 steps these are 41, 28 and 35 KB in flight. 19 KB hide 3000 cycles of latency (under load; about 7
    // times an idle V100's): an SM's share of the attained bandwidth is 783 GB/s / 80 SMs / 1.53 GHz = 6.4 bytes a cycle.
    static constexpr int kSteps = HEADDIM == 128 ? 1 : 2;
    // kGroupHeaddim: columns of a row that a warp takes, all of them up to headdim 256 (column_groups.cuh).
    // unit_offset(): bytes from a row's first column to another.
    static constexpr int kRowBytes = unit_offset<kKeyFormat>(kGroupHeaddim), kChunkBytes = sizeof(uint4);
    static constexpr int kLanes = kRowBytes / kChunkBytes, kRows = 32 / kLanes;  // lanes that load one row; rows of one load
    static constexpr int kLoads = kStepTokens / kRows;  // of a step's keys, or of its values
    // Bytes from one row to the next. Rows of 128 bytes cover all banks, so 32 bytes of padding follow each.
    static constexpr int kPitch = kRowBytes % 128 == 0 ? kRowBytes + 32 : kRowBytes;
    static constexpr int kValuesAt = kStepTokens * kPitch, kScalesAt = 2 * kValuesAt;
    static constexpr int kStepBytes = kScalesAt + StepScales::kCount * kStepTokens * static_cast<int>(sizeof(float));
    static_assert(!kStaged ||
                      (kKeyFormat == kValueFormat && HEADDIM == HEADDIM_V && kStepTokens % kRows == 0 && StepScales::kLanes == 32),
                  "loads cover the rows and scales of a step without remainder");

    // Coords of DirectLoader: which row (token of the step) and columns a lane loads, 16 bytes of a row.
    struct Lines {
        __device__ __forceinline__ static int key_token() { return threadIdx.x % 32 / kLanes; }
        __device__ __forceinline__ static int value_token() { return key_token(); }
        __device__ __forceinline__ static int key_column() {
            return first_column() + threadIdx.x % kLanes * (kGroupHeaddim / kLanes);
        }
        __device__ __forceinline__ static int value_column() { return key_column(); }
    };
    using Operands = OperandCoords<Layout>;

    DirectLoader<Lines> direct_;
    bool page_valid_ = true;
    char *buffer_, *step_at_;  // the warp's part of shared memory (keys, values and scales of kSteps steps); the current step in it
    int staged_steps_ = 0;  // steps in shared memory after the current one
    unsigned keys_[kSteps][kLoads][4] = {}, values_[kSteps][kLoads][4] = {};
    StepScales scales_[kSteps];

public:
    static constexpr int kBytes = kSteps * kStepBytes;  // of a warp

    __device__ __forceinline__ StagedLoader(const DecodeParams& p, const WorkTile& s, int token, void* buffers, int set,
                                            int row_group)
        : direct_(p, s, token), buffer_(static_cast<char*>(buffers) + (set * RowGroups + row_group) * kBytes), step_at_(buffer_) {}
    // Loads the first steps. `left`: steps of the warp.
    __device__ __forceinline__ void begin(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left) {
        load(p, s, seqlen_k, left, false);
    }
    // Moves to the next step. `left`: steps after it.
    __device__ __forceinline__ void next_step(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left) {
        step_at_ += kStepBytes;
        if (staged_steps_ == 0) {
            __syncwarp();  // all lanes have read what is there
            stage();
            load(p, s, seqlen_k, left + 1 - kSteps, true);  // this step and `left` others remain, and kSteps are staged
            __syncwarp();
            step_at_ = buffer_;
            staged_steps_ = kSteps;
        }
        staged_steps_--;
    }
    template <int Loads>
    __device__ __forceinline__ void keys(Keys<Loads> (&k)[kStepTiles]) const {
        const char* from =
            step_at_ + Operands::key_token() * kPitch + unit_offset<kKeyFormat>(Operands::key_column() - first_column());
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++) k[tile].load_shared_row(from + kTileTokens * tile * kPitch);
    }
    template <int Loads>
    __device__ __forceinline__ void values(Values<Loads> (&v)[kStepTiles]) const {
        const char* from = step_at_ + kValuesAt + Operands::value_token() * kPitch +
                           unit_offset<kValueFormat>(Operands::value_column() - first_column_v());
        unrolled<kStepTiles, 2>([&](int tile, int h) {
            v[tile].token[h].load_shared_row(from + (kTileTokens * tile + Operands::kValueTokens * h) * kPitch);
        });
    }
    __device__ __forceinline__ StagedScales scales() const { return {reinterpret_cast<const float*>(step_at_ + kScalesAt)}; }
    // Returns false after a block-table entry outside the cache. Nothing after it is loaded.
    __device__ __forceinline__ bool page_valid() const { return page_valid_; }

private:
    // Loads the kSteps steps after those loaded before. `left`: steps that remain to be loaded. `advances`: direct_ is still at a
    // step loaded before; false at the beginning.
    __device__ __forceinline__ void load(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left, bool advances) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (left <= step) break;
            if (advances || step > 0) direct_.advance(p, s);
            page_valid_ &= direct_.page_valid();
            if (!page_valid_) break;
            if (direct_.token() + kStepTokens > seqlen_k) {  // rows past the end are not loaded: 0, not those of an earlier step
#pragma unroll
                for (int i = 0; i < 4 * kLoads; i++) keys_[step][i / 4][i % 4] = values_[step][i / 4][i % 4] = 0;
            }
            const int rows = seqlen_k - direct_.token() - Lines::key_token();
            load_rows(Lines::key_column() < p.problem.headdim ? rows : 0, keys_[step], direct_.keys(), p.cache.k.row_stride);
            load_rows(Lines::value_column() < p.problem.headdim_v ? rows : 0, values_[step], direct_.values(),
                      p.cache.v.row_stride);
            direct_.load_scales(p, seqlen_k, scales_[step]);
        }
    }
    // Loads as many of the kLoads rows as exist; load_columns<N, 4>() loads 16 bytes if rows > N. `rows`: from the lane's own on.
    template <int I = 0>
    __device__ __forceinline__ static void load_rows(int rows, unsigned (&x)[kLoads][4], const CacheUnit* from, long long stride) {
        if constexpr (I < kLoads) {
            load_columns<I * kRows, 4>(rows, x[I], from + I * kRows * stride);
            load_rows<I + 1>(rows, x, from, stride);
        }
    }
    // Stores the loaded steps to shared memory.
    __device__ __forceinline__ void stage() {
        const int row = Lines::key_token() * kPitch + threadIdx.x % kLanes * kChunkBytes;
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            char* to = buffer_ + step * kStepBytes;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                const unsigned (&k)[4] = keys_[step][i], (&v)[4] = values_[step][i];
                *reinterpret_cast<uint4*>(to + row + i * kRows * kPitch) = make_uint4(k[0], k[1], k[2], k[3]);
                *reinterpret_cast<uint4*>(to + kValuesAt + row + i * kRows * kPitch) = make_uint4(v[0], v[1], v[2], v[3]);
            }
#pragma unroll
            for (int i = 0; i < StepScales::kRegisters; i++)
                *reinterpret_cast<float*>(to + kScalesAt + 4 * (32 * i + threadIdx.x % 32)) = scales_[step].own[i];
        }
    }
};

}  // namespace decode
