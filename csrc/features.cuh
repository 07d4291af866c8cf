// The optional features that a kernel has code for. FEATURES and REQUIRED_FEATURES are bit sets from the kernel's row in
// src/kernels, as -D definitions; the build generates kFeature... and kScoreFeatures, the bits of softcap, ALiBi, bias and dropout,
// from src/kernels/features.rs. Included by all kernels that branch on a feature: they test these constants, not the sets.
#pragma once

#include "volta_fa_params.h"  // generated: also kFeature... and kScoreFeatures

constexpr bool kVarlen = FEATURES & kFeatureLengths;  // reads sequence lengths from GPU memory, for example cu_seqlens_q
constexpr bool kHasSinks = FEATURES & kFeatureSinks;  // attention sinks: one more logit in each row's softmax sum
constexpr bool kHasFp32Gradients = FEATURES & kFeatureFp32Gradients;  // can write dq, dk and dv as fp32, if a parameter says so
constexpr bool kHasFp32Output = FEATURES & kFeatureFp32Output;  // can write out as fp32, if a parameter says so
constexpr bool kPaged = FEATURES & kFeaturePages;  // K and V are in a KV cache: pages, or entries with indices from memory
constexpr bool kTree = FEATURES & kFeatureTree;  // has the tree mask of speculative decoding (decode/tree.cuh)

// Features that change scores or probabilities. The one score function is softcap (score_function.cuh).
constexpr bool kHasScoreFunction = FEATURES & kFeatureSoftcap;
constexpr bool kHasAlibi = FEATURES & kFeatureAlibi;
constexpr bool kHasBias = FEATURES & kFeatureBias;
constexpr bool kHasFp32Bias = FEATURES & kFeatureFp32Bias;  // in addition to kHasBias
constexpr bool kHasDropout = FEATURES & kFeatureDropout;
constexpr bool kHasScoreFeatures = FEATURES & kScoreFeatures;

// The features of scores that every problem of the kernel uses. The kernel applies them without a test of its parameters.
constexpr unsigned kRequiredFeatures = REQUIRED_FEATURES & kScoreFeatures;
static_assert(!kRequiredFeatures || kRequiredFeatures == (FEATURES & kScoreFeatures),
              "such kernels have code for no other feature of scores");
constexpr bool kRequiresScoreFunction = kRequiredFeatures & kFeatureSoftcap;
constexpr bool kRequiresAlibi = kRequiredFeatures & kFeatureAlibi;
constexpr bool kRequiresBias = kRequiredFeatures & kFeatureBias;
constexpr bool kRequiresDropout = kRequiredFeatures & kFeatureDropout;
constexpr bool kRequiresTwo = (kRequiredFeatures & (kRequiredFeatures - 1)) != 0;  // more than one bit is set
// Generic kernels: parameters say which of the features the problem uses. Other kernels are plain, without score features, or
// require one feature or two.
constexpr bool kGeneric = kHasScoreFeatures && !kRequiredFeatures;
