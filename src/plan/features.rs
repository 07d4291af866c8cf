//! What kernels get of a problem: the features that it requests, options that need code of their own, and the parameters of all kernels.
//! The planner takes kernels that have all features (choose.rs). Also the inverse, for `_plan()`.

use crate::kernels::{Feature, FeatureSet};
use crate::params;
use crate::problem::{Attention, RequestedFeatures, ScoreFunction};

/// What a backward plan depends on beyond the problem. Forward plans take the default.
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

/// Returns all features of the problem. The table of passes (src/kernels/passes.rs) says which of them a pass can have.
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
        // of the kernel, not of the problem: `plan::prefill` adds it
        Feature::Pages => false,
        Feature::Fp32Bias => f.fp32_bias,
        Feature::Blocks => f.block_mask,
        Feature::Tree => f.tree,
        Feature::Fp32Output => f.fp32_output,
    })
}

/// Returns a request and a mode for which [`features`] returns these features. `_plan()` takes features by name, and needs the request
/// that they stand for; the cap and the dropout probability stand for any. An fp32 bias is a bias, so `Fp32Bias` also requests `Bias`.
/// `Pages` is ignored: no request has it.
pub fn using(features: FeatureSet) -> (RequestedFeatures, BackwardMode) {
    let requested = RequestedFeatures {
        seqused_k: features.has(Feature::Lengths),
        sinks: features.has(Feature::Sinks),
        score_function: features.has(Feature::Softcap).then_some(ScoreFunction::Softcap(1.0)),
        alibi: features.has(Feature::Alibi),
        attn_bias: features.has(Feature::Bias) || features.has(Feature::Fp32Bias),
        fp32_bias: features.has(Feature::Fp32Bias),
        block_mask: features.has(Feature::Blocks),
        dropout_p: if features.has(Feature::Dropout) { 0.5 } else { 0.0 },
        tree: features.has(Feature::Tree),
        batch_invariant: false, // no feature: `_plan()` reads it from the environment
        fp32_output: features.has(Feature::Fp32Output),
    };
    (requested, BackwardMode { fp32_gradients: features.has(Feature::Fp32Gradients), ..BackwardMode::default() })
}

/// Returns the parameters that all attention kernels share ([`params::Problem`]), of a launch of `batches` batch entries.
pub fn problem_block(a: &Attention, batches: i64) -> params::Problem {
    let unbounded = a.seqlen_q + a.seqlen_k;
    let side = |w: Option<i64>| w.map_or(unbounded, |w| w.min(unbounded)) as i32;
    // A zero scale gives all visible keys equal weight. So does a tiny one, and kernels can divide by it.
    const TINY: f32 = 1e-30;
    let scale = (a.softmax_scale as f32).abs().max(TINY);
    params::Problem {
        batch: batches as i32,
        nheads: a.nheads as i32,
        nheads_k: a.nheads_k as i32,
        seqlen_q: a.seqlen_q as i32,
        seqlen_k: a.seqlen_k as i32,
        headdim: a.headdim as i32,
        headdim_v: a.headdim_v as i32,
        window_left: side(a.window.left),
        window_right: side(a.window.right),
        scale,
        scale_log2: scale * std::f32::consts::LOG2_E,
        sign_flip: if a.softmax_scale < 0.0 { 0x8000_8000 } else { 0 }, // XOR mask of two fp16 numbers' signs
    }
}
