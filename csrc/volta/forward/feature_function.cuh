// A score function (softcap) in volta forward kernels of one feature: overrides functions of ScoreFeature. The main loops
// (register_q.cuh, shared_q.cuh) call them; score_feature.cuh has their order and what each is for. RowTiles, KeyTiles: the warp's
// tiles of 16 query rows, and of 16 keys a step. Grid: the kernel's grid policy.
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

// A score function maps a product q . k to a state, and score = factor * state + constant in log2 units (score_function.cuh).
// Softcap is cap tanh x = cap (1 - 2 / (e^2x + 1)) with x = softmax_scale * product / cap: its state is 1 / (e^2x + 1), its factor
// -2 cap and its constant cap, both times log2(e). The softmax takes states with factor as their scale, so scores are never
// computed. Row maxima lack the constant until finish().
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, ScoreFunction::kFeature, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    ScoreFunction function_;
    ScoreFunction::TileKind kind_ = ScoreFunction::kPlain;  // of this tile: kMaskable if it has masked products (set_masked())

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
        // m: a row's largest product. SoftmaxRow gets its scaled state, so with scales of 1, and returns as limit the scaled state
        // above which a maximum moves. The test compares limits with products, so the limit becomes the product of that state.
        // kAll: all rows move; kMovedRows is for batch-invariant kernels, and none has required features.
        s.update_row_max(softmax, rescale, [&](SoftmaxRow& row, float m) {
            const float factor = row.template update_row_max<RescaledRows::kAll>(scale * function_.state(m), 1.f, 1.f);
            row.limit = function_.product(row.limit * inverse_scale);
            return factor;
        });
    }
    // Masked products are -inf. Their scores must be -inf, so their states infinite (factor() is negative). A plain tile's state,
    // 1 / (e^2x + 1), would be 1. So in tiles with masked products (kMaskable) states are 1 / e^2y, infinite for y = -inf.
    // maskable_product() turns other products into those of y with e^2y = e^2x + 1: their states stay. `unit`: from log2(e^2y) to
    // that product.
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
        unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) { softmax.row[mt][r].row_max += function_.constant(); });
    }
};

}  // namespace volta
