// ALiBi, alone or after a score function (softcap), in volta forward kernels of one or two features. The main loops
// (register_q.cuh, shared_q.cuh) call its functions in this order: constructor, init_row_max(); for each step init_accumulators(),
// the product Q K^T, add_to(), correct_masked_tile() on a tile that is not unmasked, softmax; finish() at the end.
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

// ALiBi adds -slope * |i + o - j| to the score of query i and key j, where o = seqlen_k - seqlen_q. Let `row` be the warp's first.
// Up to the diagonal j = i + o this is slope * (j - row - o) - slope * (i - row); after it, both signs change. The term with i is
// constant in a row, so any row_max absorbs it. So products begin with a number that depends on the key alone, only tiles on the
// diagonal need a correction, and the sign changes once.
//
// AfterFunction: products begin with 0, because the function takes them alone; the number times log2(e) is added to its value.
//
//   RowTiles, KeyTiles  the warp's tiles of 16 query rows (mt), and of 16 keys a step (nt)
//   Grid              the kernel's grid policy, which has a block's head and batch entry
//   ForwardLayout     of each tile a lane has kRows (2) rows r, first_query() + row_slot(r), and kKeys (4) consecutive keys from
//                     first_key() on. Its element v (0 to 7) is in row row_of(v), at key first_key() + key_slot(v) (layout.cuh)
//   mask              row i sees keys i + low to i + high; all of `rows` rows from i on see full_first(i, rows) to full_end(i) - 1
//   unmasked          tiles that begin at keys `first` to first + span (inclusive) need no mask
//   SoftmaxState      row_max, subtracted from scores, in log2 units; `limit`, the score above which row_max moves, in their units
//   LaneScratch       shared memory, unused here
//   remat_*()         reads a special register again at its use, so that it holds no register in between (ptx.cuh)
template <int RowTiles, int KeyTiles, bool AfterFunction, class Grid>
class AlibiFeature : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    static constexpr int kWarpRows = 16 * RowTiles, kStepKeys = 16 * KeyTiles;  // query rows of the warp, keys of a step

    const Grid& grid_;
    float slope_;  // in the scores' units (unscaled products, AfterFunction log2 units); changes its sign after the diagonal
    float distance_;  // j - row - o of the lane's first key in the next tile

    // Returns the head's slope as slope_ is up to the diagonal.
    __device__ __forceinline__ float slope_of(const FwdParams& p) const {
        const int head = grid_.remat_head(p.problem), batch = grid_.remat_batch(p.problem);
        return Alibi::load_slope(p.score_options, batch, head) * (AfterFunction ? kLog2e : __fdividef(1.f, p.problem.scale));
    }
    __device__ __forceinline__ static int offset(const Mask& mask) { return mask.seqlen_k - mask.seqlen_q; }

    // Sets `unmasked` to the first keys of tiles that need neither mask nor correction, up to the diagonal or after it.
    __device__ __forceinline__ static void set_interval(typename Base::Unmasked& unmasked, const Mask& mask, int row,
                                                        bool past_diagonal) {
        int first = mask.full_first(row, kWarpRows), end = mask.full_end(row);
        if (past_diagonal)
            first = max(first, row + kWarpRows - 1 + offset(mask));
        else
            end = min(end, row + offset(mask) + 1);
        const bool none = end - kStepKeys < first;
        unmasked.first = none ? 0x7fffffff : first;  // no key is that large
        unmasked.span = none ? 0 : end - kStepKeys - first;
    }

    // Computes the terms of a lane's four keys in key tile nt, plus `constant` if AfterFunction.
    __device__ __forceinline__ void terms(float (&key_terms)[ForwardLayout::kKeys], int nt, float constant) const {
        key_terms[0] = AfterFunction ? fmaf(slope_, distance_ + 16 * nt, constant) : slope_ * (distance_ + 16 * nt);
#pragma unroll
        for (int j = 1; j < ForwardLayout::kKeys; j++) key_terms[j] = key_terms[j - 1] + slope_;
    }

public:
    using typename Base::Tile;
    using typename Base::Unmasked;

    __device__ __forceinline__ AlibiFeature(const FwdParams& p, const Grid& grid, const Mask& mask, Unmasked& unmasked,
                                            const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), grid_(grid), slope_(slope_of(p)),
          distance_(static_cast<float>(key + ForwardLayout::first_key(ForwardLane()) - row - offset(mask))) {
        set_interval(unmasked, mask, row, false);  // up to the diagonal
    }
    __device__ __forceinline__ float scale(const FwdParams& p) const { return AfterFunction ? 1.f : p.problem.scale_log2; }

    // Begins at the score of each row's nearest visible key. With steep slopes a row's maximum is there or close. Otherwise
    // row_max would reach it in several steps above kRescaleThreshold, and each rescales the output.
    __device__ __forceinline__ void init_row_max(SoftmaxState<RowTiles>& softmax, const FwdParams& p, const Mask& mask,
                                                 const unsigned short* q, const unsigned short* k, int row) const {
        static_assert(kWarpRows == 32, "each lane computes the score of one row");
        const Problem& problem = p.problem;
        const ForwardLane lane;
        const int i = row + lane.lane, first = max(i + mask.low, 0), last = min(i + mask.high, mask.seqlen_k - 1);
        const int key = min(max(i + offset(mask), first), last);
        float x = negative_infinity();
        if (i < mask.seqlen_q && key >= first) {
            float dot = 0.f;
#pragma unroll 1
            for (int c = 0; c < problem.headdim; c += kChunk) {
                // a negative softmax_scale flips the signs of Q
                const uint4 a = flipped(load_global(q + i * p.q.row_stride + c), problem.sign_flip);
                const uint4 b = load_global(k + key * p.k.row_stride + c);
                const u32 pairs[4][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float2 left = to_float2(pairs[n][0]), right = to_float2(pairs[n][1]);
                    dot = fmaf(left.x, right.x, fmaf(left.y, right.y, dot));
                }
            }
            if (AfterFunction) dot = ScoreFunction(problem, p.score_options)(dot);
            // Scores leave out -slope * (i - row), where i - row is the lane. fmaxf turns a NaN into -inf, which raises no maximum:
            // the product Q K^T has the NaN too, and passes it to the row.
            x = fmaxf(dot + slope_ * (lane.lane - fabsf(static_cast<float>(i + offset(mask) - key))), negative_infinity());
        }
        __syncwarp();
        // kAll: a row's maximum rises to this score from any lower one (softmax.cuh)
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) {
                const float row_score =
                    __shfl_sync(~0u, x, 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r));
                softmax.row[mt][r].template update_row_max<RescaledRows::kAll>(row_score, scale(p), __fdividef(1.f, scale(p)));
            }
    }

    __device__ __forceinline__ void init_accumulators(const FwdParams&, Tile& s, int, int) {
        if (AfterFunction) return s.clear();
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            float key_terms[ForwardLayout::kKeys];
            terms(key_terms, nt, 0.f);
            unrolled<RowTiles, ForwardLayout::kElements>(
                [&](int mt, int v) { s.tile[mt][nt][v] = key_terms[ForwardLayout::key_slot(v)]; });
        }
        distance_ += kStepKeys;
    }
    __device__ __forceinline__ void add_to(const FwdParams& p, Tile& s) {
        if (!AfterFunction) return;
        const ScoreFunction function(p.problem, p.score_options);
#pragma unroll
        for (int nt = 0; nt < KeyTiles; nt++) {
            float key_terms[ForwardLayout::kKeys];
            // A softcap is constant() plus a multiple of its state. of_product() omits the constant: the key's term contains it.
            terms(key_terms, nt, function.constant());
            unrolled<RowTiles, ForwardLayout::kElements>([&](int mt, int v) {
                float& x = s.tile[mt][nt][v];
                x = function.of_product(x, key_terms[ForwardLayout::key_slot(v)]);
            });
        }
        distance_ += kStepKeys;
    }

    // correct_masked_tile() may raise scores above row_max, so the main loop tests them again where correction_raises(): with a
    // negative slope, terms past the diagonal grow.
    static constexpr bool kCorrectionRaises = true;
    __device__ __forceinline__ bool correction_raises(const FwdParams& p) const { return slope_of(p) < 0.f; }
    // Corrects a tile on the diagonal: turns terms past it from slope * distance to -slope * distance. The last of these tiles for
    // the warp also moves scores and row maxima to the constant term after the diagonal, and changes the sign of slope_.
    __device__ __forceinline__ void correct_masked_tile(Tile& s, SoftmaxState<RowTiles>& softmax, Unmasked& unmasked,
                                                        const FwdParams& p, const Mask& mask, int row, int key) {
        const float up_to_diagonal = slope_of(p);
        if (slope_ != up_to_diagonal) return;  // after the diagonal for good (or slope is NaN, unequal to itself)
        const ForwardLane lane(remat_thread_index() & 31);
        const auto row_of = [&](int mt, int r) { return 16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r); };
        const int from_diagonal = key + ForwardLayout::first_key(lane) - row - offset(mask);
        // the next tile is after the diagonal of all rows
        const bool last_time = key + kStepKeys >= row + kWarpRows - 1 + offset(mask);
        // i counts from the warp's first row here: i - row above
        s.each([&](float& x, int mt, int nt, int v) {
            const int i = row_of(mt, ForwardLayout::row_of(v)),
                      past_diagonal = from_diagonal + 16 * nt + ForwardLayout::key_slot(v) - i;
            x = fmaf(-2.f * slope_, static_cast<float>(max(past_diagonal, 0) + (last_time ? i : 0)), x);
        });
        if (!last_time) return;
        unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) {
            const float by = 2.f * slope_ * static_cast<float>(row_of(mt, r));
            softmax.row[mt][r].limit -= by;
            softmax.row[mt][r].row_max -= by * scale(p);
        });
        slope_ = -slope_;
        set_interval(unmasked, mask, row, true);  // after the diagonal
    }
    // Adds the term that scores left out, -slope_ * (i - row), to row maxima, and so to lse. `scale`: scale(p), from the scores'
    // units to log2 units.
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>& softmax, float scale) const {
        const ForwardLane lane(remat_thread_index() & 31);
        unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) {
            softmax.row[mt][r].row_max -=
                slope_ * scale * static_cast<float>(16 * mt + ForwardLayout::first_query(lane) + ForwardLayout::row_slot(r));
        });
    }
};

// kFeature...: bits of the set of required features.
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureAlibi, Grid> : public AlibiFeature<RowTiles, KeyTiles, false, Grid> {
public:
    using AlibiFeature<RowTiles, KeyTiles, false, Grid>::AlibiFeature;
};
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, kFeatureAlibi | ScoreFunction::kFeature, Grid>
    : public AlibiFeature<RowTiles, KeyTiles, true, Grid> {
public:
    using AlibiFeature<RowTiles, KeyTiles, true, Grid>::AlibiFeature;
};

}  // namespace volta
