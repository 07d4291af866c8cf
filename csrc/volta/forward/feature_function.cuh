// Softcap, the one score function, in volta forward kernels that require it and no other score feature: a specialization of
// ScoreFeature. The main loops of register_q.cuh and shared_q.cuh use scale() as the softmax's scale, and call in each step, after
// S = Q K^T and the mask: update_row_max() if a product exceeds its row's limit, set_masked(), and score() of each product. They
// call finish() after the last step. The base class, of plain kernels, has the other functions (score_feature.cuh).
#pragma once

#include "volta/forward/score_feature.cuh"

namespace volta {

// A score function maps a product q . k to a state, and score = factor * state + constant in log2 units (score_function.cuh).
// Softcap is cap tanh x = cap (1 - 2 / (e^2x + 1)) with x = softmax_scale * product / cap:
//
//   state(product)    1 / (e^2x + 1); product(state) is its inverse
//   factor()          -2 cap log2(e); the softmax takes states with this as their scale, so scores are never computed
//   constant()        cap log2(e); row maxima lack it until finish()
//
// RowTiles, KeyTiles: the warp's tiles of 16 query rows (mt), and of 16 keys a step. r is one of a lane's two rows of a tile. Tile:
// a lane's products of a step. Grid, Unmasked and LaneScratch are for other features: here they go to Base alone.
template <int RowTiles, int KeyTiles, class Grid>
class ScoreFeature<RowTiles, KeyTiles, ScoreFunction::kFeature, Grid> : public ScoreFeature<RowTiles, KeyTiles, 0, Grid> {
    using Base = ScoreFeature<RowTiles, KeyTiles, 0, Grid>;
    ScoreFunction function_;
    // How score() computes states of this step's tile: kPlain 1 / (e^2x + 1), or 1 / e^2x after set_masked() (kMaskable).
    ScoreFunction::TileKind kind_ = ScoreFunction::kPlain;

public:
    using typename Base::Tile;
    using typename Base::Unmasked;

    __device__ __forceinline__ ScoreFeature(const FwdParams& p, const Grid& grid, const Mask& mask, Unmasked& unmasked,
                                            const LaneScratch& memory, int row, int key)
        : Base(p, grid, mask, unmasked, memory, row, key), function_(p.problem, p.score_options) {}
    __device__ __forceinline__ float scale(const FwdParams&) const { return function_.factor(); }
    __device__ __forceinline__ float score(float product) const { return function_.state(product, kind_); }
    template <class Rescale>
    __device__ __forceinline__ void update_row_max(const Tile& s, SoftmaxState<RowTiles>& softmax, float scale, float inverse_scale,
                                                   Rescale rescale) const {
        // `scale` is factor(). SoftmaxRow takes the scaled state of the row's largest product, so its own scales are 1. It sets
        // row.limit to the scaled state above which row_max moves next. But the main loops compare products with limits, so the
        // limit becomes the product of that state. kAll: all rows move (only batch-invariant kernels, without features, differ).
        s.update_row_max(softmax, rescale, [&](SoftmaxRow& row, float largest) {
            const float factor = row.template update_row_max<RescaledRows::kAll>(scale * function_.state(largest), 1.f, 1.f);
            row.limit = function_.product(row.limit * inverse_scale);
            return factor;  // by which rescale() multiplies the row's output
        });
    }
    // Masked products are -inf. Their scores must be -inf, so their states infinite (factor() is negative), but 1 / (e^2x + 1)
    // would be 1. So a tile with masked products takes 1 / e^2x, infinite for x = -inf. maskable_product() first turns each other
    // product, of x, into that of y with e^2y = e^2x + 1, which keeps its state. `unit` converts log2(e^2y) to that product.
    __device__ __forceinline__ void set_masked(bool masked, Tile& s) {
        kind_ = ScoreFunction::kPlain;
        if (!masked) return;
        const float unit = function_.maskable_unit();
        s.each([&](float& product, int, int, int) {
            if (product != negative_infinity()) product = function_.maskable_product(product, unit);
        });
        kind_ = ScoreFunction::kMaskable;
    }
    __device__ __forceinline__ void finish(SoftmaxState<RowTiles>& softmax, float) const {
        unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) { softmax.row[mt][r].row_max += function_.constant(); });
    }
};

}  // namespace volta
