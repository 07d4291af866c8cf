//! Backward kernels for headdims above 256, which pass P and dS through memory: csrc/backward/stored_scores.cuh and stored_gradients.cuh.

use super::{Family, FeatureSet, Pass, Variant};

/// Returns a family's rows, from its sources of the scores and of the gradients: tiles of 128 by 128, four warps with 64 by 64 each, so that
/// two blocks an SM have all registers. Two buffers of both operands are 32 KB; two blocks have the 64 KB of Turing.
pub fn stored_backward(family: Family, scores: &'static str, gradients: &'static str) -> [Variant; 5] {
    let row = |pass, source| Variant {
        headdim: 512,
        headdim_v: 512,
        block_rows: 128,
        step: 32,
        threads: 128,
        shared_bytes: 2 * 2 * 2 * 128 * 32,
        blocks_per_sm: 2,
        ..Variant::new(family, pass, source)
    };
    let (scores, gradients) = (row(Pass::BackwardScores, scores), row(Pass::BackwardGradients, gradients));
    let varlen = |row: Variant| row.with_features(FeatureSet::VARLEN);
    [scores, gradients, varlen(scores), varlen(gradients), scores.with_features(FeatureSet::GENERIC)]
}
