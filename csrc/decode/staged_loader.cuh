// Steps of an int4 cache, which are too few bytes for a slow memory. A warp's registers have some on their way all the time, as
// lines of the cache; in its part of shared memory are those before, where it finds operands and scales. Where these are used up,
// it lays down what has come and loads as much again.
//
// Nobody else reads or writes a warp's part, so __syncwarp is all that this needs.
#pragma once

#include "decode/direct_loader.cuh"

namespace decode {

// Scales of a step's tokens in shared memory, the tensors of StepScales one after the other.
struct StagedScales {
    const float* own;
    // Of two neighbouring tokens.
    __device__ __forceinline__ float2 pair(int tensor, int token) const {
        return *reinterpret_cast<const float2*>(own + tensor * kStepTokens + token);
    }
};

// Of warp `group` of the `Groups` that have a set's tokens.
template <class Layout, int Groups>
class StagedLoader {
    // Steps on their way, of 1280, 2304 and 2176 bytes: of the 16, 12 or 8 warps that registers have room for 41, 28 and 35 KB,
    // where a DRAM that answers after 3000 clocks wants 20 all the time.
    static constexpr int kSteps = HEADDIM == 128 ? 1 : 2;
    static constexpr int kRowBytes = unit_offset(HEADDIM), kChunkBytes = sizeof(uint4);
    static constexpr int kLanes = kRowBytes / kChunkBytes, kRows = 32 / kLanes;  // that have a row; rows of a load
    static constexpr int kLoads = kStepTokens / kRows;  // of a step's keys, or its values
    // Rows as long as all banks together are laid down 32 bytes further each.
    static constexpr int kPitch = kRowBytes % 128 == 0 ? kRowBytes + 32 : kRowBytes;
    static constexpr int kValuesAt = kStepTokens * kPitch, kScalesAt = 2 * kValuesAt;
    static constexpr int kStepBytes = kScalesAt + StepScales::kCount * kStepTokens * static_cast<int>(sizeof(float));
    static_assert(!kZeroPoints || (HEADDIM == HEADDIM_V && kStepTokens % kRows == 0 && StepScales::kLanes == 32), "whole loads");

    // What a lane loads: of a row 16 bytes.
    struct Lines {
        __device__ __forceinline__ static int key_token() { return threadIdx.x % 32 / kLanes; }
        __device__ __forceinline__ static int value_token() { return key_token(); }
        __device__ __forceinline__ static int key_column() { return threadIdx.x % kLanes * (HEADDIM / kLanes); }
        __device__ __forceinline__ static int value_column() { return key_column(); }
    };
    using Operands = OperandCoords<Layout>;

    DirectLoader<Lines> direct_;
    bool page_valid_ = true;
    char *buffer_, *step_at_;  // the warp's part, and of it the step's
    int staged_steps_ = 0;  // steps behind that one that lie there
    unsigned keys_[kSteps][kLoads][4] = {}, values_[kSteps][kLoads][4] = {};
    StepScales scales_[kSteps];

public:
    static constexpr int kBytes = kSteps * kStepBytes;  // of a warp

    __device__ __forceinline__ StagedLoader(const DecodeParams& p, const WorkTile& s, int token, void* buffers, int set, int group)
        : direct_(p, s, token), buffer_(static_cast<char*>(buffers) + (set * Groups + group) * kBytes), step_at_(buffer_) {}
    // The first steps of `left`.
    __device__ __forceinline__ void begin(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left) {
        load(p, s, seqlen_k, left, false);
    }
    // Goes to the next step, behind which `left` come.
    __device__ __forceinline__ void next_step(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left) {
        step_at_ += kStepBytes;
        if (staged_steps_ == 0) {
            __syncwarp();  // all have read what lies there
            stage();
            load(p, s, seqlen_k, left + 1 - kSteps, true);
            __syncwarp();
            step_at_ = buffer_;
            staged_steps_ = kSteps;
        }
        staged_steps_--;
    }
    template <int Loads>
    __device__ __forceinline__ void keys(Keys<Loads> (&k)[kStepTiles]) const {
        const char* from = step_at_ + Operands::key_token() * kPitch + unit_offset(Operands::key_column());
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++) k[tile].load_shared_row(from + kTileTokens * tile * kPitch);
    }
    template <int Loads>
    __device__ __forceinline__ void values(Values<Loads> (&v)[kStepTiles]) const {
        const char* from = step_at_ + kValuesAt + Operands::value_token() * kPitch + unit_offset(Operands::value_column());
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                v[tile].token[h].load_shared_row(from + (kTileTokens * tile + Operands::kValueTokens * h) * kPitch);
    }
    __device__ __forceinline__ StagedScales scales() const { return {reinterpret_cast<const float*>(step_at_ + kScalesAt)}; }
    // False: a table has named a page that there is not. What comes after it is not loaded.
    __device__ __forceinline__ bool page_valid() const { return page_valid_; }

private:
    // The steps behind those that were loaded, of `left`.
    __device__ __forceinline__ void load(const DecodeParams& p, const WorkTile& s, int seqlen_k, int left, bool advances) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) {
            if (left <= step) break;
            if (advances || step > 0) direct_.advance(p, s);
            page_valid_ &= direct_.page_valid();
            if (!page_valid_) break;
            if (direct_.token() + kStepTokens > seqlen_k) {
#pragma unroll
                for (int i = 0; i < 4 * kLoads; i++) keys_[step][i / 4][i % 4] = values_[step][i / 4][i % 4] = 0;
            }
            // rows from the lane's own on
            const int rows = seqlen_k - direct_.token() - Lines::key_token();
            load_rows(Lines::key_column() < p.problem.headdim ? rows : 0, keys_[step], direct_.keys(), p.cache.k.row_stride);
            load_rows(Lines::value_column() < p.problem.headdim_v ? rows : 0, values_[step], direct_.values(),
                      p.cache.v.row_stride);
            direct_.load_scales(p, seqlen_k, scales_[step]);
        }
    }
    // Of as many rows as there are.
    template <int I = 0>
    __device__ __forceinline__ static void load_rows(int rows, unsigned (&x)[kLoads][4], const CacheUnit* from, long long stride) {
        if constexpr (I < kLoads) {
            load_columns<I * kRows, 4>(rows, x[I], from + I * kRows * stride);
            load_rows<I + 1>(rows, x, from, stride);
        }
    }
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
