//! bf16 tensors on kernels that multiply fp16: operands are converted on the way in, out on the way out, and gradients leave
//! the kernels as bf16.
//!
//! fp16 has more precision than bf16 and less range, so tensors that results are linear in are multiplied by powers of two,
//! which loses nothing: v in the forward pass, v and dout in the backward pass. Their exponents come from the largest
//! magnitudes and stay on the device. q and k cannot be scaled apart from softmax_scale; beyond fp16's 65504 they saturate.
//!
//! Gradients are sums over rows, of which there may be so many that fp16 could hold them for no scale that leaves their terms
//! precise; bf16 holds whatever fp32 does.

use super::device;
use super::inputs::{Gradients, Inputs, Saved};
use crate::error::Result;
use crate::launch::Launcher;
use crate::plan::BackwardMode;
use crate::problem::Attention;
use tch::{Kind, Tensor};

const FP16_MAX: f64 = half::f16::MAX.to_f64_const();
/// Scaled magnitudes are below 2 to this, the largest at least half of it: dP is below 16 * headdim then, and dS, which the kernels
/// keep in fp16, below twice that; and 2^-25 of the largest is still not 0.
const LARGEST: i64 = 2;
/// Powers of two with such exponents, and their inverses, are normal numbers in fp32 and bf16.
const MOST: i64 = 126;

/// Which elements have one exponent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shared {
    /// Those of a key head and of the query heads that read it, in one batch entry; of all sequences where they are packed.
    /// dk and dv sum over no more than that, and dq of a head has the product of two such powers.
    ByHead,
    /// All: gradients of a bias and of sinks sum over heads and entries too.
    ByAll,
}

/// The exponents of v or of dout: int32, of shape (batch or 1, 1, nheads_k, 1, 1) or (1, nheads_k, 1, 1), or all ones.
struct Exponents(Tensor);

impl Exponents {
    /// Of what is used and finite: what else there is (padding, inf, NaN) must not change how the rest is rounded.
    fn new(t: &Tensor, unused: &Option<Tensor>, shared: Shared, a: &Attention) -> Result<Exponents> {
        let mut rows = by_group(t, a)?.f_abs()?.f_nan_to_num_(0.0, 0.0, 0.0)?.f_amax([-1_i64].as_slice(), true)?;
        if let Some(unused) = unused {
            let _ = rows.f_masked_fill_(unused, 0.0)?;
        }
        let dims: Vec<i64> = match shared {
            // rows and the query heads of a group
            Shared::ByHead => vec![-4, -2],
            Shared::ByAll => (0..rows.dim() as i64).collect(),
        };
        // largest = mantissa * 2^exponent, 1/2 <= mantissa < 1; 0 has exponent 0
        let (_, exponent) = rows.f_amax(dims.as_slice(), true)?.f_to_kind(Kind::Float)?.f_frexp()?;
        Ok(Exponents(exponent.f_neg()?.f_add_scalar(LARGEST)?.f_clamp(-MOST, MOST)?))
    }

    /// `t` times these powers, rounded to `kind`.
    fn scale(&self, t: &Tensor, kind: Kind, a: &Attention) -> Result<Tensor> {
        let scaled = Tensor::f_empty(t.size(), (kind, t.device()))?;
        let _ = by_group(t, a)?.f_mul_out(&by_group(&scaled, a)?, &power(&self.0, Kind::Float)?)?;
        Ok(scaled)
    }

    fn inverse(&self) -> Result<Exponents> {
        Ok(Exponents(self.0.f_neg()?))
    }
}

/// The same elements as (batch, rows, nheads_k, query heads of each, headdim) or (rows, nheads_k, ...).
fn by_group(t: &Tensor, a: &Attention) -> Result<Tensor> {
    Ok(t.f_unflatten(-2, [a.nheads_k, -1].as_slice())?)
}

/// Two to the exponents, from the bits of fp32: exact on every device.
fn power(exponents: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(exponents.f_add_scalar(127)?.f_mul_scalar(1 << 23)?.f_view_dtype(Kind::Float)?.f_to_kind(kind)?)
}

/// Takes both powers out of a gradient, in place. Their product may be out of range where the result is not; two factors that
/// are both at least 1 or both at most 1 leave the range only where the result does.
fn unscale(t: &mut Tensor, v: &Exponents, dout: &Exponents) -> Result<()> {
    let sum = v.0.f_add(&dout.0)?.f_neg()?;
    let half = sum.f_bitwise_right_shift_tensor_scalar(1)?;
    for part in [&half, &sum.f_sub(&half)?] {
        let _ = t.f_mul_(&power(part, t.kind())?)?;
    }
    Ok(())
}

/// Rows of q or k that belong to no entry, to be filled in a tensor of [`by_group`]; None where there is none.
fn unused_rows(cu_seqlens: &Option<Tensor>, used: Option<&Tensor>, rows: i64) -> Result<Option<Tensor>> {
    let position = |like: &Tensor| Tensor::f_arange(rows, (Kind::Int, like.device()));
    let unused = match (cu_seqlens, used) {
        (None, None) => return Ok(None),
        (None, Some(used)) => position(used)?.f_ge_tensor(&used.f_unsqueeze(1)?)?,
        (Some(cu), used) => {
            let (position, entries) = (position(cu)?, cu.size()[0] - 1);
            let ends = cu.f_narrow(0, 1, entries)?;
            // the number of sequences that end before a row is that of the row's own
            let entry = position.f_bucketize(&ends, false, true)?;
            let of_none = entry.f_eq(entries)?;
            match used {
                None => of_none,
                Some(used) => {
                    let used_ends = cu.f_narrow(0, 0, entries)?.f_add(used)?.f_index_select(0, &entry.f_clamp_max(entries - 1)?)?;
                    position.f_ge_tensor(&used_ends)?.f_logical_or(&of_none)?
                }
            }
        }
    };
    // behind the rows: heads, heads of a group, and headdim
    Ok(Some(unused.f_unsqueeze(-1)?.f_unsqueeze(-1)?.f_unsqueeze(-1)?))
}

fn of_v(inputs: &Inputs, shared: Shared, a: &Attention) -> Result<Exponents> {
    let rows = a.total_k().unwrap_or(a.seqlen_k);
    Exponents::new(&inputs.v, &unused_rows(&inputs.options.cu_seqlens_k, inputs.options.seqused_k.as_ref(), rows)?, shared, a)
}

fn of_dout(inputs: &Inputs, saved: &Saved, shared: Shared, a: &Attention) -> Result<Exponents> {
    let rows = a.total_q().unwrap_or(a.seqlen_q);
    Exponents::new(&saved.dout, &unused_rows(&inputs.options.cu_seqlens_q, None, rows)?, shared, a)
}

pub(super) fn saturated(t: &Tensor) -> Result<Tensor> {
    // in this order: bf16 has no 65504, but a 65536
    Ok(t.f_to_kind(Kind::Half)?.f_clamp(-FP16_MAX, FP16_MAX)?)
}

/// fp16 of a bf16 bias would lose range, so it travels as fp32; sinks too.
fn converted(inputs: &Inputs, v: Tensor) -> Result<Inputs> {
    Ok(Inputs { q: saturated(&inputs.q)?, k: saturated(&inputs.k)?, v, ..inputs.share() })
}

/// (out, softmax_lse).
pub fn forward(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let v = of_v(inputs, Shared::ByHead, a)?;
    let (out, softmax_lse) = device::forward(&converted(inputs, v.scale(&inputs.v, Kind::Half, a)?)?, a, launcher)?;
    Ok((v.inverse()?.scale(&out, Kind::BFloat16, a)?, softmax_lse))
}

pub fn backward(inputs: &Inputs, saved: &Saved, a: &Attention, deterministic: bool, launcher: &dyn Launcher) -> Result<Gradients> {
    let sums_over_heads = (saved.attn_bias_requires_grad && inputs.options.attn_bias.is_some()) || inputs.options.sinks.is_some();
    let shared = if sums_over_heads { Shared::ByAll } else { Shared::ByHead };
    let (v, dout) = (of_v(inputs, shared, a)?, of_dout(inputs, saved, shared, a)?);
    let scaled = Saved {
        // out is linear in v
        out: v.scale(&saved.out, Kind::Half, a)?,
        dout: dout.scale(&saved.dout, Kind::Half, a)?,
        softmax_lse: saved.softmax_lse.shallow_clone(),
        attn_bias_requires_grad: saved.attn_bias_requires_grad,
    };
    let mode = BackwardMode { deterministic, bf16_gradients: true };
    let mut g = device::backward(&converted(inputs, v.scale(&inputs.v, Kind::Half, a)?)?, &scaled, a, mode, launcher)?;
    // dq and dk are linear in dout and in v, as dS is; dv in dout alone
    unscale(&mut by_group(&g.dq, a)?, &v, &dout)?;
    unscale(&mut by_group(&g.dk, a)?, &v, &dout)?;
    let _ = by_group(&g.dv, a)?.f_mul_(&power(&dout.inverse()?.0, Kind::BFloat16)?)?;
    for t in g.dattn_bias.iter_mut().chain(&mut g.dsinks) {
        // with one exponent for all, whatever the shape is
        let single = |e: &Exponents| Ok::<_, crate::error::Error>(Exponents(e.0.f_reshape([0_i64; 0].as_slice())?));
        unscale(t, &single(&v)?, &single(&dout)?)?;
    }
    Ok(g)
}
