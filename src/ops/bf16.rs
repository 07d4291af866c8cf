//! bf16 tensors on kernels that multiply fp16: converted on the way in, and out on the way out; gradients leave them as bf16.
//!
//! fp16 has more precision than bf16 and less range, so values are scaled by powers of two where the result is linear in
//! them, which loses nothing: v on the way in and out of the forward pass, dout and v in the backward pass. The factors
//! come from the largest magnitudes and stay on the device. q and k cannot be scaled apart from softmax_scale; beyond
//! fp16's 65504 they saturate.

use super::{device, Gradients, Inputs, Saved};
use crate::error::Result;
use crate::launch::Launcher;
use crate::plan::BackwardMode;
use crate::problem::Attention;
use tch::{Kind, Tensor};

const FP16_MAX: f64 = 65504.0;
/// What the largest magnitude of a scaled tensor becomes, at most. dv, where one key has all the attention of 16,000 rows
/// whose gradients agree, is still in fp16's range then; and 2^-26 of the largest is still not 0.
const LARGEST: f64 = 4.0;

/// A tensor in fp16, and the power of two that it was multiplied by, 0-d fp32.
struct Scaled {
    half: Tensor,
    factor: Tensor,
}

impl Scaled {
    fn new(t: &Tensor) -> Result<Scaled> {
        let largest = if t.numel() == 0 {
            Tensor::f_ones([0_i64; 0], (Kind::Float, t.device()))?
        } else {
            t.f_abs()?.f_max()?.f_to_kind(Kind::Float)?
        };
        // all zero, infinite or NaN: as they are
        let exponent = (largest.f_reciprocal()?.f_mul_scalar(LARGEST)?).f_log2()?.f_floor()?.f_clamp(-126.0, 126.0)?;
        let factor = exponent.f_nan_to_num(0.0, 0.0, 0.0)?.f_exp2()?;
        Ok(Scaled { half: t.f_to_kind(Kind::Float)?.f_mul(&factor)?.f_to_kind(Kind::Half)?, factor })
    }
}

fn saturated(t: &Tensor) -> Result<Tensor> {
    Ok(t.f_clamp(-FP16_MAX, FP16_MAX)?.f_to_kind(Kind::Half)?)
}

/// fp16 of a bf16 bias would lose range, so it travels as fp32; sinks too.
fn converted(inputs: &Inputs, v: Tensor) -> Result<Inputs> {
    let shared = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
    Ok(Inputs {
        q: saturated(&inputs.q)?,
        k: saturated(&inputs.k)?,
        v,
        cu_seqlens_q: shared(&inputs.cu_seqlens_q),
        cu_seqlens_k: shared(&inputs.cu_seqlens_k),
        seqused_k: shared(&inputs.seqused_k),
        attn_bias: shared(&inputs.attn_bias),
        alibi_slopes: shared(&inputs.alibi_slopes),
        sinks: shared(&inputs.sinks),
        rng_state: shared(&inputs.rng_state),
    })
}

fn unscaled(t: &Tensor, factors: &[&Tensor]) -> Result<Tensor> {
    let mut t = t.f_to_kind(Kind::Float)?;
    for factor in factors {
        let _ = t.f_div_(factor)?;
    }
    Ok(t.f_to_kind(Kind::BFloat16)?)
}

/// (out, softmax_lse).
pub fn forward(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let v = Scaled::new(&inputs.v)?;
    let (out, softmax_lse) = device::forward(&converted(inputs, v.half)?, a, launcher)?;
    Ok((unscaled(&out, &[&v.factor])?, softmax_lse))
}

pub fn backward(inputs: &Inputs, saved: &Saved, a: &Attention, deterministic: bool, launcher: &dyn Launcher) -> Result<Gradients> {
    let (v, dout) = (Scaled::new(&inputs.v)?, Scaled::new(&saved.dout)?);
    let saved = Saved {
        // out is linear in v
        out: saved.out.f_to_kind(Kind::Float)?.f_mul(&v.factor)?.f_to_kind(Kind::Half)?,
        dout: dout.half,
        softmax_lse: saved.softmax_lse.shallow_clone(),
        attn_bias_requires_grad: saved.attn_bias_requires_grad,
    };
    let g = device::backward(&converted(inputs, v.half)?, &saved, a, BackwardMode { deterministic, bf16_gradients: true }, launcher)?;
    // dq and dk are linear in dout and in v, as dS is; dv in dout alone
    let both = [&dout.factor, &v.factor];
    let of_scores = |t: Option<Tensor>, like: &Option<Tensor>| match (t, like) {
        (Some(t), Some(like)) => {
            Ok::<_, crate::error::Error>(Some(t.f_to_kind(Kind::Float)?.f_div(both[0])?.f_div(both[1])?.f_to_kind(like.kind())?))
        }
        _ => Ok(None),
    };
    Ok(Gradients {
        dq: unscaled(&g.dq, &both)?,
        dk: unscaled(&g.dk, &both)?,
        dv: unscaled(&g.dv, &both[..1])?,
        dattn_bias: of_scores(g.dattn_bias, &inputs.attn_bias)?,
        dsinks: of_scores(g.dsinks, &inputs.sinks)?,
    })
}
