// What a kernel has code for: FEATURES and REQUIRED_FEATURES are the sets of its row in src/kernels, as -D definitions. Names are
// those of Feature and FeatureSet in src/kernels/features.rs, which says what each feature is. Included by all kernels that branch
// on a feature: every test of these sets is here, and code names its result.
#pragma once

#include "volta_fa_params.h"

// Kernels whose lengths come from memory: FeatureSet::VARLEN, PAGED and larger sets. The set's other features have tests of their
// own, because some kernels have sinks without lengths.
constexpr bool kVarlen = FEATURES & kFeatureLengths;
constexpr bool kHasSinks = FEATURES & kFeatureSinks;
constexpr bool kHasFp32Gradients = FEATURES & kFeatureFp32Gradients;  // can write dq, dk and dv as fp32, if a parameter says so
// Kernels of FeatureSet::PAGED.
constexpr bool kPaged = FEATURES & kFeaturePages;
constexpr bool kTree = FEATURES & kFeatureTree;  // has the tree mask of speculative decoding (decode/tree.cuh)

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
static_assert(!kRequiredFeatures || kRequiredFeatures == (FEATURES & kScoreFeatures),
              "such kernels have code for no other feature");
constexpr bool kRequiresScoreFunction = kRequiredFeatures & kFeatureSoftcap;
constexpr bool kRequiresAlibi = kRequiredFeatures & kFeatureAlibi;
constexpr bool kRequiresBias = kRequiredFeatures & kFeatureBias;
constexpr bool kRequiresDropout = kRequiredFeatures & kFeatureDropout;
constexpr bool kRequiresTwo = (kRequiredFeatures & (kRequiredFeatures - 1)) != 0;
// Kernels of FeatureSet::GENERIC and GENERIC_BLOCKS, and fp32's generic ones: parameters say which features the problem uses. The
// opposite are plain kernels, without score features, and kernels that require one feature or two.
constexpr bool kGeneric = kHasScoreFeatures && !kRequiredFeatures;
