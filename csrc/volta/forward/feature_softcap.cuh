// Softcap in volta forward kernels of one feature (score_feature.cuh).
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

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

}  // namespace volta
