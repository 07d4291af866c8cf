// Score features of volta forward kernels that are compiled for exactly one feature, or two: softcap, ALiBi, bias, dropout.
//
// Generic kernels test parameters in every step (Scores::apply_score_mod). Here the features are known: terms that are added to
// scores become initial accumulators of the first product, and lanes carry along the keys what they would otherwise compute
// again. A kernel's main loop calls the functions of ScoreFeature at fixed points; each feature overrides some of them.
#pragma once

#include "volta/forward/layout.cuh"

namespace volta {

// The features of such a kernel, which requires all of them and applies them without tests; 0 in other kernels. (fp32 bias is
// among them although no kernel reads one: a row of src/kernels with it finds no class below, and does not compile.)
constexpr unsigned kRequiredFeatures =
    kVarlen ? 0 : FEATURES & (kFeatureSoftcap | kFeatureAlibi | kFeatureBias | kFeatureFp32Bias | kFeatureDropout);
constexpr bool kTwoFeatures = (kRequiredFeatures & (kRequiredFeatures - 1)) != 0;
// Other kernels apply their score modifiers after the first product, as the parameters say.
constexpr bool kHasScoreMod = kGeneric && !kRequiredFeatures;
// Whether the first key is rounded down to 16: bias and random numbers come in groups of 4 keys, pages in groups of 16.
constexpr bool kRoundedKeys = kPaged || kHasScoreMod || kRequiredFeatures & (kFeatureBias | kFeatureDropout);

// Shared memory of a lane, for what has no register: 16-byte chunks, `between` bytes apart.
struct LaneScratch {
    u32 first = 0;
    int between = 0;
    __device__ __forceinline__ void store(int i, const uint4& x) const { store_shared(first + i * between, x); }
    __device__ __forceinline__ uint4 load(int i) const { return load_shared(first + i * between); }
};

// The interface, in the order of calls; without a feature it does nothing. Arguments `row` and `key`: first of the warp's tile.
template <int RowTiles, int KeyTiles, unsigned Feature, class Grid>
class ScoreFeature {
    static_assert(Feature == 0, "what kernels of these features do is not written");

public:
    using Tile = Scores<ForwardLayout, RowTiles, KeyTiles>;
    using Unmasked = UnmaskedKeys<16 * KeyTiles>;
    struct Numbers {};
    static constexpr int kLaneScratchChunks = 0;  // chunks of LaneScratch that it needs

    // May shorten the range of tiles that need no mask.
    __device__ __forceinline__ ScoreFeature(const FwdParams&, const Grid&, const Mask&, Unmasked&, const LaneScratch&, int, int) {}
    // Returns the factor of scores in the softmax.
    __device__ __forceinline__ float scale(const FwdParams& p) const { return kHasScoreMod ? 1.f : p.problem.scale_log2; }
    // Sets initial row maxima. `q` and `k`: the sequence's first rows.
    __device__ __forceinline__ void init_row_max(SoftmaxState<RowTiles>&, const FwdParams&, const Mask&, const unsigned short*,
                                                 const unsigned short*, int) const {}
    // Loads what a tile needs.
    __device__ __forceinline__ void load(const FwdParams&, int, int) {}
    // Sets the initial accumulators of a tile's products, and then adds what remains.
    __device__ __forceinline__ void init_accumulators(const FwdParams&, Tile& s, int, int) { s.clear(); }
    __device__ __forceinline__ void add_to(const FwdParams&, Tile&) {}
    // Corrects a tile that needs a mask, before the mask.
    __device__ __forceinline__ void correct_masked_tile(Tile&, SoftmaxState<RowTiles>&, Unmasked&, const FwdParams&, const Mask&,
                                                        int, int) {}
    template <class Rescale>
    __device__ __forceinline__ void update_row_max(const Tile& s, SoftmaxState<RowTiles>& softmax, float scale, float inverse_scale,
                                                   Rescale rescale) const {
        s.template update_row_max<RescaledRows::kAll>(softmax, scale, inverse_scale, rescale);
    }
    // After the mask and the row maxima.
    __device__ __forceinline__ void set_masked(bool, Tile&) {}
    // Returns what the softmax takes as the score.
    __device__ __forceinline__ float score(float x) const { return x; }
    // Draws random numbers for 16 keys; then drops elements of packed probabilities: words x and y have elements 4u to 4u + 3
    // of row tile mt.
    __device__ __forceinline__ void draw(Numbers&, const FwdParams&, int, int) const {}
    __device__ __forceinline__ void drop(u32&, u32&, const Numbers&, const FwdParams&, int, int) const {}
    // Turns row maxima into those of true scores.
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>&, float) const {}
};

// ---- softcap --------------------------------------------------------------------------------------

// Softcap. The softmax takes logistics as scores, so the capped score, cap - 2 * cap * logistic, is never computed. Row maxima
// are too small by the cap until finish().
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureSoftcap, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    Softcap softcap_;
    float one_ = 1.f;

public:
    using typename Base::Tile;
    using typename Base::Unmasked;

    __device__ __forceinline__ ScoreFeature(const FwdParams& p, const Grid& grid, const Mask& mask, Unmasked& unmasked,
                                            const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), softcap_(p.problem, p.score_options) {}
    __device__ __forceinline__ float scale(const FwdParams&) const { return -2.f * softcap_.cap; }
    __device__ __forceinline__ float score(float x) const { return Softcap::logistic(x, softcap_.to_exponent, one_); }
    template <class Rescale>
    __device__ __forceinline__ void update_row_max(const Tile& s, SoftmaxState<RowTiles>& softmax, float scale, float inverse_scale,
                                                   Rescale rescale) const {
        s.update_row_max(softmax, rescale, [&](SoftmaxRow& row, float m) {
            const float factor = row.template update_row_max<RescaledRows::kAll>(scale * softcap_.logistic(m), 1.f, 1.f);
            row.limit = softcap_.product(row.limit * inverse_scale);
            return factor;
        });
    }
    // A masked score needs an infinite logistic, which no score has. So all scores of the tile become those whose logistic is
    // right with 0 instead of 1 in the denominator.
    __device__ __forceinline__ void set_masked(bool masked, Tile& s) {
        one_ = 1.f;
        if (!masked) return;
        const float back = __fdividef(1.f, softcap_.to_exponent);
        s.each([&](float& x, int, int, int) {
            if (x != negative_infinity()) x = log2_approx(exp2_approx(x * softcap_.to_exponent) + 1.f) * back;
        });
        one_ = 0.f;
    }
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>& softmax, float) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) softmax.row[mt][r].row_max += softcap_.cap;
    }
};

// ---- ALiBi ----------------------------------------------------------------------------------------

// ALiBi. Let r be the warp's first row and o = seqlen_k - seqlen_q. Then -slope * |i + o - j| is slope * (j - r - o) up to the
// diagonal and slope * (r + o - j) after it, plus or minus slope * (i - r). That last term is constant in a row, so any row_max
// absorbs it. So products begin with a number that depends on the key alone, only tiles on the diagonal need a correction, and
// the sign changes once.
//
// With a softcap (Capped), products begin with 0, because only they are capped. The number is added to the capped score, in
// log2 units.
template <int RowTiles, int KeyTiles, bool Capped, class Grid>
class AlibiFeature : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    static constexpr int kRows = 16 * RowTiles, kKeys = 16 * KeyTiles;

    const Grid& grid_;
    float slope_;  // in the scores' units; changes its sign after the diagonal
    float distance_;  // j - r - o of the lane's first key in the next tile

    __device__ __forceinline__ float slope_of(const FwdParams& p) const {
        const ScoreOptions& o = p.score_options;
        const int head = grid_.remat_head(p.problem), batch = grid_.remat_batch(p.problem);
        return __ldg(o.alibi_slopes + batch * o.alibi_batch_stride + head) * (Capped ? kLog2e : __fdividef(1.f, p.problem.scale));
    }
    __device__ __forceinline__ static int offset(const Mask& mask) { return mask.seqlen_k - mask.seqlen_q; }

    // Sets the range of tiles that need neither mask nor correction, up to the diagonal or after it.
    __device__ __forceinline__ static void set_interval(typename Base::Unmasked& unmasked, const Mask& mask, int row,
                                                        bool past_diagonal) {
        int first = mask.full_first(row, kRows), end = mask.full_end(row);
        if (past_diagonal)
            first = max(first, row + kRows - 1 + offset(mask));
        else
            end = min(end, row + offset(mask) + 1);
        const bool none = end - kKeys < first;
        unmasked.first = none ? 0x7fffffff : first;  // no key is that large
        unmasked.span = none ? 0 : end - kKeys - first;
    }

    // The terms of a lane's four keys in key tile nt, plus `more` if Capped.
    __device__ __forceinline__ void terms(float (&of)[ForwardLayout::kKeys], int nt, float more) const {
        of[0] = Capped ? fmaf(slope_, distance_ + 16 * nt, more) : slope_ * (distance_ + 16 * nt);
#pragma unroll
        for (int j = 1; j < ForwardLayout::kKeys; j++) of[j] = of[j - 1] + slope_;
    }

public:
    using typename Base::Tile;
    using typename Base::Unmasked;

    __device__ __forceinline__ AlibiFeature(const FwdParams& p, const Grid& grid, const Mask& mask, Unmasked& unmasked,
                                            const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), grid_(grid), slope_(slope_of(p)),
          distance_(static_cast<float>(key + ForwardLayout::first_key(ForwardLane()) - row - offset(mask))) {
        set_interval(unmasked, mask, row, false);
    }
    __device__ __forceinline__ float scale(const FwdParams& p) const { return Capped ? 1.f : p.problem.scale_log2; }

    // Begins at the score of each row's nearest visible key. With steep slopes a row's maximum is there or close. Otherwise
    // row_max would reach it in several steps above kRescaleThreshold, each of which rescales the output.
    __device__ __forceinline__ void init_row_max(SoftmaxState<RowTiles>& softmax, const FwdParams& p, const Mask& mask,
                                                 const unsigned short* q, const unsigned short* k, int row) const {
        static_assert(kRows == 32, "a row a lane");
        const Problem& problem = p.problem;
        const ForwardLane lane;
        const int i = row + lane.lane, first = max(i + mask.low, 0), last = min(i + mask.high, mask.seqlen_k - 1);
        const int key = min(max(i + offset(mask), first), last);
        float x = negative_infinity();
        if (i < mask.seqlen_q && key >= first) {
            float dot = 0.f;
#pragma unroll 1
            for (int c = 0; c < problem.headdim; c += kChunk) {
                const uint4 a = flipped(load_global(q + i * p.q.row_stride + c), problem.sign_flip);
                const uint4 b = load_global(k + key * p.k.row_stride + c);
                const u32 pairs[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float2 left = to_float2(pairs[n][0]), right = to_float2(pairs[n][1]);
                    dot = fmaf(left.x, right.x, fmaf(left.y, right.y, dot));
                }
            }
            if (Capped) dot = Softcap(problem, p.score_options)(dot);
            // A NaN is left to the product.
            x = fmaxf(dot + slope_ * (lane.lane - fabsf(static_cast<float>(i + offset(mask) - key))), negative_infinity());
        }
        __syncwarp();
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) {
                const float of_row = __shfl_sync(~0u, x, 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r));
                softmax.row[mt][r].template update_row_max<RescaledRows::kAll>(of_row, scale(p), __fdividef(1.f, scale(p)));
            }
    }

    __device__ __forceinline__ void init_accumulators(const FwdParams&, Tile& s, int, int) {
        if (Capped) return s.clear();
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            float of[ForwardLayout::kKeys];
            terms(of, nt, 0.f);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int v = 0; v < ForwardLayout::kElements; v++) s.tile[mt][nt][v] = of[ForwardLayout::key_slot(v)];
        }
        distance_ += kKeys;
    }
    __device__ __forceinline__ void add_to(const FwdParams& p, Tile& s) {
        if (!Capped) return;
        const Softcap softcap(p.problem, p.score_options);
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            float of[ForwardLayout::kKeys];
            terms(of, nt, softcap.cap);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int v = 0; v < ForwardLayout::kElements; v++) {
                    float& x = s.tile[mt][nt][v];
                    x = fmaf(-2.f * softcap.cap, softcap.logistic(x), of[ForwardLayout::key_slot(v)]);
                }
        }
        distance_ += kKeys;
    }

    __device__ __forceinline__ void correct_masked_tile(Tile& s, SoftmaxState<RowTiles>& softmax, Unmasked& unmasked,
                                                        const FwdParams& p, const Mask& mask, int row, int key) {
        const float up_to_diagonal = slope_of(p);
        if (slope_ != up_to_diagonal) return;  // after the diagonal for good (or slope is 0 or NaN)
        const ForwardLane lane(remat_thread_index() & 31);
        const auto row_of = [&](int mt, int r) { return 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r); };
        const int from_diagonal = key + ForwardLayout::first_key(lane) - row - offset(mask);
        const bool last_time = key + kKeys >= row + kRows - 1 + offset(mask);  // the next tile is after the diagonal of all rows
        s.each([&](float& x, int mt, int nt, int v) {
            const int i = row_of(mt, ForwardLayout::row_of(v)),
                      past_diagonal = from_diagonal + 16 * nt + ForwardLayout::key_slot(v) - i;
            x = fmaf(-2.f * slope_, static_cast<float>(max(past_diagonal, 0) + (last_time ? i : 0)), x);
        });
        if (!last_time) return;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) {
                const float by = 2.f * slope_ * static_cast<float>(row_of(mt, r));
                softmax.row[mt][r].limit -= by;
                softmax.row[mt][r].row_max -= by * scale(p);
            }
        slope_ = -slope_;
        set_interval(unmasked, mask, row, true);
    }
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>& softmax, float scale_log2) const {
        const ForwardLane lane(remat_thread_index() & 31);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++)
                softmax.row[mt][r].row_max -=
                    slope_ * scale_log2 *
                    static_cast<float>(16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r));
    }
};

template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureAlibi, Grid> : public AlibiFeature<RowTiles, KeyTiles, false, Grid> {
public:
    using AlibiFeature<RowTiles, KeyTiles, false, Grid>::AlibiFeature;
};
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureAlibi | kFeatureSoftcap, Grid>
    : public AlibiFeature<RowTiles, KeyTiles, true, Grid> {
public:
    using AlibiFeature<RowTiles, KeyTiles, true, Grid>::AlibiFeature;
};

// ---- bias -----------------------------------------------------------------------------------------

// Bias in fp16, loaded one product ahead. With one tile of keys it is the initial accumulator, and its address lies in the
// lane's scratch. With more tiles it would take too many registers during the product, so it is added after it.
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureBias, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    static_assert(Grid::kHasHeadAndBatchAxes, "batch entry and head are the grid's");
    static constexpr bool kStarts = KeyTiles == 1;

    // Where the lane's bias lies.
    struct BiasAddress {
        const unsigned short* base;  // of the lane's first row
        int rows_left, first_key;  // rows after that one; the lane's first key
    };
    BiasAddress address_;  // with one tile of keys in memory_
    LaneScratch memory_;
    uint2 loaded_[RowTiles][KeyTiles][ForwardLayout::kRows];

    template <class F>
    __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int nt = 0; nt < KeyTiles; nt++)
#pragma unroll
                for (int r = 0; r < ForwardLayout::kRows; r++) {
                    const float2 low = to_float2(loaded_[mt][nt][r].x), high = to_float2(loaded_[mt][nt][r].y);
                    const float x[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                    for (int v = 0; v < ForwardLayout::kElements; v++)
                        if (ForwardLayout::row_of(v) == r) f(mt, nt, v, x[ForwardLayout::key_slot(v)]);
                }
    }
    __device__ __forceinline__ static const unsigned short* base_of(const FwdParams& p, const ForwardLane& lane, int row) {
        const ScoreOptions& o = p.score_options;
        return o.bias + remat_block_batch() * o.bias_batch_stride +
               remat_head<ForwardLayout::kEitherOrder>(p.problem) * o.bias_head_stride +
               min(row + ForwardLayout::first_query(lane), p.problem.seqlen_q - 1) * o.bias_row_stride;
    }
    // From an opaque copy, so that it holds no register in between.
    __device__ __forceinline__ static float inverse_scale(const FwdParams& p) {
        return __fdividef(1.f, __int_as_float(keep_in_register(__float_as_int(p.problem.scale))));
    }
    __device__ __forceinline__ static int rows_left(const FwdParams& p, const ForwardLane& lane, int row) {
        return max(p.problem.seqlen_q - 1 - row - ForwardLayout::first_query(lane), 0);
    }

    __device__ __forceinline__ void add(const FwdParams& p, typename Base::Tile& s) const {
        const float factor = inverse_scale(p);
        each([&](int mt, int nt, int v, float x) { s.tile[mt][nt][v] = fmaf(x, factor, s.tile[mt][nt][v]); });
    }

public:
    using typename Base::Tile;
    static constexpr int kLaneScratchChunks = kStarts ? 1 : 0;

    __device__ __forceinline__ ScoreFeature(const FwdParams& p, const Grid& grid, const Mask& mask,
                                            typename Base::Unmasked& unmasked, const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), memory_(memory) {
        // else the epilogue would reuse this value, and hold a register until then
        const ForwardLane lane(remat_thread_index() & 31);
        address_.base = base_of(p, lane, row);
        if (!kStarts) return;
        const unsigned long long base = reinterpret_cast<unsigned long long>(address_.base);
        memory.store(0, make_uint4(static_cast<u32>(base), static_cast<u32>(base >> 32), rows_left(p, lane, row),
                                   ForwardLayout::first_key(lane)));
    }
    // Keys past the last give the last group's bias, and so do rows: these scores are masked or not stored.
    __device__ __forceinline__ void load(const FwdParams& p, int row, int key) {
        BiasAddress address = address_;
        if (kStarts) {
            const uint4 x = memory_.load(0);
            address.base = reinterpret_cast<const unsigned short*>(x.x | static_cast<unsigned long long>(x.y) << 32);
            address.rows_left = x.z;
            address.first_key = x.w;
        } else {
            const ForwardLane lane(remat_thread_index() & 31);
            address.rows_left = rows_left(p, lane, row);
            address.first_key = ForwardLayout::first_key(lane);
        }
        const unsigned row_stride = p.score_options.bias_row_stride;
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            const unsigned short* from = address.base + min(key + 16 * nt + address.first_key, (p.problem.seqlen_k - 1) & ~3);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int r = 0; r < ForwardLayout::kRows; r++) {
                    const int rows = min(16 * mt + ForwardLayout::row_slot(r), address.rows_left);
                    const unsigned short* at = rows_after(from, rows, row_stride);
                    // Not .nc: this form stays before the next barrier.
                    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                                 : "=r"(loaded_[mt][nt][r].x), "=r"(loaded_[mt][nt][r].y)
                                 : "l"(at));
                }
        }
    }
    __device__ __forceinline__ void init_accumulators(const FwdParams& p, Tile& s, int, int) const {
        s.clear();
        if (kStarts) add(p, s);
    }
    __device__ __forceinline__ void add_to(const FwdParams& p, Tile& s) const {
        if (!kStarts) add(p, s);
    }
};

// ---- dropout --------------------------------------------------------------------------------------

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
    static_assert(Grid::kHasHeadAndBatchAxes, "batch entry and head are the grid's");
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

template <int RowTiles, int KeyTiles, class Grid>
using Features = ScoreFeature<RowTiles, KeyTiles, kRequiredFeatures, Grid>;

}  // namespace volta
