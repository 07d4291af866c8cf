// Features: the specialization of ScoreFeature (score_feature.cuh) for the score features (softcap, ALiBi, bias, dropout) that this
// volta forward kernel requires: kRequiredFeatures, bits from REQUIRED_FEATURES of the kernel's row in src/kernels (features.cuh).
// None: the primary template, which does what plain kernels need, and generic ones, which test parameters. The main loops of
// register_q.cuh and shared_q.cuh call it. The other forward kernel (column_groups.cuh) and the grids (stream_k.cuh,
// block_mask.cuh) include this file for what it includes.
#pragma once

#include "volta/forward/feature_alibi.cuh"
#include "volta/forward/feature_bias.cuh"
#include "volta/forward/feature_dropout.cuh"
#include "volta/forward/feature_function.cuh"
#include "volta/forward/score_feature.cuh"

namespace volta {

// RowTiles, KeyTiles: a warp's tiles of 16 query rows, and of 16 keys a step. Grid: the kernel's grid policy (layout.cuh).
template <int RowTiles, int KeyTiles, class Grid>
using Features = ScoreFeature<RowTiles, KeyTiles, kRequiredFeatures, Grid>;

}  // namespace volta
