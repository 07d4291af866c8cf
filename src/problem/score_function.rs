//! Pointwise functions of scaled scores, and the rules of their numbers.

use super::Options;
use crate::error::{Error, Result};
use crate::limits::SOFTCAPS;

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
