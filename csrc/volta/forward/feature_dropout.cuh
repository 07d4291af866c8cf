// Dropout, alone or with a bias, in volta forward kernels of one or two features (score_feature.cuh, philox.cuh).
#pragma once

#include "volta/forward/feature_bias.cuh"
#include "volta/forward/score_feature.cuh"

namespace volta {

// What a lane keeps for dropout. All Philox calls of a lane share parts of rounds 0 and 1. kAll: these and the seed, in the
// lane's scratch. kSeed: the seed, and round 0 of head and row, in registers. kNothing: all is computed again, for want of
// registers.
enum class DropoutKeeps { kAll, kSeed, kNothing };

// Dropout of packed probabilities. Rolled: rounds in a rolled loop.
template <int RowTiles, DropoutKeeps Keeps, bool Rolled>
class DropoutFeature {
    static_assert(RowTiles <= 2, "16 rows further is bit 4, which a warp's first rows do not have");
    static constexpr bool kInMemory = Keeps == DropoutKeeps::kAll;

    // The seed, and round 0 of head and row.
    struct Seed {
        u32 key[2], row;  // of the lane's first row
    };
    Seed seed_;  // with kSeed
    LaneScratch memory_;

    __device__ __forceinline__ static u32 remat_head(const FwdParams& p) {
        return (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads +
               ::remat_head<ForwardLayout::kEitherOrder>(p.problem);
    }
    __device__ __forceinline__ static Seed seed(const Philox& philox, int row) {
        return {
            {philox.key[0], philox.key[1]},
            philox_product_z(philox.head).high ^ philox.key[0] ^ static_cast<u32>(row + ForwardLayout::first_query(ForwardLane()))};
    }
    // Loads the generator's state again; volatile, so that the loads stay here.
    __device__ __forceinline__ static u32 remat_offset(const FwdParams& p) {
        u32 offset;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(offset) : "l"(p.score_options.rng_state + 1));
        return offset;
    }
    __device__ __forceinline__ static Seed remat_seed(const FwdParams& p, const ForwardLane& lane, int row) {
        Seed x;
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.key[0]), "=r"(x.key[1]) : "l"(p.score_options.rng_state));
        x.row = philox_product_z(remat_head(p)).high ^ x.key[0] ^ static_cast<u32>(row + ForwardLayout::first_query(lane));
        return x;
    }
    __device__ __forceinline__ static PhiloxProduct of_row(const Seed& x, int mt) { return philox_product_x(x.row ^ 16 * mt); }

public:
    static constexpr int kLaneScratchChunks = kInMemory ? 2 : 0;
    struct Numbers {
        uint4 of[RowTiles];
    };

    __device__ __forceinline__ DropoutFeature(const FwdParams& p, const LaneScratch& memory, int row) : memory_(memory) {
        if constexpr (Keeps == DropoutKeeps::kNothing) return;
        const Philox philox(p.score_options.rng_state, remat_head(p));
        seed_ = seed(philox, row);
        if constexpr (kInMemory) {
            static_assert(RowTiles == 2, "two chunks");
            const PhiloxProduct a = of_row(seed_, 0), b = of_row(seed_, 1);
            // those of round 1
            const u32 k0 = seed_.key[0] + kPhiloxKeyIncrements[0], k1 = seed_.key[1] + kPhiloxKeyIncrements[1];
            memory.store(
                0, make_uint4(seed_.key[0], seed_.key[1], philox.offset ^ seed_.key[1], philox_product_z(philox.head).low ^ k0));
            memory.store(1, make_uint4(a.high ^ k1, b.high ^ k1, a.low, b.low));
        }
    }
    __device__ __forceinline__ void draw(Numbers& numbers, const FwdParams& p, int row, int key) const {
        u32 keys[2];
        if constexpr (kInMemory) {
            __syncwarp();  // ptxas would otherwise load these together with earlier loads
            const ForwardLane lane(remat_thread_index() & 31);
            const uint4 x = memory_.load(0), of_rows = memory_.load(1);
            const u32 column = key + ForwardLayout::first_key(lane);
            const PhiloxProduct of_column = philox_product_x(column / 4), of_both = philox_product_z(of_column.high ^ x.z);
            keys[0] = x.x, keys[1] = x.y;
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
                numbers.of[mt] = make_uint4(of_both.high ^ x.w, of_both.low, (mt ? of_rows.y : of_rows.x) ^ of_column.low,
                                            mt ? of_rows.w : of_rows.z);
        } else {
            const ForwardLane lane(remat_thread_index() & 31);
            const Seed x = Keeps == DropoutKeeps::kSeed ? seed_ : remat_seed(p, lane, row);
            const u32 k0 = x.key[0] + kPhiloxKeyIncrements[0], k1 = x.key[1] + kPhiloxKeyIncrements[1];
            const u32 column = key + ForwardLayout::first_key(lane);
            const PhiloxProduct of_column = philox_product_x(column / 4),
                                of_both = philox_product_z(of_column.high ^ remat_offset(p) ^ x.key[1]);
            const u32 of_head = philox_product_z(remat_head(p)).low;
            keys[0] = x.key[0], keys[1] = x.key[1];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                const PhiloxProduct remat_row = of_row(x, mt);
                numbers.of[mt] =
                    make_uint4(of_both.high ^ of_head ^ k0, of_both.low, remat_row.high ^ of_column.low ^ k1, remat_row.low);
            }
        }
        constexpr int kUnroll = Rolled ? 1 : kPhiloxRounds;  // rolled to fit the instruction cache
#pragma unroll kUnroll
        for (int round = 2; round < kPhiloxRounds; round++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
                philox_round(numbers.of[mt], keys[0] + round * kPhiloxKeyIncrements[0], keys[1] + round * kPhiloxKeyIncrements[1]);
    }
    __device__ __forceinline__ static void drop(u32& x, u32& y, const Numbers& numbers, const FwdParams& p, int mt, int u) {
        static_assert(ForwardLayout::key_slot(1) == 2 && ForwardLayout::key_slot(4) == 1 && ForwardLayout::row_of(2) == 1,
                      "the words of Philox::numbers");
        const DropoutRule rule(p.score_options);
        const uint4& n = numbers.of[mt];
        x &= rule.kept_halves(u ? n.y : n.x);
        y &= rule.kept_halves(u ? n.w : n.z);
    }
};

// Adds dropout to another feature.
template <int RowTiles, int KeyTiles, class Grid, class Other, DropoutKeeps Keeps, bool Rolled = false>
class WithDropout : public Other {
    static_assert(Grid::kHasHeadAndBatchAxes, "the grid has axes for head and batch");
    using Dropout = DropoutFeature<RowTiles, Keeps, Rolled>;
    Dropout dropout_;

public:
    using Numbers = typename Dropout::Numbers;
    static constexpr int kLaneScratchChunks = Other::kLaneScratchChunks + Dropout::kLaneScratchChunks;

    __device__ __forceinline__ WithDropout(const FwdParams& p, const Grid& grid, const Mask& mask,
                                           typename Other::Unmasked& unmasked, const LaneScratch& memory, int row, int key)
        : Other(p, grid, mask, unmasked, memory, row, key),
          dropout_(p, LaneScratch{memory.first + Other::kLaneScratchChunks * memory.between, memory.between}, row) {}
    __device__ __forceinline__ void draw(Numbers& numbers, const FwdParams& p, int row, int key) const {
        dropout_.draw(numbers, p, row, key);
    }
    __device__ __forceinline__ void drop(u32& x, u32& y, const Numbers& numbers, const FwdParams& p, int mt, int u) const {
        dropout_.drop(x, y, numbers, p, mt, u);
    }
};

template <int RowTiles, int KeyTiles, class Grid>
using Dropout = WithDropout<RowTiles, KeyTiles, Grid, ScoreFeature<RowTiles, KeyTiles, 0, Grid>,
                            KeyTiles == 1 ? DropoutKeeps::kAll : DropoutKeeps::kSeed>;
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureDropout, Grid> : public Dropout<RowTiles, KeyTiles, Grid> {
public:
    using Dropout<RowTiles, KeyTiles, Grid>::Dropout;
};

// With more than one tile of keys the code of a step is as long as the instruction cache.
template <int RowTiles, int KeyTiles, class Grid>
using BiasAndDropout = WithDropout<RowTiles, KeyTiles, Grid, ScoreFeature<RowTiles, KeyTiles, kFeatureBias, Grid>,
                                   KeyTiles == 1 ? DropoutKeeps::kAll : DropoutKeeps::kNothing, (KeyTiles > 1)>;
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureBias | kFeatureDropout, Grid> : public BiasAndDropout<RowTiles, KeyTiles, Grid> {
public:
    using BiasAndDropout<RowTiles, KeyTiles, Grid>::BiasAndDropout;
};

}  // namespace volta
