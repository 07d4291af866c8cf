// Dropout, alone or with a bias, in volta forward kernels that require these: overrides draw() and drop() of ScoreFeature
// (score_feature.cuh), which the main loops call (register_q.cuh, shared_q.cuh). Random numbers are Philox4x32 (philox.cuh). It
// multiplies and XORs a counter (column / 4, row, head, offset) with a key, the seed, in each of seven rounds (kPhiloxRounds). So a
// lane's calls share the products of head, of column and of row in rounds 0 and 1. Each product has a low and a high word.
//
// A round multiplies words x and z of the counter (x, y, z, w) by constants. One call gives a lane the numbers (16 bits each) of
// four keys of two rows, r and r + 4.
//
//   PhiloxProduct     one of a round's two products; words low and high
//   PhiloxTerms       the key, and word x after round 0, of a row (the constructor: row 0)
//   of_column, of_head  products of round 0: of x, and of z
//   of_row, of_both   products of round 1: of x, which head and row decide; of z, which column, offset and key decide
//   K                 key of round 1: key_of_round_1()
//   after_round_1()   XORs words of these products and K: the counter after round 1
//   flip_row(bits)    moves terms from row r to row r ^ bits, because a row enters word x by XOR alone
#pragma once

#include "volta/forward/feature_bias.cuh"
#include "volta/forward/score_feature.cuh"

namespace volta {

// What a lane keeps from step to step. kAll: all shared parts of rounds 0 and 1 and the seed, in the lane's scratch (16-byte chunks
// of shared memory, `between` bytes apart). kSeed: the seed, and x after round 0 (of head and row), in registers. kNothing: all is
// computed again, without registers.
enum class DropoutKeeps { kAll, kSeed, kNothing };

// Dropout of packed probabilities: fp16 pairs before O += P V. RowTiles: tiles of 16 rows (mt). Rolled: rounds in a loop.
template <int RowTiles, DropoutKeeps Keeps, bool Rolled>
class DropoutFeature {
    static_assert(RowTiles <= 2, "row + 16 must be row ^ 16, so that rows of both tiles differ in one term");
    static constexpr bool kInMemory = Keeps == DropoutKeeps::kAll;

    PhiloxTerms terms_;  // of the lane's first row; read with kSeed alone
    LaneScratch memory_;  // 16-byte chunks of shared memory that only this lane uses (score_feature.cuh)

    // What all calls of a lane share, as it lies in the lane's scratch: two 16-byte chunks.
    struct KeptTerms {
        u32 key[2];
        u32 offset_and_key, head_and_key;  // offset ^ key[1] of round 0; of_head.low ^ K[0] of round 1
        u32 row_and_key[2], row_low[2];  // of each row tile: of_row.high ^ K[1], of_row.low

        __device__ __forceinline__ void store(const LaneScratch& memory) const {
            memory.store(0, make_uint4(key[0], key[1], offset_and_key, head_and_key));
            memory.store(1, make_uint4(row_and_key[0], row_and_key[1], row_low[0], row_low[1]));
        }
        __device__ __forceinline__ static KeptTerms load(const LaneScratch& memory) {
            const uint4 all = memory.load(0), rows = memory.load(1);
            return {{all.x, all.y}, all.z, all.w, {rows.x, rows.y}, {rows.z, rows.w}};
        }
    };

    // remat_* functions compute or load again what would otherwise hold a register. Heads count over all batch entries of the call.
    // This launch begins with entry first_batch.
    __device__ __forceinline__ static u32 remat_head(const FwdParams& p) {
        return (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads +
               ::remat_head<ForwardLayout::kEitherOrder>(p.problem);
    }
    // Loads the second number of the generator's state, its offset (the first is the seed); volatile, so that loads stay here.
    __device__ __forceinline__ static u32 remat_offset(const FwdParams& p) { return load_global1(p.score_options.rng_state + 1); }
    // Returns the terms of the lane's first row: the constructor's are those of row 0.
    __device__ __forceinline__ static PhiloxTerms remat_terms(const FwdParams& p, const ForwardLane& lane, int row) {
        const uint2 seed = load_global2(p.score_options.rng_state);
        PhiloxTerms terms(seed.x, seed.y, remat_head(p));
        terms.flip_row(row + ForwardLayout::first_query(lane));
        return terms;
    }

public:
    static constexpr int kLaneScratchChunks = kInMemory ? 2 : 0;
    // The random words of each row tile, for the lane's scores of 16 keys.
    struct Numbers {
        uint4 words[RowTiles];
    };

    __device__ __forceinline__ DropoutFeature(const FwdParams& p, const LaneScratch& memory, int row) : memory_(memory) {
        if constexpr (Keeps == DropoutKeeps::kNothing) return;
        const Philox philox(p.score_options.rng_state, remat_head(p));
        terms_ = PhiloxTerms(philox.key[0], philox.key[1], philox.head);
        terms_.flip_row(row + ForwardLayout::first_query(ForwardLane()));
        if constexpr (kInMemory) {
            static_assert(RowTiles == 2, "two chunks");
            const PhiloxProduct first = terms_.of_row(), second = terms_.of_row(16);
            const u32 k0 = terms_.key_of_round_1(0), k1 = terms_.key_of_round_1(1);
            KeptTerms{{terms_.key[0], terms_.key[1]},
                      philox.offset ^ terms_.key[1],
                      PhiloxTerms::head_low(philox.head) ^ k0,
                      {first.high ^ k1, second.high ^ k1},
                      {first.low, second.low}}
                .store(memory);
        }
    }
    // Computes the lane's numbers for 16 keys. `row`: the warp's first row. `key`: the first of these keys.
    __device__ __forceinline__ void draw(Numbers& numbers, const FwdParams& p, int row, int key) const {
        u32 keys[2];
        if constexpr (kInMemory) {
            __syncwarp();  // ptxas would otherwise load these together with earlier loads
            const ForwardLane lane(remat_thread_index() & 31);
            const KeptTerms kept = KeptTerms::load(memory_);
            const PhiloxProduct of_column = PhiloxTerms::of_column(key + ForwardLayout::first_key(lane));
            const PhiloxProduct of_both = PhiloxTerms::of_both(of_column, kept.offset_and_key);
            keys[0] = kept.key[0], keys[1] = kept.key[1];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)  // 0, 0: the kept terms have K already
                numbers.words[mt] =
                    PhiloxTerms::after_round_1(of_both, of_column, kept.head_and_key, kept.row_and_key[mt], kept.row_low[mt], 0, 0);
        } else {
            const ForwardLane lane(remat_thread_index() & 31);
            const PhiloxTerms terms = Keeps == DropoutKeeps::kSeed ? terms_ : remat_terms(p, lane, row);
            const u32 k0 = terms.key_of_round_1(0), k1 = terms.key_of_round_1(1);
            const PhiloxProduct of_column = PhiloxTerms::of_column(key + ForwardLayout::first_key(lane));
            const PhiloxProduct of_both = PhiloxTerms::of_both(of_column, remat_offset(p) ^ terms.key[1]);
            const u32 head_low = PhiloxTerms::head_low(remat_head(p));
            keys[0] = terms.key[0], keys[1] = terms.key[1];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                const PhiloxProduct of_row = terms.of_row(16 * mt);
                numbers.words[mt] = PhiloxTerms::after_round_1(of_both, of_column, head_low, of_row.high, of_row.low, k0, k1);
            }
        }
        constexpr int kUnroll = Rolled ? 1 : kPhiloxRounds;  // rolled to fit the instruction cache
#pragma unroll kUnroll
        for (int round = 2; round < kPhiloxRounds; round++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
                philox_round(numbers.words[mt], keys[0] + round * kPhiloxKeyIncrements[0],
                             keys[1] + round * kPhiloxKeyIncrements[1]);
    }
    // Zeroes dropped probabilities of row tile mt. x, y: pairs of the lane's two rows. u: 0 for its keys 0 and 2, 1 for 1 and 3:
    // philox_word() has their two numbers, and kept_halves() 0xffff for each that is kept.
    __device__ __forceinline__ static void drop(u32& x, u32& y, const Numbers& numbers, const FwdParams& p, int mt, int u) {
        static_assert(ForwardLayout::key_slot(1) == 2 && ForwardLayout::key_slot(4) == 1 && ForwardLayout::row_of(2) == 1,
                      "the words of philox_word()");
        const DropoutRule rule(p.score_options);
        x &= rule.kept_halves(philox_word(numbers.words[mt], 0, u));
        y &= rule.kept_halves(philox_word(numbers.words[mt], 1, u));
    }
};

// Adds dropout to Other, the base class of plain kernels or the bias. KeyTiles: tiles of 16 keys a step. Grid: the kernel's grid
// policy (layout.cuh).
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

// With more than one tile of keys the code of a step is as long as the instruction cache, so rounds are rolled.
template <int RowTiles, int KeyTiles, class Grid>
using BiasAndDropout = WithDropout<RowTiles, KeyTiles, Grid, ScoreFeature<RowTiles, KeyTiles, kFeatureBias, Grid>,
                                   KeyTiles == 1 ? DropoutKeeps::kAll : DropoutKeeps::kNothing, (KeyTiles > 1)>;
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureBias | kFeatureDropout, Grid> : public BiasAndDropout<RowTiles, KeyTiles, Grid> {
public:
    using BiasAndDropout<RowTiles, KeyTiles, Grid>::BiasAndDropout;
};

}  // namespace volta
