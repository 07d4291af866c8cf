// A warp's scores between the two products of the forward pass: modifiers, mask, references, dropout. For any layout
// (score_layout.cuh).
//
// What only some problems or some tiles ask for is derived again, from parameters and special registers, where it is used:
// registers are short, and it then holds none in between.
#pragma once

#include "forward/block.cuh"
#include "mask.cuh"
#include "score_layout.cuh"
#include "score_mod.cuh"
#include "seqlen_info.cuh"
#include "softmax.cuh"
#include "tile.cuh"

__device__ __forceinline__ int remat_lane() { return remat_thread_index() & 31; }

// The softmax state of a warp's rows: RowTiles tiles.
template <class Layout, int RowTiles>
struct SoftmaxRows {
    SoftmaxRow row[RowTiles][Layout::kRows];
};

// The scores of RowTiles x KeyTiles tiles. Functions that are told a row and a key mean the first of all of these.
template <class Layout, int RowTiles, int KeyTiles>
struct Scores {
    typename Layout::Tile tile[RowTiles][KeyTiles];

    // f(element, row tile, key tile, number of the element) for each.
    template <class F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int v = 0; v < Layout::kElements; v++) f(tile[mt][nt][v], mt, nt, v);
    }

    __device__ __forceinline__ void clear() {
        each([](float& x, int, int, int) { x = 0.f; });
    }

    // Sets the scores of pairs outside the mask to -inf.
    __device__ __forceinline__ void apply_mask(const Mask& mask, int row, int key) {
        const typename Layout::Lane lane(remat_lane());
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                const int i = row + Layout::kTileQueries * mt + Layout::row_slot(r) + Layout::first_query(lane);
                const int first = i + mask.low - key - Layout::first_key(lane);
                const int last = min(i + mask.high, mask.seqlen_k - 1) - key - Layout::first_key(lane);
#pragma unroll
                for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                    for (int v = 0; v < Layout::kElements; v++) {
                        const int j = Layout::kTileKeys * nt + Layout::key_slot(v);
                        if (Layout::row_of(v) == r && (j < first || j > last)) tile[mt][nt][v] = negative_infinity();
                    }
            }
    }

    // Largest of a lane's scores in one of its rows.
    __device__ __forceinline__ float lane_maximum(int mt, int r) const {
        float m[KeyTiles];
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            m[nt] = maximum_of_row(tile[mt][nt], r);
            if (nt > 0) m[0] = fmaxf(m[0], m[nt]);
        }
        return m[0];
    }

    // Whether any row of the warp has a score above its limit, or, with `or_if`, anyway. Warp-uniform.
    __device__ __forceinline__ bool needs_rescale(const SoftmaxRows<Layout, RowTiles>& softmax, bool or_if = false) const {
        bool exceeds = or_if;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) exceeds |= lane_maximum(mt, r) > softmax.row[mt][r].limit;
        return __any_sync(~0u, exceeds);
    }

    // Moves references to the maxima of these scores. rescale(row tile, row, factor) is told what to multiply everything by
    // that was made of probabilities of a row.
    template <RescaledRows Rows, class Rescale>
    __device__ __forceinline__ void update_row_max(SoftmaxRows<Layout, RowTiles>& softmax, float scale_log2,
                                                   float inverse_scale_log2, Rescale rescale) const {
        update_row_max(softmax, rescale, [&](SoftmaxRow& row, float m) {
            return row.template update_row_max<Rows>(m, scale_log2, inverse_scale_log2);
        });
    }
    // move(row, its maximum) moves one, and returns the factor.
    template <class Rescale, class Move>
    __device__ __forceinline__ void update_row_max(SoftmaxRows<Layout, RowTiles>& softmax, Rescale rescale, Move move) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) {
                float m = lane_maximum(mt, r);
#pragma unroll
                for (int lane_mask : Layout::kRowLaneMasks) m = fmaxf(m, __shfl_xor_sync(~0u, m, lane_mask));
                rescale(mt, r, move(softmax.row[mt][r], m));
            }
    }

    // From products q.k to units of log2 (score_modifier.cuh). The bias is not added here: ScoreBias.
    __device__ __forceinline__ void apply_score_mod(const FwdParams& p, const Mask& mask, int row, int key) {
        const ScoreOptions& options = p.score_options;
        const typename Layout::Lane lane(remat_lane());
        row += Layout::first_query(lane);
        key += Layout::first_key(lane);
        if (kHasSoftcap && options.softcap > 0.f) {
            const Softcap softcap(p.problem, options);
            each([&](float& x, int, int, int) { x = softcap(x); });
        } else {
            each([&](float& x, int, int, int) { x *= p.problem.scale_log2; });
        }
        if (kHasAlibi && options.alibi_slopes) {
            const Alibi alibi(options, remat_block_batch(), remat_head<Layout::kEitherOrder>(p.problem), mask.seqlen_q,
                              mask.seqlen_k);
            each([&](float& x, int mt, int nt, int v) {
                x = alibi(x, alibi.distance(row + Layout::kTileQueries * mt + Layout::query_slot(v), key) -
                                 (Layout::kTileKeys * nt + Layout::key_slot(v)));
            });
        }
    }

private:
    // Of the lane's elements of one tile, in pairs.
    __device__ __forceinline__ static float maximum_of_row(const typename Layout::Tile& x, int r) {
        float m = 0.f;
        bool any = false;
#pragma unroll
        for (int v = 0; v < Layout::kElements; v += 2) {
            static_assert(Layout::row_of(0) == Layout::row_of(1), "an even element and the next are of one row");
            if (Layout::row_of(v) != r) continue;
            const float pair = fmaxf(x[v], x[v + 1]);
            m = any ? fmaxf(m, pair) : pair;
            any = true;
        }
        return m;
    }
};

// The bias of such scores, which may be loaded before they are there.
template <class Layout, int RowTiles, int KeyTiles>
struct ScoreBias {
    Bias::Loaded<Layout::kKeys> loaded[RowTiles][KeyTiles][Layout::kRows];

    // Where it lies: for all tiles of the block.
    __device__ __forceinline__ static Bias source(const FwdParams& p) {
        return Bias(p.problem, p.score_options, remat_block_batch(), remat_head<Layout::kEitherOrder>(p.problem));
    }

    // key is a multiple of 4.
    __device__ __forceinline__ void load(const FwdParams& p, int row, int key) { load(p, source(p), row, key); }
    __device__ __forceinline__ void load(const FwdParams& p, const Bias& bias, int row, int key) {
        const typename Layout::Lane lane(remat_lane());
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int r = 0; r < Layout::kRows; r++) {
                    const int i = row + Layout::kTileQueries * mt + Layout::row_slot(r) + Layout::first_query(lane);
                    loaded[mt][nt][r] = bias.load<Layout::kKeys>(p.score_options, min(i, p.problem.seqlen_q - 1),
                                                                 key + Layout::kTileKeys * nt + Layout::first_key(lane));
                }
    }
    // To scores in units of log2, or in others, of which `factor` make one of the bias.
    __device__ __forceinline__ void add_to(Scores<Layout, RowTiles, KeyTiles>& s, const ScoreOptions& options,
                                           float factor = kLog2e) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int r = 0; r < Layout::kRows; r++) {
                    float bias[Layout::kKeys];
                    Bias::to_float(options, loaded[mt][nt][r], bias);
#pragma unroll
                    for (int v = 0; v < Layout::kElements; v++)
                        if (Layout::row_of(v) == r) s.tile[mt][nt][v] = fmaf(bias[Layout::key_slot(v)], factor, s.tile[mt][nt][v]);
                }
    }
};

// Which probabilities of RowTiles tiles, one of keys, dropout keeps.
template <class Layout, int RowTiles>
struct DropoutBits {
    unsigned bits = ~0u;  // of row tile mt the kept_bits of a call (philox.cuh), kBitsOfTile further each
    static constexpr int kBitsOfTile = 4;
    static_assert(RowTiles * kBitsOfTile <= 16, "one word, whose halves have two of four columns each");
    static_assert(!kHasDropout || (Layout::kRows == 2 && Layout::row_slot(1) == 4), "a lane's rows share a call");

    __device__ __forceinline__ static Philox numbers_of(const FwdParams& p) {
        return Philox(p.score_options.rng_state, (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads +
                                                     remat_head<Layout::kEitherOrder>(p.problem));
    }

    // `row` and `key` are the tile's first, multiples of 8 and of 4.
    __device__ __forceinline__ void draw(const FwdParams& p, int row, int key) { draw(p, numbers_of(p), row, key); }
    __device__ __forceinline__ void draw(const FwdParams& p, const Philox& philox, int row, int key) {
        const DropoutRule rule(p.score_options);
        const typename Layout::Lane lane(remat_lane());
        row += Layout::first_query(lane);
        key += Layout::first_key(lane);
        bits = 0;
        static_assert(Layout::kKeys == 4, "a lane has all columns of a call");
        // Rolled, for the instruction cache.
#pragma unroll 1
        for (int mt = 0; mt < RowTiles; mt++)
            bits |= rule.kept_bits(philox.numbers(row + Layout::kTileQueries * mt, key)) << (kBitsOfTile * mt);
    }
    __device__ __forceinline__ bool operator()(int mt, int v) const {
        return bits >> (kBitsOfTile * mt + kept_bit(Layout::row_of(v), Layout::key_slot(v))) & 1;
    }
};
