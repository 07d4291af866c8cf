// First main kernel of the backward pass for large headdims (volta: above 192, turing: above 256), and for fp32 tensors of any
// headdim: stores P and dS in scratch memory (stored_scores.cuh). The second, stored_gradients.cuh, multiplies them to dQ, dK and
// dV. The other main kernels keep dK, dV and their operands in an SM, where at headdim 512 neither fits. There q . k and v . dout
// cost 1,024 multiply-adds a score, so writing four bytes for it, P and dS as fp16, is cheap. Reads q, k, v, dout and the row
// statistics (softmax_lse and delta); also adds to the gradient of a bias.
//
// A block computes one stored tile, kStoredRows (128) keys by 128 queries: S^T = K Q^T, then P^T, then dP^T = V dO^T - delta and
// dS^T. Each of four warps has 64 by 64 of them. The registers hold one of the two products, so P waits in memory for dP.
// Operands come in steps of kStagedTerms (32) columns, as tiles of 128 rows (TermColumns), through two buffers of shared memory. In
// each the second operand begins kStagedTile bytes after the first (staged_tiles.cuh).
//
// P is stored as fp16 times kProbabilityUnit, 2^12, which keeps digits of small P. Exponents get kExponentShift = 12 - 112, because
// pack_shifted, which packs by integers, takes numbers times 2^-112.
//
// A Family (volta/backward/stored.cuh, turing/backward/stored.cuh) has
//   Layout                         which keys and queries of a 16x16 tile a lane has (packed_tile.cuh). Element v is of row
//                                  row_of(v) of the lane's kRows queries. A warp has 4 by 4 tiles, Scores: float[4][4][8]
//   load_rows                      loads row statistics, -lse / scale or -delta, of the lane's queries in a tile
//   kLaneStatistics                a lane's statistics begin first_query(lane) * kLaneStatistics floats after the tile's
//   tile_row(row)                  row of shared memory where a row of K, Q, V or dO goes
//   own_operand, other_operand     shared offset of the lane's operands of keys and of queries, of the warp's rows from `row` on
//   multiply_scores(c, a, b)       adds the products of a step to c; a and b: shared addresses of these operands
//   add_scores(c, a, b)            the same with sums that begin with 0
//   store_bias_gradient            stores the gradient of a bias as fp16 and returns true; false: it is to be added by atomics
// and what stored_gradients.cuh lists.
//
// Split (fp32 tensors): all operands, and P and dS, are sums of two fp16 numbers, a high and a low part (forward/split.cuh). A row
// of an operand has the high parts of its columns, then the low ones. A step of 32 columns comes three times: low * high, high *
// low and high * high. As tensor cores truncate their sums, none lives longer than a step. A stored tile has kStoredElements (128 *
// 128) high parts, then as many low ones. From kStoredUnits on, dS has a unit (see Unit) for each 64 keys by 64 queries: number
// 2 * (key / 64) + query / 64.
//
// Blocks: which scores exist under a block-sparse mask: AllScores, or ListedScores (stored_block_mask.cuh). hide() sets those that
// do not exist in a warp's tile (m, n) to -inf. is_absent(): none of the warp's exist. Their unit is kAbsentUnit, 0, by which
// stored_gradients.cuh skips them.
#pragma once

#include "backward/iteration_range.cuh"  // UnmaskedRows: rows that need no mask
#include "backward/modifiers.cuh"  // softcap, ALiBi, bias, dropout; kHasScoreFeatures: the kernel has code for them
#include "backward/probabilities.cuh"  // ExponentAddends, exponentials(): P = 2^(S - lse)
#include "backward/scratch.cuh"  // rounded_row(): where a query's statistics are
#include "backward/score_coord.cuh"  // Layout: which query and key an element v has; ScoreCoord: both; apply_mask()
#include "backward/split_tile.cuh"  // PackedTile: a lane's elements of a tile as fp16; SplitTile: a sum of two, its parts
#include "backward/staged_tiles.cuh"  // StagedTile, staged_steps(): operands through shared memory
#include "backward/stored_scores.cuh"  // kStored...: layout of P and dS; StoredScores, BwdParams (src/params)
#include "conditional.cuh"
#include "precise_score_function.cuh"  // PreciseScoreFunction: softcap with fp32's digits; function_score(): score and slope

// Without a block-sparse mask: all scores inside lengths, causal mask and window exist.
struct AllScores {
    static constexpr bool kListed = false;  // true: a block-sparse mask lists blocks of scores
    __device__ __forceinline__ static constexpr bool is_absent() { return false; }
    template <class Layout>
    __device__ __forceinline__ void hide(typename Layout::Tile&, int, int, int) const {}
};

template <class Family, bool Split = false, class Blocks = AllScores>
struct BackwardScores {
    static constexpr int kTiles = 4;  // a warp has 4 tiles of 16 keys by 4 tiles of 16 queries: c[m][n], m of keys, n of queries
    using Layout = typename Family::Layout;
    using Lane = typename Layout::Lane;
    using Tile = typename Layout::Tile;
    using Scores = Tile[kTiles][kTiles];
    using Coord = ScoreCoord<Layout>;
    using Function = typename Conditional<Split, PreciseScoreFunction, ScoreFunction>::Type;
    using Packed = typename Conditional<Split, SplitTile, PackedTile>::Type;
    static __device__ __forceinline__ Packed pack(const Tile& x) {
        if constexpr (Split)
            return split_tile(x);
        else
            return pack_tile(x);
    }
    // Added to the exponent of a probability. Split adds 0: beside -100 the exponent would lose bits that fp32 tensors have.
    static constexpr float kShift = Split ? 0.f : kExponentShift;
    static __device__ __forceinline__ Packed pack_probabilities(const Tile& x) {
        if constexpr (Split) {
            Tile scaled;
#pragma unroll
            for (int v = 0; v < 8; v++) scaled[v] = x[v] * kProbabilityUnit;
            return split_tile(scaled);
        } else {
            return pack_probability_tile(x);
        }
    }
    // One statistic of the lane's queries in tile n, or `value` past the end. `stats`: address of the lane's in tile 0. `rows`:
    // number of rows with statistics, from the warp's first query on.
    struct OfRows {
        float x[1][Layout::kRows];
        __device__ __forceinline__ OfRows(const float* stats, int n, int rows, float value) {
            if (16 * n < rows) {
                Family::load_rows(x, stats + n * Layout::kTileQueries * RowStats::kRowFloats);
            } else {
#pragma unroll
                for (int r = 0; r < Layout::kRows; r++) x[0][r] = value;
            }
        }
        __device__ __forceinline__ float of(int v) const { return x[0][Layout::row_of(v)]; }
    };
    // With Split, dS of a warp's 64 keys by 64 queries is stored divided by a unit: a power of two from their largest P and dP -
    // delta. So no dS exceeds fp16's range, and low parts of small ones are fp16 numbers too, whatever the size of v and dout.
    class Unit {
        static constexpr int kLargest = 14;  // log2 of the bound of stored dS
        float p_ = 0.f, dp_ = 0.f;  // largest |P| and |dP - delta| of the lane, then of the warp

        // Infinities and NaN do not count: they spoil their own rows, and must not take the digits of others.
        static __device__ __forceinline__ void take(float& largest, float x) {
            if (fabsf(x) < positive_infinity()) largest = fmaxf(largest, fabsf(x));
        }
        static __device__ __forceinline__ void take(float& largest, const Tile& x) {
#pragma unroll
            for (int v = 0; v < 8; v++) take(largest, x[v]);
        }
        // Returns the unit's biased exponent. The bounds, 2^-67 to 2^73, keep the unit and its inverse normal fp32 numbers.
        __device__ __forceinline__ unsigned exponent() const {
            // of the largest P times the largest dP - delta, each rounded up to a power of two
            const int product = (__float_as_uint(p_) >> 23) + 1 + (__float_as_uint(dp_) >> 23) + 1 - 127;
            return min(max(product - kLargest, 60), 200);
        }

    public:
        __device__ __forceinline__ void take_probabilities(const Tile& p) {
            if (Split) take(p_, p);
        }
        // Takes dP - delta of all scores, then the maxima over the warp. dP has not had dropout's scale yet.
        __device__ __forceinline__ void take_gradients(const Scores& dp, const ScoreOptions& options, const float* stats,
                                                       int rows) {
            if (!Split) return;
            unrolled<kTiles, kTiles>([&](int m, int n) { take(dp_, dp[m][n]); });
            if (uses_dropout(options)) {
                // bounds |dP * dropout_scale - delta|, where dp_ bounds |dP - delta|
                float delta = 0.f;
#pragma unroll
                for (int n = 0; n < kTiles; n++) {
                    const OfRows neg_delta(stats, n, rows, 0.f);
#pragma unroll
                    for (int r = 0; r < Layout::kRows; r++) take(delta, neg_delta.x[0][r]);
                }
                dp_ = (dp_ + 2.f * delta) * options.dropout_scale;
            }
#pragma unroll
            for (int i = 1; i < 32; i *= 2) {
                p_ = fmaxf(p_, __shfl_xor_sync(~0u, p_, i));
                dp_ = fmaxf(dp_, __shfl_xor_sync(~0u, dp_, i));
            }
        }
        __device__ __forceinline__ float value() const { return __uint_as_float(exponent() << 23); }
        __device__ __forceinline__ float inverse() const { return Split ? __uint_as_float((254 - exponent()) << 23) : 1.f; }
    };

    // A lane's elements of a stored matrix, in tiles (m, n): four neighboring queries of two keys that are two apart.
    struct Stored {
        unsigned short* first;  // address of the lane's element (0, 0)
        __device__ __forceinline__ uint2* at(int m, int n) const {
            return reinterpret_cast<uint2*>(first + 16 * m * kStoredRows + 16 * n);
        }
        __device__ __forceinline__ void store(int m, int n, const PackedTile& tile) const {
            uint2* to = at(m, n);
            to[0] = make_uint2(tile.x[0], tile.x[1]);
            to[2 * kStoredRows / 4] = make_uint2(tile.x[2], tile.x[3]);  // two keys, rows of kStoredRows elements, further
        }
        __device__ __forceinline__ PackedTile load(int m, int n) const {
            const uint2 *from = at(m, n), a = from[0], b = from[2 * kStoredRows / 4];
            return {{a.x, a.y, b.x, b.y}};
        }
        __device__ __forceinline__ Stored low() const { return {first + kStoredElements}; }
        __device__ __forceinline__ void store(int m, int n, const SplitTile& tile) const {
            store(m, n, tile.high);
            low().store(m, n, tile.low);
        }
        __device__ __forceinline__ void load(int m, int n, PackedTile& tile) const { tile = load(m, n); }
        __device__ __forceinline__ void load(int m, int n, SplitTile& tile) const { tile = {load(m, n), low().load(m, n)}; }
    };

    // Where the warp's 64 by 64 scores are in the sequence.
    struct Place {
        int head, first_key, first_row;  // query head; first key and query of the warp
        int row_end;  // one past the last query that sees one of the block's keys
        bool masked;  // whether lengths, causal mask or window hide some of the block's scores
    };

    // Sets all tiles to -delta of their queries, to which V dO^T is added.
    static __device__ __forceinline__ void begin_with_delta(Scores& c, const float* stats, int rows) {
#pragma unroll
        for (int n = 0; n < kTiles; n++) {
            const OfRows neg_delta(stats, n, rows, 0.f);
            unrolled<kTiles, 8>([&](int m, int v) { c[m][n][v] = neg_delta.of(v); });
        }
    }

    // Adds the warp's part of the product of 128 rows of `own` (K or V) and 128 rows of `other` (Q or dO), of which own_rows and
    // other_rows exist. sign_flip, of a negative softmax_scale, flips the signs of `own`.
    static __device__ __forceinline__ void multiply(Scores& c, unsigned shared, const unsigned short* own, long long own_stride,
                                                    int own_rows, const unsigned short* other, long long other_stride,
                                                    int other_rows, int columns, unsigned sign_flip) {
        const Lane lane(threadIdx.x % 32);
        const int warp = threadIdx.x / 32;
        const unsigned a_offset = Family::own_operand(lane, 64 * (warp % 2));
        const unsigned b_offset = kStagedTile + Family::other_operand(lane, 64 * (warp / 2));
        StagedTile<TermColumns> a, b;
        const auto load = [&](int step, int) {
            // product 0: low * high, 1: high * low, 2: high * high; low parts lie `columns` after high ones
            const int column = (Split ? step / 3 : step) * kStagedTerms, product = Split ? step % 3 : 2;
            a.load(own + column + (product == 0 ? columns : 0), own_stride, own_rows, columns - column);
            b.load(other + column + (product == 1 ? columns : 0), other_stride, other_rows, columns - column);
        };
        const auto store = [&](unsigned buffer, int) {
            a.flip_signs(sign_flip);
            a.store(buffer, Family::tile_row(a.row()));
            b.store(buffer + kStagedTile, Family::tile_row(b.row()));
        };
        staged_steps(shared, (Split ? 3 : 1) * ((columns + kStagedTerms - 1) / kStagedTerms), load, store,
                     [&](unsigned buffer, int) {
                         if constexpr (Split)
                             Family::add_scores(c, buffer + a_offset, buffer + b_offset);
                         else
                             Family::multiply_scores(c, buffer + a_offset, buffer + b_offset);
                     });
    }

    // Computes P from S and stores it, with 0 for dropped probabilities, as dV needs it. Until dS is known, its memory keeps the
    // score function's derivative, or all of P with signs that mark dropped ones. (No problem has both a score function and
    // dropout.)
    static __device__ __forceinline__ void store_probabilities(Scores& s, const BwdParams& p, const Place& place,
                                                               const Stored& to_p, const Stored& to_ds, const float* stats,
                                                               int rows, Unit& unit, const Blocks& blocks) {
        if (!kHasScoreFeatures) {
            if (place.masked) apply_mask<Layout>(s, p, Lane(threadIdx.x % 32), place.first_row, place.first_key);
            ExponentAddends<Layout, kTiles> addends;
#pragma unroll
            for (int n = 0; n < kTiles; n++) {
                const OfRows neg_lse(stats, n, rows, negative_infinity());
#pragma unroll
                for (int r = 0; r < Layout::kRows; r++) addends.of_row[n][r] = neg_lse.x[0][r];
            }
            addends.scale(p.problem.scale_log2, kShift);
            exponentials(s, p.problem.scale_log2, addends);
            unrolled<kTiles, kTiles>([&](int m, int n) {
                unit.take_probabilities(s[m][n]);
                to_p.store(m, n, pack_probabilities(s[m][n]));
            });
            return;
        }
        const ScoreOptions& options = p.score_options;
        const Lane lane(threadIdx.x % 32);
        // Rolled, to fit the instruction cache: works on tile 0, because registers cannot be indexed, and moves the others down.
#pragma unroll 1
        for (int tile = 0; tile < kTiles * kTiles; tile++) {
            const int m = tile / kTiles, n = tile % kTiles;
            const Coord coord(lane, place.first_row + 16 * n, place.first_key + 16 * m);
            Tile& x = s[0][0];
            const OfRows neg_lse(stats, n, rows, negative_infinity());
            if (uses_score_function(options)) {
                Tile slopes;
                const Function function(p.problem, options);
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = function_score(x[v], neg_lse.of(v) * p.problem.scale_log2, function, slopes[v]);
                to_ds.store(m, n, pack(slopes));
            } else {
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = fmaf(x[v], p.problem.scale_log2, neg_lse.of(v) * p.problem.scale_log2);
            }
            add_position_terms(x, p, place.head, place.row_end, coord);
            if (place.masked) mask_tile(x, mask_of(p.problem, BlockSeqlenInfo(p.problem, p.lengths, blockIdx.z)), coord);
            blocks.template hide<Layout>(x, place.first_row, m, n);
#pragma unroll
            for (int v = 0; v < 8; v++) x[v] = exp2_approx(x[v] + kShift);
            unit.take_probabilities(x);
            Packed probabilities = pack_probabilities(x);
            if (uses_dropout(options)) {
                const DroppedKeys<Layout> dropped(philox_of(p, place.head), DropoutRule(options), coord);
                Packed signs = probabilities;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    high_part(signs).x[i] |= dropped.signs(i);
                    each_part(probabilities, [&](PackedTile& part) { part.x[i] &= ~sign_masks(dropped.signs(i)); });
                }
                to_ds.store(m, n, signs);
            }
            to_p.store(m, n, probabilities);
            next_tile(s);
        }
    }

    // Computes dS from dP and what store_probabilities stored, and stores it.
    static __device__ __forceinline__ void store_score_gradients(Scores& dp, const BwdParams& p, const Place& place,
                                                                 const Stored& to_p, const Stored& to_ds, const float* stats,
                                                                 int rows, const Unit& unit, const Blocks& blocks) {
        if (!kHasScoreFeatures) {
#pragma unroll
            for (int m = 0; m < kTiles; m++) {
                Packed probabilities[kTiles];
#pragma unroll
                for (int n = 0; n < kTiles; n++) to_p.load(m, n, probabilities[n]);
#pragma unroll
                for (int n = 0; n < kTiles; n++) {
#pragma unroll
                    for (int v = 0; v < 8; v++) dp[m][n][v] *= Split ? unit.inverse() / kProbabilityUnit : 1.f / kProbabilityUnit;
                    ::multiply(dp[m][n], probabilities[n]);
                    to_ds.store(m, n, pack(dp[m][n]));
                }
            }
            return;
        }
        const ScoreOptions& options = p.score_options;
#pragma unroll 1
        for (int tile = 0; tile < kTiles * kTiles; tile++) {
            const int m = tile / kTiles, n = tile % kTiles;
            Tile& x = dp[0][0];
            Packed probabilities;
            if (uses_dropout(options)) {
                to_ds.load(m, n, probabilities);
                const OfRows neg_delta(stats, n, rows, 0.f);
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const bool is_dropped = high_part(probabilities).x[packed_word(v)] & (v % 2 ? 0x80000000 : 0x8000);
                    x[v] = dropped_gradient(x[v], neg_delta.of(v), is_dropped, options.dropout_scale);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) high_part(probabilities).x[i] &= 0x7fff7fff;
            } else {
                to_p.load(m, n, probabilities);
            }
#pragma unroll
            for (int v = 0; v < 8; v++) x[v] *= 1.f / kProbabilityUnit;
            ::multiply(x, probabilities);
            if (kHasBias && p.dbias) {
                const int row = place.first_row + 16 * n, key = place.first_key + 16 * m;
                if (!Family::store_bias_gradient(x, p, place.head, row, key))
                    add_bias_gradient(x, p, place.head, Coord(Lane(threadIdx.x % 32), row, key));
            }
            if (uses_score_function(options)) {
                Packed slopes;
                to_ds.load(m, n, slopes);
                ::multiply(x, slopes);
            }
            if (Split)
#pragma unroll
                for (int v = 0; v < 8; v++) x[v] = blocks.is_absent() ? 0.f : x[v] * unit.inverse();
            to_ds.store(m, n, pack(x));
            next_tile(dp);
        }
    }

    // Computes and stores the block's tile. Grid: x is a tile of queries and of keys, y a query head of the launch, z a batch
    // entry. A launch has KV heads from stored.first_head on, and stored.key_tiles tiles of 128 keys from first_key_tile on. A
    // block stores nothing if lengths, causal mask or window hide all of its scores.
    static __device__ __forceinline__ void run(const BwdParams& p, const StoredScores& stored, Blocks blocks = Blocks()) {
        static_assert(!Blocks::kListed || (Split && kHasScoreFeatures), "only the loop over tiles hides scores");
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const unsigned shared = shared_address(shared_memory);
        const Lane lane(threadIdx.x % 32);
        const int warp = threadIdx.x / 32, batch = blockIdx.z;
        const int group = p.problem.nheads / p.problem.nheads_k;
        const int head = stored.first_head * group + blockIdx.y;  // first_head: the launch's first KV head
        // Groups of eight query tiles by all key tiles, query tiles fastest: blocks that run at once share operands in L2.
        constexpr int kQueryTiles = 8;
        const int in_group = blockIdx.x % (kQueryTiles * stored.key_tiles);
        const int query_tile = blockIdx.x / (kQueryTiles * stored.key_tiles) * kQueryTiles + in_group % kQueryTiles;
        const int key_tile = in_group / kQueryTiles;
        const int first_row = query_tile * kStoredRows, first_key = (stored.first_key_tile + key_tile) * kStoredRows;

        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        if (head >= p.problem.nheads || first_row >= sequence.seqlen_q() || first_key >= sequence.seqlen_k()) return;
        const Mask mask = mask_of(p.problem, sequence);
        const int row_end = mask.row_end(first_key, kStoredRows);
        if (first_row >= row_end || first_row + kStoredRows <= mask.row_first(first_key)) return;

        const UnmaskedRows<kStoredRows> unmasked(mask, first_key, min(kStoredRows, sequence.seqlen_k() - first_key));
        const int warp_key = 64 * (warp % 2), warp_row = 64 * (warp / 2);
        const Place place = {head, first_key + warp_key, first_row + warp_row, row_end,
                             first_key + kStoredRows > sequence.seqlen_k() || !unmasked.contains(first_row)};
        const long long tile =
            stored_tile<Split>(stored, first_stored_tile(p, stored, sequence, batch, blockIdx.y) + query_tile, key_tile);
        if constexpr (Blocks::kListed) {
            if (!blocks.find(p, head, first_row, first_key, warp_key)) {
                if (threadIdx.x < 4) reinterpret_cast<float*>(stored.ds + tile + kStoredUnits)[threadIdx.x] = kAbsentUnit;
                return;
            }
        }
        const long long element = tile + (warp_key + Layout::first_key(lane)) * kStoredRows + warp_row + Layout::first_query(lane);
        const Stored to_p = {stored.p + element}, to_ds = {stored.ds + element};

        const int rows = rounded_rows(p, sequence) - place.first_row;
        const float* stats = p.row_stats + rounded_row(p, sequence, batch, head) * RowStats::kRowFloats +
                             place.first_row * RowStats::kRowFloats + Layout::first_query(lane) * Family::kLaneStatistics;
        const int key_head = head / group;
        // Adds the product of these operands' rows. Lengths are read again, so that they hold no registers in between.
        const auto add = [&](Scores& c, const Operand& own, const Operand& other, int columns, unsigned sign_flip) {
            const int batch = remat_block_batch();
            const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
            multiply(c, shared, rows_of(own, batch, key_head, sequence.k_offset() + first_key), own.row_stride,
                     sequence.seqlen_k() - first_key, rows_of(other, batch, head, sequence.q_offset() + first_row),
                     other.row_stride, sequence.seqlen_q() - first_row, columns, sign_flip);
        };

        Scores c = {};
        add(c, p.k, p.q, p.problem.headdim, p.problem.sign_flip);
        Unit unit;
        store_probabilities(c, p, place, to_p, to_ds, stats + RowStats::kNegLseAt, rows, unit, blocks);
        begin_with_delta(c, stats + RowStats::kNegDeltaAt, rows);
        add(c, p.v, p.dout, p.problem.headdim_v, 0);
        if (Split) {
            unit.take_gradients(c, p.score_options, stats + RowStats::kNegDeltaAt, rows);
            float* units = reinterpret_cast<float*>(stored.ds + tile + kStoredUnits);
            if (lane.lane == 0) units[2 * (warp % 2) + warp / 2] = blocks.is_absent() ? kAbsentUnit : unit.value();
        }
        store_score_gradients(c, p, place, to_p, to_ds, stats + RowStats::kNegDeltaAt, rows, unit, blocks);
    }
};
