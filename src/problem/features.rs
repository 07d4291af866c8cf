//! Features that a problem requests beyond scale and window, and the rules of their numbers.

use super::tensor::{DType, Options};
use crate::error::{Error, Result};
use crate::limits::SOFTCAPS;

/// Features beyond scale and window. They decide which kernels are applicable.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RequestedFeatures {
    /// Pointwise function of scaled scores.
    pub score_function: Option<ScoreFunction>,
    /// Probability of dropping a probability, in [0, 1); 0: off.
    pub dropout_p: f64,
    /// `alibi_slopes` is given.
    pub alibi: bool,
    /// `attn_bias` is given, additive or boolean.
    pub attn_bias: bool,
    /// Kernels read the bias as fp32: it is fp32 or bf16.
    pub fp32_bias: bool,
    /// `sinks` is given.
    pub sinks: bool,
    /// `seqused_k` is given.
    pub seqused_k: bool,
    /// `block_lists` is given.
    pub block_mask: bool,
    /// `tree_mask` is given.
    pub tree: bool,
    /// No row may depend on other rows or sequences.
    pub batch_invariant: bool,
}

impl RequestedFeatures {
    /// Checks the numbers of a call and returns its features.
    pub(super) fn of(o: &Options) -> Result<RequestedFeatures> {
        if !(0.0..1.0).contains(&o.dropout_p) {
            return Err(Error::value("dropout_p", o.dropout_p, "a probability in [0, 1)"));
        }
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
        })
    }
}

/// Rejects what has no batch-invariant kernels.
fn check_batch_invariant(o: &Options) -> Result<()> {
    if !o.batch_invariant {
        return Ok(());
    }
    let expected = "None with batch_invariant, which has no kernels for it";
    for (name, t) in [("block_lists", &o.block_lists), ("tree_mask", &o.tree_mask)] {
        if t.is_some() {
            return Err(Error::value(name, "a tensor", expected));
        }
    }
    if o.dropout_p > 0.0 {
        return Err(Error::value("dropout_p", o.dropout_p, "0 with batch_invariant: a row's random numbers depend on its batch entry"));
    }
    Ok(())
}

/// A pointwise function of scaled scores: what comes first of all that changes them.
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

    /// Returns the number that kernels compute it from (`csrc/score_function.cuh`). It is positive.
    pub fn parameter(self) -> f64 {
        match self {
            ScoreFunction::Softcap(cap) => cap,
        }
    }
}
