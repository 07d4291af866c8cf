// A score function in volta forward kernels of one feature (score_feature.cuh).
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

// The softmax takes states. Scores are linear functions of them: score = factor * state + constant (score_function.cuh). So
// scores themselves are never computed. Row maxima lack the constant until finish().
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, ScoreFunction::kFeature, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    ScoreFunction function_;
    ScoreFunction::TileKind kind_ = ScoreFunction::kPlain;

public:
    using typename Base::Tile;
    using typename Base::Unmasked;

    __device__ __forceinline__ ScoreFeature(const FwdParams& p, const Grid& grid, const Mask& mask, Unmasked& unmasked,
                                            const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), function_(p.problem, p.score_options) {}
    __device__ __forceinline__ float scale(const FwdParams&) const { return function_.factor(); }
    __device__ __forceinline__ float score(float x) const { return function_.state(x, kind_); }
    template <class Rescale>
    __device__ __forceinline__ void update_row_max(const Tile& s, SoftmaxState<RowTiles>& softmax, float scale, float inverse_scale,
                                                   Rescale rescale) const {
        // m: a row's largest product. Its scaled state is passed, so the scales are 1. The row's limit is compared with products:
        // it becomes the product that has this state.
        s.update_row_max(softmax, rescale, [&](SoftmaxRow& row, float m) {
            const float factor = row.template update_row_max<RescaledRows::kAll>(scale * function_.state(m), 1.f, 1.f);
            row.limit = function_.product(row.limit * inverse_scale);
            return factor;
        });
    }
    // A masked product is -inf and needs an infinite state, which only a maskable tile has (score_function.cuh). There the other
    // products become maskable_product() first.
    __device__ __forceinline__ void set_masked(bool masked, Tile& s) {
        kind_ = ScoreFunction::kPlain;
        if (!masked) return;
        const float unit = function_.maskable_unit();
        s.each([&](float& x, int, int, int) {
            if (x != negative_infinity()) x = function_.maskable_product(x, unit);
        });
        kind_ = ScoreFunction::kMaskable;
    }
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>& softmax, float) const {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) softmax.row[mt][r].row_max += function_.constant();
    }
};

}  // namespace volta
