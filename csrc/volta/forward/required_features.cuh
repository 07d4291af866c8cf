// The score feature of this volta forward kernel: Features is the specialization of ScoreFeature (score_feature.cuh) for the
// features that the kernel requires. Includes all specializations, for the main loops (register_q.cuh, shared_q.cuh,
// column_groups.cuh).
#pragma once

#include "volta/forward/feature_alibi.cuh"
#include "volta/forward/feature_bias.cuh"
#include "volta/forward/feature_dropout.cuh"
#include "volta/forward/feature_function.cuh"
#include "volta/forward/score_feature.cuh"

namespace volta {

template <int RowTiles, int KeyTiles, class Grid>
using Features = ScoreFeature<RowTiles, KeyTiles, kRequiredFeatures, Grid>;

}  // namespace volta
