//! The operators validate, choose a backend, run. They allocate no result before validation. This file has `fwd` and `bwd`, whose
//! rows in src/operators.rs call it; submodules have the other operators, and what computes them all.
//!
//! Backends: `cpu` uses ATen operations. `device` launches kernels, on a GPU or in the simulator, with fp16 operands. For other types
//! `scaled` casts to fp16 around `device`, with powers of two; fp32 in full precision becomes sums of two fp16 numbers.
//!
//! `t.f_NAME(...)` is ATen's `t.NAME(...)` with its arguments in ATen's order; it returns an error where `t.NAME` would panic (crate tch).

mod block_mask;
mod blocks;
mod cast;
mod codes;
pub mod cpu;
mod device;
pub(crate) mod dropout;
pub(crate) mod fast;
pub(crate) mod indexer;
mod inputs;
pub(crate) mod kvcache;
mod launches;
mod lse_gradient;
pub(crate) mod merge;
mod scaled;
pub(crate) mod sparse;
mod stream_k;

pub(crate) use inputs::{all_are_batch_invariant, cpu_max_headdim, Gradients, Inputs, Saved};

use crate::error::{Error, Result};
use crate::plan::{self, BackwardMode, DeviceLimits};
use crate::problem::{self, Attention, Backend, DType};
use crate::tensor::{describe, readable_gradient};
use inputs::{check_bias_gradient, reduces_fp32, Described, Target}; // Target: ATen on the CPU, or kernels
use tch::{Kind, Tensor};

/// Computes `volta_fa::fwd`: out (batch, seqlen_q, nheads, headdim_v), and softmax_lse, fp32 (batch, nheads, seqlen_q), natural logarithms.
pub(crate) fn forward(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let (target, a, _) = prepare(inputs)?;
    forward_on(&target, inputs, &a)
}

/// Computes a validated problem. fp32 tensors keep their precision unless the user's settings allow less.
fn forward_on(target: &Target, inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    match target {
        _ if a.is_empty() => empty_forward(inputs, a),
        Target::Cpu => cpu::forward(inputs, a),
        Target::Kernels(launcher) => match inputs.q.kind() {
            Kind::Half => device::forward(inputs, a, &**launcher),
            Kind::Float if !reduces_fp32() && a.features.batch_invariant => {
                let expected = "torch.float16 or torch.bfloat16; torch.set_float32_matmul_precision(\"high\") allows torch.float32";
                Err(Error::value("q", "dtype torch.float32 with batch_invariant", expected))
            }
            Kind::Float if !reduces_fp32() => scaled::split_forward(inputs, a, &**launcher),
            _ => scaled::forward(inputs, a, &**launcher),
        },
    }
}

/// Fails if no kernels compute a validated problem of fp16 or bf16 tensors. For callers that write something before [`forward`].
fn check_forward_plan(a: &Attention, limits: &DeviceLimits) -> Result<()> {
    if a.is_empty() {
        return Ok(());
    }
    if a.dtype == DType::BFloat16 {
        cast::plan(a, true, limits)?; // true: with v
    }
    plan::forward(&a.padded(), limits).map(|_| ())
}

/// Computes `volta_fa::bwd`.
pub(crate) fn backward(inputs: &Inputs, saved: &Saved) -> Result<Gradients> {
    let (target, mut a, described) = prepare(inputs)?;
    // `batch_invariant` says nothing about gradients, which sum over rows
    a.features.batch_invariant = false;
    let saved = &Saved { dout: readable_gradient(&saved.dout)?, ..saved.share() };
    validate_backward(inputs, saved, &described, &a, target.dense_backend())?;
    let dlse = saved.dlse.as_ref().map(|dlse| lse_gradient::of_visible_rows(dlse, &saved.softmax_lse)).transpose()?;
    let saved = &Saved { dlse, ..saved.share() };
    if a.is_empty() {
        return empty_backward(inputs, saved, &a);
    }
    let mode = BackwardMode {
        deterministic: inputs.options.deterministic,
        fp32_gradients: false,
        has_dlse: saved.dlse.is_some(),
        split: inputs.q.kind() == Kind::Float && !reduces_fp32(),
    };
    match target {
        Target::Cpu => cpu::backward(inputs, saved, &a),
        Target::Kernels(launcher) if inputs.q.kind() != Kind::Half => scaled::backward(inputs, saved, &a, mode, &*launcher),
        // None: dS is multiplied by q and k as they are
        Target::Kernels(launcher) => device::backward(inputs, saved, None, &a, mode, &*launcher),
    }
}

/// Rejects what [`forward`] would reject, as far as sizes of meta tensors are known.
pub(crate) fn check_forward(inputs: &Inputs) -> Result<()> {
    validate(&inputs.describe()?, Backend::Meta).map(|_| ())
}

/// Rejects what [`backward`] would reject, as far as sizes of meta tensors are known.
pub(crate) fn check_backward(inputs: &Inputs, saved: &Saved) -> Result<()> {
    let described = inputs.describe()?;
    let a = validate(&described, Backend::Meta)?;
    validate_backward(inputs, saved, &described, &a, Backend::Meta)
}

fn validate(d: &Described, backend: Backend) -> Result<Attention> {
    problem::validate(&d.q, &d.k, &d.v, &d.options, backend)
}

fn validate_backward(inputs: &Inputs, saved: &Saved, d: &Described, a: &Attention, backend: Backend) -> Result<()> {
    let (dout, out, softmax_lse) = (describe(&saved.dout)?, describe(&saved.out)?, describe(&saved.softmax_lse)?);
    problem::validate_backward(&dout, &out, &softmax_lse, d.rng_state.as_ref(), &d.q, a, backend)?;
    if let Some(dlse) = &saved.dlse {
        problem::validate_dlse(&describe(dlse)?, &d.q, a)?;
    }
    problem::check_lists_of_backward(&d.options)?;
    check_bias_gradient(inputs, saved)
}

/// Returns the backend of `fwd` or `bwd`, the validated problem and the descriptions of the tensors. Checks values of lengths and lists if
/// the call or the environment asks for it, which synchronizes a GPU.
fn prepare(inputs: &Inputs) -> Result<(Target, Attention, Described)> {
    let described = inputs.describe()?;
    let target = Target::of_dense(&described.q, inputs.stream)?;
    let a = validate(&described, target.dense_backend())?;
    target.check_seqlens(inputs, &a)?;
    if a.features.block_mask && target.checks_lengths(inputs.options.check_lengths)? {
        block_mask::check_values(inputs, &a)?;
    }
    Ok((target, a, described))
}

/// Returns the results without keys (or rows): out is 0, and softmax_lse +inf, or the sink, an extra logit of the head's rows.
fn empty_forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let device = inputs.q.device();
    let out = Tensor::f_zeros(a.query_shape(a.headdim_v), (inputs.q.kind(), device))?;
    let lse = Tensor::f_full(a.lse_shape(), f64::INFINITY, (Kind::Float, device))?;
    if let Some(sinks) = &inputs.options.sinks {
        // a sink of -inf has no weight
        lse.f_transpose(-1, -2)?.f_copy_(&sinks.f_masked_fill(&sinks.f_eq(f64::NEG_INFINITY)?, f64::INFINITY)?)?;
    }
    Ok((out, lse))
}

/// Returns the gradients of a problem without keys (or rows).
fn empty_backward(inputs: &Inputs, saved: &Saved, a: &Attention) -> Result<Gradients> {
    let zeros = |t: &Tensor| Tensor::f_zeros(t.size(), (t.kind(), t.device()));
    let bias = inputs.options.attn_bias.as_ref();
    Ok(Gradients {
        dq: zeros(&inputs.q)?,
        dk: zeros(&inputs.k)?,
        dv: zeros(&inputs.v)?,
        dattn_bias: bias.filter(|_| a.features.attn_bias && saved.attn_bias_requires_grad).map(zeros).transpose()?,
        dsinks: inputs.options.sinks.as_ref().map(|sinks| cpu::dsinks_without_keys(sinks, saved)).transpose()?,
    })
}
