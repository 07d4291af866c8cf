//! Features that a problem requests of kernels: options that need code of their own. The planner takes kernels that have all of them.

use crate::kernels::{Feature, FeatureSet};
use crate::problem::{Attention, RequestedFeatures, ScoreFunction};

/// Backward options that are not part of the problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardMode {
    /// Gradients are bitwise identical from run to run: no sum depends on the order of blocks.
    pub deterministic: bool,
    /// Kernels write dq, dk and dv as fp32 instead of fp16.
    pub fp32_gradients: bool,
    /// There is a gradient of softmax_lse, which the host adds after the preprocess kernel. A fused kernel has no such point.
    pub has_dlse: bool,
    /// Tensors are fp32, and kernels take their numbers as sums of two fp16 numbers.
    pub split: bool,
}

/// Returns all features of the problem. The table of passes (`kernels::variants`) says which of them a pass can have.
pub fn features(a: &Attention, mode: BackwardMode) -> FeatureSet {
    let f = &a.features;
    FeatureSet::all_where(|feature| match feature {
        Feature::Lengths => a.is_varlen(),
        Feature::Sinks => f.sinks,
        Feature::Fp32Gradients => mode.fp32_gradients,
        Feature::Softcap => matches!(f.score_function, Some(ScoreFunction::Softcap(_))),
        Feature::Alibi => f.alibi,
        Feature::Bias => f.attn_bias,
        Feature::Dropout => f.dropout_p > 0.0,
        // a problem cannot tell: the plan of a prefill adds it
        Feature::Pages => false,
        Feature::Fp32Bias => f.fp32_bias,
        Feature::Blocks => f.block_mask,
        Feature::Tree => f.tree,
    })
}

/// Returns a request and a mode for which [`features`] returns these features. `_plan()` takes features by name, and needs the request
/// that they stand for. An fp32 bias is a bias, so `Fp32Bias` also requests `Bias`. `Pages` is ignored: no request has it.
pub fn using(features: FeatureSet) -> (RequestedFeatures, BackwardMode) {
    let has = |feature| features.contains(FeatureSet::of(&[feature]));
    let requested = RequestedFeatures {
        seqused_k: has(Feature::Lengths),
        sinks: has(Feature::Sinks),
        score_function: has(Feature::Softcap).then_some(ScoreFunction::Softcap(1.0)),
        alibi: has(Feature::Alibi),
        attn_bias: has(Feature::Bias) || has(Feature::Fp32Bias),
        fp32_bias: has(Feature::Fp32Bias),
        block_mask: has(Feature::Blocks),
        dropout_p: if has(Feature::Dropout) { 0.5 } else { 0.0 },
        tree: has(Feature::Tree),
        batch_invariant: false,
    };
    (requested, BackwardMode { fp32_gradients: has(Feature::Fp32Gradients), ..BackwardMode::default() })
}
