//! Features that a problem requests beyond scale and window, and the rules of their numbers. A feature is an option that kernels need code
//! for; src/plan/features.rs turns these into the planner's set. The validators of each operator call [`RequestedFeatures::of`].

use super::checks::reject_if;
use super::tensor::{DType, Options};
use crate::error::{Error, Result};
use crate::limits::SOFTCAPS; // 1e-4 to 1e4

/// Features beyond scale and window, which decide which kernels are applicable. Most are true if the option of their name is given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestedFeatures {
    /// Pointwise function of scaled scores.
    pub score_function: Option<ScoreFunction>,
    /// Probability of dropping a probability, in [0, 1); 0: off.
    pub dropout_p: f64,
    pub alibi: bool,
    pub attn_bias: bool,
    /// Kernels read the bias as fp32: it is fp32 or bf16.
    pub fp32_bias: bool,
    pub sinks: bool,
    pub seqused_k: bool,
    /// `block_lists`: only listed blocks of scores exist.
    pub block_mask: bool,
    /// `tree_mask`: which draft tokens of speculative decoding a query sees.
    pub tree: bool,
    /// No bit of a row may depend on other rows or sequences.
    pub batch_invariant: bool,
    /// Forward kernels write out as fp32: the call's tensors are fp32, and src/ops/scaled.rs cast them to fp16. No option: it sets this.
    pub fp32_output: bool,
}

impl RequestedFeatures {
    pub(super) fn of(o: &Options) -> Result<RequestedFeatures> {
        reject_if!(!(0.0..1.0).contains(&o.dropout_p), "dropout_p", o.dropout_p, "a probability in [0, 1)");
        check_batch_invariant(o)?;
        Ok(RequestedFeatures {
            score_function: ScoreFunction::of(o)?,
            dropout_p: o.dropout_p,
            alibi: o.alibi_slopes.is_some(),
            attn_bias: o.attn_bias.is_some(),
            fp32_bias: o.attn_bias.as_ref().is_some_and(|d| matches!(d.dtype, DType::Float | DType::BFloat16)),
            sinks: o.sinks.is_some(),
            seqused_k: o.seqused_k.is_some(),
            block_mask: o.block_lists.is_some(),
            tree: o.tree_mask.is_some(),
            batch_invariant: o.batch_invariant,
            fp32_output: false,
        })
    }
}

/// Rejects options that batch-invariant kernels lack.
fn check_batch_invariant(o: &Options) -> Result<()> {
    if !o.batch_invariant {
        return Ok(());
    }
    let expected = "None with batch_invariant, which has no kernels for it";
    for (name, t) in [("block_lists", &o.block_lists), ("tree_mask", &o.tree_mask)] {
        reject_if!(t.is_some(), name, "a tensor", expected);
    }
    reject_if!(o.dropout_p > 0.0, "dropout_p", o.dropout_p, "0 with batch_invariant: a row's random numbers depend on its batch entry");
    Ok(())
}

/// A pointwise function of scaled scores, applied before all else that changes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScoreFunction {
    /// x becomes cap * tanh(x / cap).
    Softcap(f64),
}

impl ScoreFunction {
    /// Checks the options and returns the function that they request; None: scores stay as they are.
    pub(super) fn of(o: &Options) -> Result<Option<ScoreFunction>> {
        if o.softcap == 0.0 {
            return Ok(None);
        }
        if !SOFTCAPS.contains(&o.softcap) {
            let allowed = format!("0 (off) or a number from {:e} to {:e}", SOFTCAPS.start(), SOFTCAPS.end());
            return Err(Error::value("softcap", o.softcap, allowed));
        }
        if o.dropout_p > 0.0 {
            let given = format!("{} together with dropout_p {}", o.softcap, o.dropout_p);
            return Err(Error::value("softcap", given, "one of the two to be 0"));
        }
        Ok(Some(ScoreFunction::Softcap(o.softcap)))
    }

    /// Returns the function's parameter, a positive number that kernels read (`csrc/score_function.cuh`).
    pub fn parameter(self) -> f64 {
        match self {
            ScoreFunction::Softcap(cap) => cap,
        }
    }
}
