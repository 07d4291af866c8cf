// What a kernel has code for: FEATURES and REQUIRED_FEATURES are the sets of its row in src/kernels. Names are those of Feature and
// FeatureSet in src/kernels/variants.rs, which says what each feature is. All tests of these sets are here.
#pragma once

#include "volta_fa_params.h"

// Kernels of FeatureSet::VARLEN and of larger sets: lengths come from memory. The set's other features have tests of their own,
// because some kernels have sinks without lengths.
constexpr bool kVarlen = FEATURES & kFeatureLengths;
constexpr bool kHasSinks = FEATURES & kFeatureSinks;
constexpr bool kHasFp32Gradients = FEATURES & kFeatureFp32Gradients;
// Kernels of FeatureSet::PAGED.
constexpr bool kPaged = FEATURES & kFeaturePages;
constexpr bool kTree = FEATURES & kFeatureTree;

// Features of scores (Feature::OF_SCORES). score_function.cuh has the one score function, softcap.
constexpr bool kHasScoreFunction = FEATURES & kFeatureSoftcap;
constexpr bool kHasAlibi = FEATURES & kFeatureAlibi;
constexpr bool kHasBias = FEATURES & kFeatureBias;
constexpr bool kHasFp32Bias = FEATURES & kFeatureFp32Bias;  // in addition to kHasBias
constexpr bool kHasDropout = FEATURES & kFeatureDropout;
constexpr bool kHasScoreFeatures = FEATURES & kScoreFeatures;

// The features of scores that every problem of the kernel uses (Variant::required_features). The kernel applies them without a test
// of its parameters.
constexpr unsigned kRequiredFeatures = REQUIRED_FEATURES & kScoreFeatures;
static_assert(!kRequiredFeatures || kRequiredFeatures == (FEATURES & kScoreFeatures), "a required feature stands alone");
// Kernels of FeatureSet::GENERIC and GENERIC_BLOCKS: parameters say which features the problem uses.
constexpr bool kGeneric = kHasScoreFeatures && !kRequiredFeatures;
