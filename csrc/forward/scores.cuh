// A warp's scores between the two products of the forward pass: a score function (softcap), ALiBi, bias, mask, row maxima and
// dropout. Used by the forward kernels of both families. A Layout (score_layout.cuh) says which scores of a tile a lane has: rows
// first_query(lane) + row_slot(r), and of element v query first_query(lane) + query_slot(v), key first_key(lane) + key_slot(v).
//
// Names: mt is a row tile of the warp, nt a key tile, v a lane's element of a tile, r one of its rows in it. unrolled<M, N>(f)
// calls f(m, n) for all m < M, n < N. kHas...: features that the kernel has code for (features.cuh). Scores are products q.k until
// apply_score_mod(), if a kernel calls it, then in log2 units (ready for exp2). scale_log2 converts them; after it, that is 1.
//
// remat_*() read special registers again where a value is used, and parameters are read there too, because registers are scarce.
// With Layout::kEitherOrder, the grid may have heads on its first axis; remat_head reads the right one.
#pragma once

#include "forward/block.cuh"  // remat_head(); FwdParams (src/params): tensors, Problem, ScoreOptions
#include "mask.cuh"  // Mask: row i sees keys i + low to i + high
#include "score_layout.cuh"
#include "score_mod.cuh"  // ScoreFunction, Alibi, Bias; Philox, DropoutRule: dropout
#include "softmax.cuh"  // SoftmaxRow: a row's lazy maximum, its limit and the sum
#include "tile.cuh"

__device__ __forceinline__ int remat_lane() { return remat_thread_index() & 31; }

// Softmax state of a warp's rows: RowTiles tiles.
template <class Layout, int RowTiles>
struct SoftmaxRows {
    SoftmaxRow row[RowTiles][Layout::kRows];
};

// Scores of RowTiles x KeyTiles tiles. Arguments `row` and `key`: the warp's first query and key.
template <class Layout, int RowTiles, int KeyTiles>
struct Scores {
    typename Layout::Tile tile[RowTiles][KeyTiles];

    // Calls f(element, row tile, key tile, element number) for each.
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

    // Sets masked scores to -inf. Row i sees keys i + mask.low to i + mask.high.
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

    // Returns the largest of a lane's scores in its row r of row tile mt.
    __device__ __forceinline__ float lane_maximum(int mt, int r) const {
        float m[KeyTiles];
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            m[nt] = maximum_of_row(tile[mt][nt], r);
            if (nt > 0) m[0] = fmaxf(m[0], m[nt]);
        }
        return m[0];
    }

    // Returns whether any row of the warp has a score above its SoftmaxRow::limit: its lazy maximum row_max must move then
    // (softmax.cuh). Also true if the caller's own condition or_if is true in any lane. Uniform in the warp.
    __device__ __forceinline__ bool needs_rescale(const SoftmaxRows<Layout, RowTiles>& softmax, bool or_if = false) const {
        bool exceeds = or_if;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < Layout::kRows; r++) exceeds |= lane_maximum(mt, r) > softmax.row[mt][r].limit;
        return __any_sync(~0u, exceeds);
    }

    // Moves row maxima to those of these scores: of all rows, or only of rows above their limit (RescaledRows, softmax.cuh). Calls
    // rescale(row tile, row, factor) for what was computed from the row's probabilities.
    template <RescaledRows Rows, class Rescale>
    __device__ __forceinline__ void update_row_max(SoftmaxRows<Layout, RowTiles>& softmax, float scale_log2,
                                                   float inverse_scale_log2, Rescale rescale) const {
        update_row_max(softmax, rescale, [&](SoftmaxRow& row, float m) {
            return row.template update_row_max<Rows>(m, scale_log2, inverse_scale_log2);
        });
    }
    // The same, where move(row state, maximum of the scores) moves row_max and returns the factor.
    template <class Rescale, class Move>
    __device__ __forceinline__ void update_row_max(SoftmaxRows<Layout, RowTiles>& softmax, Rescale rescale, Move move) const {
        unrolled<RowTiles, Layout::kRows>(
            [&](int mt, int r) { rescale(mt, r, move(softmax.row[mt][r], row_max<Layout>(lane_maximum(mt, r)))); });
    }

    // Turns products q.k into scores in log2 units (score_mod.cuh), without the bias, which ScoreBias adds. Function is
    // ScoreFunction (softcap), or a more precise form. A parameter of 0 means that the problem has none.
    template <class Function = ScoreFunction>
    __device__ __forceinline__ void apply_score_mod(const FwdParams& p, const Mask& mask, int row, int key) {
        const ScoreOptions& options = p.score_options;
        const typename Layout::Lane lane(remat_lane());
        row += Layout::first_query(lane);
        key += Layout::first_key(lane);
        if (kHasScoreFunction && ScoreFunction::parameter(options) > 0.f) {
            const Function function(p.problem, options);
            each([&](float& x, int, int, int) { x = function(x); });
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
    // Returns the maximum of the lane's elements of one tile in row r.
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

// Bias of a warp's scores, which can be loaded before the scores are computed. `loaded`: elements as in memory, kKeys keys each.
template <class Layout, int RowTiles, int KeyTiles>
struct ScoreBias {
    Bias::Loaded<Layout::kKeys> loaded[RowTiles][KeyTiles][Layout::kRows];

    // Returns the bias of the block's head.
    __device__ __forceinline__ static Bias source(const FwdParams& p) {
        return Bias(p.problem, p.score_options, remat_block_batch(), remat_head<Layout::kEitherOrder>(p.problem));
    }

    // Loads the bias of the tiles from (row, key) on; `key` is a multiple of 4. Rows past the last read the last one's.
    __device__ __forceinline__ void load(const FwdParams& p, int row, int key) { load(p, source(p), row, key); }
    __device__ __forceinline__ void load(const FwdParams& p, const Bias& bias, int row, int key) {
        const typename Layout::Lane lane(remat_lane());
        unrolled<RowTiles, KeyTiles, Layout::kRows>([&](int mt, int nt, int r) {
            const int i = row + Layout::kTileQueries * mt + Layout::row_slot(r) + Layout::first_query(lane);
            loaded[mt][nt][r] = bias.load<Layout::kKeys>(p.score_options, min(i, p.problem.seqlen_q - 1),
                                                         key + Layout::kTileKeys * nt + Layout::first_key(lane));
        });
    }
    // Adds the bias to scores. `factor`: their units per natural unit, log2(e) for scores in log2 units.
    __device__ __forceinline__ void add_to(Scores<Layout, RowTiles, KeyTiles>& s, const ScoreOptions& options,
                                           float factor = kLog2e) const {
        unrolled<RowTiles, KeyTiles, Layout::kRows>([&](int mt, int nt, int r) {
            float bias[Layout::kKeys];
            Bias::to_float(options, loaded[mt][nt][r], bias);
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++)
                if (Layout::row_of(v) == r) s.tile[mt][nt][v] = fmaf(bias[Layout::key_slot(v)], factor, s.tile[mt][nt][v]);
        });
    }
};

// Which probabilities of RowTiles row tiles and one key tile dropout keeps; without a draw(), all. One Philox call (random numbers,
// philox.cuh) decides all of a lane's eight in a tile: two rows, four apart, by four keys.
template <class Layout, int RowTiles>
struct DropoutBits {
    // A call's bits, 1 if kept, are 0 to 3 and 16 to 19 (DropoutRule::kept_bits). kept_bit(r, j) is the number of row r's key j.
    // Those of row tile mt are shifted left by kBitsOfTile * mt.
    unsigned bits = ~0u;
    static constexpr int kBitsOfTile = 4;
    static_assert(RowTiles * kBitsOfTile <= 16, "the bits of a lane's scores fit into half a word");
    static_assert(!kHasDropout || (Layout::kRows == 2 && Layout::row_slot(1) == 4), "a lane's rows share a call");

    // Random numbers of the block's head. first_batch: batch entries of the call's earlier launches.
    __device__ __forceinline__ static Philox numbers_of(const FwdParams& p) {
        return Philox(p.score_options.rng_state, (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads +
                                                     remat_head<Layout::kEitherOrder>(p.problem));
    }

    // Draws the random numbers. `row` and `key`: first of the tiles, multiples of 8 and of 4.
    __device__ __forceinline__ void draw(const FwdParams& p, int row, int key) { draw(p, numbers_of(p), row, key); }
    __device__ __forceinline__ void draw(const FwdParams& p, const Philox& philox, int row, int key) {
        const DropoutRule rule(p.score_options);
        const typename Layout::Lane lane(remat_lane());
        row += Layout::first_query(lane);
        key += Layout::first_key(lane);
        bits = 0;
        static_assert(Layout::kKeys == 4, "a lane has all columns of a call");
        // Rolled, to fit the instruction cache.
#pragma unroll 1
        for (int mt = 0; mt < RowTiles; mt++)
            bits |= rule.kept_bits(philox.numbers(row + Layout::kTileQueries * mt, key)) << (kBitsOfTile * mt);
    }
    // Returns whether element v of row tile mt is kept.
    __device__ __forceinline__ bool operator()(int mt, int v) const {
        return bits >> (kBitsOfTile * mt + kept_bit(Layout::row_of(v), Layout::key_slot(v))) & 1;
    }
};
