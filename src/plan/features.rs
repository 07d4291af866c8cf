//! What a problem asks of kernels.

use crate::kernels::{Feature, FeatureSet};
use crate::problem::Attention;

/// How a backward pass differs from others of the same problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardMode {
    /// gradients equal to the bit, run to run: no sum depends on which block comes first
    pub deterministic: bool,
    /// dq, dk and dv leave the kernels as bf16 instead of fp16
    pub bf16_gradients: bool,
}

/// What the problem asks of kernels in all; what a pass can be asked at all, its table says.
pub fn needs(a: &Attention, mode: BackwardMode) -> FeatureSet {
    let f = &a.features;
    FeatureSet::all_where(|need| match need {
        Feature::Lengths => a.is_varlen(),
        Feature::Sinks => f.sinks,
        Feature::Bf16Gradients => mode.bf16_gradients,
        Feature::Softcap => f.softcap > 0.0,
        Feature::Alibi => f.alibi,
        Feature::Bias => f.attn_bias,
        Feature::Dropout => f.dropout_p > 0.0,
        // no attention's own: `prefill` asks for them
        Feature::Pages => false,
        Feature::Fp32Bias => f.fp32_bias,
    })
}
