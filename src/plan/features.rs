//! Features that a problem requests of kernels.

use crate::kernels::{Feature, FeatureSet};
use crate::problem::Attention;

/// Backward options that are not part of the problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardMode {
    /// Gradients are bitwise identical from run to run: no sum depends on the order of blocks.
    pub deterministic: bool,
    /// Kernels write dq, dk and dv as bf16 instead of fp16.
    pub bf16_gradients: bool,
}

/// Returns all features of the problem. The table of passes says which of them a pass can have.
pub fn features(a: &Attention, mode: BackwardMode) -> FeatureSet {
    let f = &a.features;
    FeatureSet::all_where(|feature| match feature {
        Feature::Lengths => a.is_varlen(),
        Feature::Sinks => f.sinks,
        Feature::Bf16Gradients => mode.bf16_gradients,
        Feature::Softcap => f.softcap > 0.0,
        Feature::Alibi => f.alibi,
        Feature::Bias => f.attn_bias,
        Feature::Dropout => f.dropout_p > 0.0,
        // prefill requests them
        Feature::Pages => false,
        Feature::Fp32Bias => f.fp32_bias,
    })
}
