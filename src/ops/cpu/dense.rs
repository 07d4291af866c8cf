//! Computes attention of batch entries with equal lengths, a [`Part`] of a call, on the CPU: with ATen's flash operator if it covers the
//! problem ([`flash`]), else with matrix products ([`chunked`]). Adds what neither has: sinks, and the gradient of softmax_lse.

use super::part::{Part, Rows, Sums}; // Rows: dout, out, softmax_lse and dlse; Sums: dsinks and dattn_bias, to which all parts add
use super::{chunked, flash};
use crate::error::Result;
use crate::tensor::{compute_kind, in_kind};
use tch::{Kind, Tensor};

/// Computes out (batch, seqlen_q, nheads, headdim_v) and softmax_lse (batch, nheads, seqlen_q).
pub fn forward(part: &Part) -> Result<(Tensor, Tensor)> {
    let (out, lse) = attend(part)?;
    Ok((in_kind(&out, part.q.kind())?.f_contiguous()?, in_kind(&lse, Kind::Float)?.f_contiguous()?))
}

/// Computes [`forward`] in the type of the arithmetic: fp64 for fp64 tensors, else fp32.
fn attend(part: &Part) -> Result<(Tensor, Tensor)> {
    let by_flash = if flash::covers(part) { flash::forward(part)? } else { None };
    let (out, lse) = by_flash.map_or_else(|| chunked::forward(part), Ok)?;
    match &part.sinks {
        Some(sinks) => add_sinks(out, &lse, sinks),
        None => Ok((out, lse)),
    }
}

/// Returns the sinks as (nheads, 1), to broadcast with a log-sum-exp.
fn per_row(sinks: &Tensor, lse: &Tensor) -> Result<Tensor> {
    Ok(sinks.f_to_kind(lse.kind())?.f_unsqueeze(1)?)
}

/// Adds a sink, one more logit without a value, to the softmax of each row of its head. `lse`: +inf in rows without keys.
fn add_sinks(mut out: Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
    let of_keys = lse.f_masked_fill(&lse.f_eq(f64::INFINITY)?, f64::NEG_INFINITY)?;
    let total = of_keys.f_logaddexp(&per_row(sinks, lse)?)?;
    // rows without a key or a sink
    let none = total.f_eq(f64::NEG_INFINITY)?;
    let share = of_keys.f_sub(&total)?.f_exp_()?.f_masked_fill(&none, 0.0)?;
    let _ = out.f_mul_(&share.f_transpose(1, 2)?.f_unsqueeze(3)?)?;
    Ok((out, total.f_masked_fill(&none, f64::INFINITY)?))
}

/// Returns the log-sum-exp for gradients, in the type of the arithmetic.
///
/// softmax_lse is fp32 for every input type, and its rounding alone adds a relative error of 1e-7 or more to each probability. So fp64
/// computes its own again. It takes a given value only if that differs by more than rounding: ring attention passes sums over more keys.
fn gradient_lse(part: &Part, softmax_lse: &Tensor) -> Result<Tensor> {
    let given = in_kind(softmax_lse, compute_kind(part.q.kind()))?;
    if given.kind() != Kind::Double {
        return Ok(given);
    }
    let (_, own) = attend(part)?;
    // equal but for the rounding to fp32 is the forward pass's own, which is more precise here
    let (rtol, atol, equal_nan) = (f64::from(f32::EPSILON), 1e-7, false);
    Ok(own.f_where_self(&own.f_isclose(&given, rtol, atol, equal_nan)?, &given)?)
}

/// Returns the part of the sinks' gradient that these rows have, (nheads), in the type of `lse`, softmax_lse in that of the arithmetic.
/// A sink is like the score of a key whose value is 0, so dP = 0: dS = P * (0 - delta). The rows need no keys, and may be on any device.
pub fn dsinks(sinks: &Tensor, rows: &Rows, lse: &Tensor) -> Result<Tensor> {
    let kind = lse.kind();
    let ds = per_row(sinks, lse)?.f_sub(lse)?.f_exp_()?.f_mul_(&delta(rows, kind)?)?.f_neg_()?;
    Ok(ds.f_sum_dim_intlist([0_i64, 2].as_slice(), false, kind)?)
}

/// Returns what a score's gradient subtracts from that of its probability, (batch, nheads, seqlen_q): row sums of out * dout, minus dlse.
fn delta(rows: &Rows, kind: Kind) -> Result<Tensor> {
    let products = rows.out.f_to_kind(kind)?.f_mul(&rows.dout.f_to_kind(kind)?)?;
    let delta = products.f_sum_dim_intlist([-1_i64].as_slice(), false, kind)?.f_transpose(1, 2)?;
    match &rows.dlse {
        Some(dlse) => Ok(delta.f_sub(&dlse.f_to_kind(kind)?)?),
        None => Ok(delta),
    }
}

/// Computes dq, dk and dv, contiguous, with the shapes and types of q, k and v. Adds the other gradients to `sums`.
pub fn backward(part: &Part, rows: &Rows, sums: &Sums) -> Result<[Tensor; 3]> {
    let lse = gradient_lse(part, &rows.softmax_lse)?;
    if let (Some(sum), Some(sinks)) = (&sums.dsinks, &part.sinks) {
        let _ = sum.shallow_clone().f_add_(&dsinks(sinks, rows, &lse)?)?;
    }
    let covered = flash::covers(part) && sums.dattn_bias.is_none() && rows.dlse.is_none();
    let by_flash = if covered { flash::backward(part, &rows.dout, &rows.out, &lse)? } else { None };
    let [dq, dk, dv] = by_flash.map_or_else(|| chunked::backward(part, &rows.dout, &delta(rows, lse.kind())?, &lse, sums), Ok)?;
    let rounded = |t: Tensor, like: &Tensor| -> Result<Tensor> { Ok(in_kind(&t, like.kind())?.f_contiguous()?) };
    Ok([rounded(dq, &part.q)?, rounded(dk, &part.k)?, rounded(dv, &part.v)?])
}
