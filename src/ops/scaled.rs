//! `fwd` and `bwd` of bf16 and fp32 tensors on kernels that multiply fp16 (device.rs): operands and out are converted, and kernels write
//! gradients as fp32. With `mode.split`, and in [`split_forward`], fp32 keeps its digits: each number is the sum of two fp16 numbers
//! ([`parts`]). Otherwise fp32 loses digits, which the user must allow (`torch.set_float32_matmul_precision`).
//!
//! fp16 has more precision than bf16 and less range. So operands are multiplied by powers of two, without rounding. The exponents come from
//! the largest magnitudes and stay on the device. One kernel casts q, k and v ([`Cast`]). The backward pass scales dout and out here,
//! because their exponents depend on those of v, on the gradient of softmax_lse, and on the gradients that sum over heads.
//!
//! Kernels write gradients as fp32, because these are sums over rows: no scale keeps their terms precise and large sums in fp16's range.
//! Words: P are probabilities, dP and dS gradients of P and scores, dlse that of softmax_lse. A group is a KV head's query heads.

use super::blocks;
// Operands: what a cast does to q and k (low_column) and to v (Values: largest exponent, is_shared: one for all heads, low_column);
// low_column: columns of high parts before the low ones, 0: no parts. restore_lse() undoes the scaling of scores in softmax_lse.
use super::cast::{Cast, Operands, Values};
use super::device;
use super::inputs::{Gradients, Inputs, Saved};
use crate::error::Result;
use crate::launch::Launcher;
use crate::log;
use crate::plan::{self, BackwardMode};
use crate::problem::{Attention, RequestedFeatures};
use crate::tensor::{self, copied};
use tch::{Kind, Tensor};

/// Exponents of the largest magnitudes after scaling, rounded up: numbers are below 2^exponent.
#[derive(Clone, Copy)]
struct Largest {
    /// Of v and dout.
    factors: i64,
    /// Of the gradient of softmax_lse.
    dlse: i64,
}

impl Largest {
    /// v and dout are below 4, so dP is below 16 * headdim and dS, which kernels keep in fp16, below twice that: 2^14 at headdim 512. And a
    /// number that is 2^-25 of the largest does not become 0. Terms of dlse are below 2^13, so that dS stays in fp16's range with them.
    const ONE_NUMBER: Largest = Largest { factors: 2, dlse: 13 };
    /// With `mode.split`. Kernels scale dS themselves (csrc/backward/store_scores.cuh), so magnitudes may be large. v and dout are below
    /// 2^13, large enough for their low parts ([`LARGEST_OF_PARTS`]). dlse gets the powers of both, so it is below 2^26.
    const TWO_PARTS: Largest = Largest { factors: LARGEST_OF_PARTS as i64, dlse: 26 };

    fn of(mode: BackwardMode) -> Largest {
        match mode.split {
            true => Largest::TWO_PARTS,
            false => Largest::ONE_NUMBER,
        }
    }
}

/// v and dout are below 2^13 where they become sums of two fp16 numbers. A low part is 2^-11 of its number or less. So it is subnormal
/// (below 2^-14), and loses digits, only for numbers far below the largest.
pub(super) const LARGEST_OF_PARTS: i32 = 13;

/// Largest exponent: these powers of two and their inverses are normal numbers in fp32 and bf16.
const MAX_EXPONENT: i64 = 126;

/// Which elements share an exponent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shared {
    /// Those of a KV head and its query heads in a batch entry; of all sequences if packed. dk and dv sum over no more than that.
    ByHead,
    /// All elements: gradients of a bias and of sinks sum over heads and entries too.
    ByAll,
}

/// Exponents of v or dout: int32, of shape (batch or 1, 1, nheads_k, 1, 1), packed (1, nheads_k, 1, 1); nheads_k is 1 if all share one.
struct Exponents(Tensor);

impl Exponents {
    /// Computes exponents with which used, finite elements are below 2^largest. Unused rows, inf and NaN change no exponent.
    fn new(t: &Tensor, unused: &Option<Tensor>, shared: Shared, largest: i64, a: &Attention) -> Result<Exponents> {
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
        Ok(Exponents(exponent.f_neg()?.f_add_scalar(largest)?.f_clamp(-MAX_EXPONENT, MAX_EXPONENT)?))
    }

    /// Multiplies `t` by these powers, rounded to `kind`.
    fn scale(&self, t: &Tensor, kind: Kind, a: &Attention) -> Result<Tensor> {
        let scaled = Tensor::f_empty(t.size(), (kind, t.device()))?;
        let _ = by_group(t, a)?.f_mul_out(&by_group(&scaled, a)?, &power(&self.0, Kind::Float)?)?;
        Ok(scaled)
    }

    /// Returns these exponents of dout, lowered where dlse needs it: dlse gets the powers of v and of dout, and must stay below 2^largest.
    fn with_lse_gradient(self, v: &Exponents, dlse: &Tensor, shared: Shared, largest: i64, a: &Attention) -> Result<Exponents> {
        /// Smaller gradients change no exponent.
        const TINY: f64 = 1e-30;
        let finite = dlse.f_abs()?.f_nan_to_num_(0.0, 0.0, 0.0)?.f_clamp_min(TINY)?;
        let most = Exponents::new(&finite, &None, shared, largest, a)?.0.f_sub(&v.0)?;
        // the lower of the two
        let lower = self.0.f_neg()?.f_maximum(&most.f_neg()?)?.f_neg()?;
        Ok(Exponents(lower.f_clamp(-MAX_EXPONENT, MAX_EXPONENT)?))
    }

    fn inverse(&self) -> Result<Exponents> {
        Ok(Exponents(self.0.f_neg()?))
    }
}

/// Views the elements as (batch, rows, nheads_k, query heads of each, headdim) or (rows, nheads_k, ...).
fn by_group(t: &Tensor, a: &Attention) -> Result<Tensor> {
    Ok(t.f_unflatten(-2, [a.nheads_k, -1].as_slice())?)
}

/// Computes 2 to the exponents from the bits of fp32, exactly on every device.
fn power(exponents: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(exponents.f_add_scalar(127)?.f_mul_scalar(1 << 23)?.f_view_dtype(Kind::Float)?.f_to_kind(kind)?)
}

/// Splits exponents in two halves. 2^sum may overflow where a product with it does not. Of two factors that are both at least 1, or both at
/// most 1, a product overflows only if the whole does.
fn halves(sum: &Tensor) -> Result<[Tensor; 2]> {
    let sum = sum.f_clamp(-2 * MAX_EXPONENT, 2 * MAX_EXPONENT)?;
    let half = sum.f_bitwise_right_shift_tensor_scalar(1)?;
    Ok([half.shallow_clone(), sum.f_sub(&half)?])
}

/// Multiplies `t` by 2 to these exponents, in place.
fn multiply(t: &mut Tensor, sum: &Tensor) -> Result<()> {
    for part in halves(sum)? {
        let _ = t.f_mul_(&power(&part, t.kind())?)?;
    }
    Ok(())
}

/// Returns a mask of packed queries that belong to no sequence, to broadcast over [`by_group`]; None: every row belongs to one.
fn unused_rows(inputs: &Inputs, a: &Attention) -> Result<Option<Tensor>> {
    let (Some(cu), Some(rows)) = (&inputs.options.cu_seqlens_q, a.total_q()) else { return Ok(None) };
    let position = Tensor::f_arange(rows, (Kind::Int, cu.device()))?;
    // a row's sequence has the number of sequences that end at or before the row
    let entries = cu.size()[0] - 1;
    let (out_int32, right) = (false, true);
    let unused = position.f_bucketize(&cu.f_narrow(0, 1, entries)?, out_int32, right)?.f_eq(entries)?;
    // after the rows: heads, heads of a group, and headdim
    Ok(Some(unused.f_unsqueeze(-1)?.f_unsqueeze(-1)?.f_unsqueeze(-1)?))
}

/// Returns fp32 numbers as sums of two fp16 numbers: `columns` columns of high parts, then the low parts, padded with zeros.
fn parts(t: &Tensor, columns: i64) -> Result<Tensor> {
    let mut sizes = t.size();
    let last = sizes.len() - 1;
    let given = std::mem::replace(&mut sizes[last], 2 * columns);
    let both = Tensor::f_zeros(&sizes, (Kind::Half, t.device()))?;
    let mut high = both.f_narrow(-1, 0, given)?;
    high.f_copy_(t)?;
    both.f_narrow(-1, columns, given)?.f_copy_(&t.f_sub(&high)?)?;
    Ok(both)
}

/// Computes (out, softmax_lse).
pub fn forward(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let largest_exponent = Largest::ONE_NUMBER.factors as i32;
    // keeps_ordinary: v that fp16 holds is not scaled, so that its bits do not depend on other tokens (batch invariance)
    let v = Values { largest_exponent, is_shared: false, keeps_ordinary: a.features.batch_invariant, low_column: 0 };
    // 0: a number becomes one fp16 number; None: there is no softmax_lse yet
    let cast = Cast::new(inputs, a, Operands { v: Some(v), low_column: 0 }, None, launcher)?;
    // in fp16 a mean of many values would lose digits that fp32 attention keeps
    let fp32_output = inputs.q.kind() == Kind::Float;
    let problem = Attention { features: RequestedFeatures { fp32_output, ..cast.problem.features }, ..cast.problem };
    let (out, softmax_lse) = device::forward(&cast.inputs, &problem, launcher)?;
    cast.restore_lse(&softmax_lse)?;
    Ok((unscaled(&out, cast.v_exponents()?, inputs.q.kind(), a)?, softmax_lse))
}

/// Computes (out, softmax_lse) of fp32 tensors in full precision: each number of q, k and v becomes the sum of two fp16 numbers. A row has
/// these high parts, then the low ones (csrc/forward/split.cuh).
pub fn split_forward(inputs: &Inputs, given: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let planned = &plan::forward_split(&given.padded(), &launcher.limits()?)?;
    log::forward("forward", &given.padded(), planned)?;
    // a row of an operand has this many columns of high parts, then as many of low parts
    let columns = i64::from(planned.variant.headdim);
    let of_v = Values { largest_exponent: LARGEST_OF_PARTS, is_shared: false, keeps_ordinary: false, low_column: columns };
    // None: there is no softmax_lse yet
    let cast = Cast::new(inputs, given, Operands { v: Some(of_v), low_column: columns }, None, launcher)?;
    let a = &cast.problem.padded();
    let converted = blocks::readable(&cast.inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(&cast.inputs);
    let out = tensor::empty(&a.query_shape(columns), Kind::Float, launcher)?;
    let softmax_lse = device::run_forward(planned, inputs, a, &out, launcher)?;
    cast.restore_lse(&softmax_lse)?;
    Ok((unscaled(&out.f_narrow(-1, 0, given.headdim_v)?, cast.v_exponents()?, Kind::Float, given)?, softmax_lse))
}

/// Returns an output in another dtype, with the powers of its values removed.
pub(super) fn unscaled(out: &Tensor, of_values: Tensor, kind: Kind, a: &Attention) -> Result<Tensor> {
    Exponents(of_values).inverse()?.scale(out, kind, a)
}

/// Casts the operands of a backward pass. Returns the exponents of v too. `softmax_lse` is scaled in place, as the scores are.
fn cast_backward<'a>(
    inputs: &Inputs,
    a: &Attention,
    shared: Shared,
    saved: &Saved,
    softmax_lse: &Tensor,
    mode: BackwardMode,
    launcher: &'a dyn Launcher,
) -> Result<(Cast<'a>, Exponents)> {
    let padded = a.padded();
    // columns from a row's high parts to its low ones; 0: no parts
    let low_column = |columns: i64| if mode.split { columns } else { 0 };
    let values = Values {
        largest_exponent: Largest::of(mode).factors as i32,
        is_shared: shared == Shared::ByAll,
        keeps_ordinary: false,
        low_column: low_column(padded.headdim_v),
    };
    let operands = Operands { v: Some(values), low_column: low_column(padded.headdim) };
    let mut cast = Cast::new(inputs, a, operands, Some(softmax_lse), launcher)?;
    // gradients have the shapes and types of the given options
    let bias = std::mem::replace(&mut cast.inputs.options, inputs.share().options).attn_bias;
    if !saved.attn_bias_requires_grad {
        cast.inputs.options.attn_bias = bias;
    }
    let v = match shared {
        Shared::ByHead => cast.v_exponents()?,
        // all are equal
        Shared::ByAll => cast.v_exponents()?.f_narrow(0, 0, 1)?.f_narrow(-3, 0, 1)?,
    };
    Ok((cast, Exponents(v)))
}

/// Computes the gradients, in the types of their tensors.
pub fn backward(inputs: &Inputs, saved: &Saved, a: &Attention, mode: BackwardMode, launcher: &dyn Launcher) -> Result<Gradients> {
    let sums_over_heads = (saved.attn_bias_requires_grad && inputs.options.attn_bias.is_some()) || inputs.options.sinks.is_some();
    let shared = if sums_over_heads { Shared::ByAll } else { Shared::ByHead };
    let softmax_lse = copied(&saved.softmax_lse, Kind::Float)?;
    let largest = Largest::of(mode);
    let (mut cast, v) = cast_backward(inputs, a, shared, saved, &softmax_lse, mode, launcher)?;
    let mut dout = Exponents::new(&saved.dout, &unused_rows(inputs, a)?, shared, largest.factors, a)?;
    // a copy of ([batch,] nheads, rows) as ([batch,] rows, nheads, 1)
    let mut dlse = saved.dlse.as_ref().map(|t| copied(&t.f_transpose(-1, -2)?.f_unsqueeze(-1)?, Kind::Float)).transpose()?;
    if let Some(dlse) = &mut dlse {
        dout = dout.with_lse_gradient(&v, dlse, shared, largest.dlse, a)?;
        multiply(&mut by_group(dlse, a)?, &v.0.f_add(&dout.0)?)?;
    }
    // delta is the row sum of out * dout, less dlse, so dlse has the powers of both v and dout
    let mut dlse = dlse.map(|t| t.f_squeeze_dim(-1)?.f_transpose(-1, -2)).transpose()?;
    // out is linear in v
    let kind = if mode.split { Kind::Float } else { Kind::Half };
    let (mut out, mut scaled_dout) = (v.scale(&saved.out, kind, a)?, dout.scale(&saved.dout, kind, a)?);
    if mode.split {
        let padded = a.padded();
        // The preprocess kernel reads fp16. So it gets an out of 0, and all of delta comes with dlse.
        let delta = out.f_mul(&scaled_dout)?.f_sum_dim_intlist([-1_i64].as_slice(), false, Kind::Float)?.f_transpose(-1, -2)?;
        dlse = Some(dlse.map_or_else(|| delta.f_neg(), |t| t.f_sub(&delta))?);
        scaled_dout = parts(&scaled_dout, padded.headdim_v)?;
        out = Tensor::f_zeros(padded.query_shape(padded.headdim_v), (Kind::Half, out.device()))?;
    }
    let mode = BackwardMode { fp32_gradients: true, has_dlse: dlse.is_some(), ..mode };
    let scaled = Saved { out, dout: scaled_dout, softmax_lse, dlse, attn_bias_requires_grad: saved.attn_bias_requires_grad };
    let ds_factors = mode.split.then(|| cast.for_gradients()).transpose()?;
    let mut g = device::backward(&cast.inputs, &scaled, ds_factors.as_ref(), &cast.problem, mode, launcher)?;
    let kind = inputs.q.kind();
    // dS is linear in dout and in v, dq in dS and k, dk in dS and q; dv in dout alone. of_dq comes from exponents of k, of_dk of q.
    let [of_dq, of_dk] = cast.gradient_exponents()?;
    for (t, own) in [(&mut g.dq, of_dq), (&mut g.dk, of_dk)] {
        let [first, second] = halves(&v.0.f_add(&dout.0)?.f_add(&own)?.f_neg()?)?;
        *t = Exponents(first).scale(t, kind, a)?;
        let _ = by_group(t, a)?.f_mul_(&power(&second, kind)?)?;
    }
    g.dv = dout.inverse()?.scale(&g.dv, kind, a)?;
    for t in g.dattn_bias.iter_mut().chain(&mut g.dsinks) {
        // one exponent for all elements, whatever the shape (Shared::ByAll)
        multiply(t, &v.0.f_add(&dout.0)?.f_neg()?.f_reshape([0_i64; 0].as_slice())?)?;
    }
    Ok(g)
}
