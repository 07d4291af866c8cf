//! Rules of options that change scores: scale, window, and the shapes of bias, ALiBi slopes and sinks. features.rs has the rules of softcap
//! and dropout_p. dense.rs and cached.rs call them.

use super::attention::Window;
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{Backend, DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Checks scale, window, splits and whether the backend can be batch-invariant (a row's bits do not depend on the rest of the batch).
pub fn check_numbers(o: &Options, backend: Backend) -> Result<()> {
    if let Some(s) = o.softmax_scale {
        reject_if!(!s.is_finite() || (s as f32).is_infinite(), "softmax_scale", s, "a finite float32 number");
    }
    // a call on meta tensors may have symbolic numbers (torch.compile's dynamic shapes), whose values are unknown while it traces
    let is_known = |n: i64| !(n == UNKNOWN && backend == Backend::Meta);
    for (name, w) in [("window_left", o.window_left), ("window_right", o.window_right)] {
        reject_if!(w < -1 && is_known(w), name, w, "-1 (no bound) or a number of keys >= 0");
    }
    if o.is_causal && o.window_right > 0 {
        let given = format!("{} together with is_causal=True", o.window_right);
        return Err(Error::value("window_right", given, "-1 or 0, since a causal mask hides later keys"));
    }
    if o.num_splits < 0 && is_known(o.num_splits) {
        return Err(Error::value("num_splits", o.num_splits, "0 (the scheduler decides) or a number of splits from 1"));
    }
    if o.batch_invariant && backend == Backend::Cpu {
        let expected = "False on the CPU backend, whose sums depend on sizes. Use a GPU, or the simulator by VOLTA_FA_SIMULATE=1";
        return Err(Error::value("batch_invariant", "True", expected));
    }
    Ok(())
}

/// Returns the factor of q . k: `softmax_scale`, by default 1 / sqrt(headdim).
pub fn scale(o: &Options, headdim: i64) -> f64 {
    o.softmax_scale.unwrap_or_else(|| (headdim as f64).powf(-0.5))
}

/// Returns the window, `is_causal` included. A side that is unknown (a meta kernel's, so no kernel runs) has no bound.
pub fn window(o: &Options) -> Window {
    let bound = |w: i64| (w >= 0).then_some(w);
    Window { left: bound(o.window_left), right: if o.is_causal { Some(0) } else { bound(o.window_right) } }
}

/// Checks the tensors against the full shape of the scores, (batch, nheads, seqlen_q, seqlen_k).
pub fn check_tensors(o: &Options, q: &TensorDesc, full: [i64; 4]) -> Result<()> {
    let [batch, nheads, ..] = full;
    if let Some(d) = &o.alibi_slopes {
        check_alibi(d, q, batch, nheads)?;
    }
    if let Some(d) = &o.sinks {
        check_dtype_of_q_or_fp32("sinks", d, q)?;
        check_length("sinks", d, nheads, "nheads")?;
        check_device("sinks", d, q)?;
    }
    o.attn_bias.as_ref().map_or(Ok(()), |d| check_bias(d, q, full))
}

fn check_alibi(d: &TensorDesc, q: &TensorDesc, batch: i64, nheads: i64) -> Result<()> {
    check_dtype("alibi_slopes", d, DType::Float)?;
    if !same_sizes(&d.sizes, &[nheads]) && !same_sizes(&d.sizes, &[batch, nheads]) {
        let allowed = format!("shape (nheads,) or (batch, nheads), here ({0},) or ({1}, {0})", number(nheads), number(batch));
        return Err(Error::value("alibi_slopes", shape(d), allowed));
    }
    check_device("alibi_slopes", d, q)
}

fn check_bias(d: &TensorDesc, q: &TensorDesc, full: [i64; 4]) -> Result<()> {
    if d.dtype != q.dtype && d.dtype != DType::Float && d.dtype != DType::Bool {
        let allowed = format!("torch.bool, {} (q's) or torch.float32", q.dtype);
        return Err(Error::value("attn_bias", format!("dtype {}", d.dtype), allowed));
    }
    check_broadcast("attn_bias", d, q, full)
}

/// Checks that a tensor of q's device broadcasts to the full shape of the scores.
pub fn check_broadcast(name: &str, d: &TensorDesc, q: &TensorDesc, full: [i64; 4]) -> Result<()> {
    if d.sizes.len() != 4 || d.sizes.iter().zip(full).any(|(&n, full)| n != 1 && !same_size(n, full)) {
        let allowed = format!("shape (batch, nheads, seqlen_q, seqlen_k), here {}, in which any size may be 1", listed(&full));
        return Err(Error::value(name, shape(d), allowed));
    }
    check_device(name, d, q)
}
