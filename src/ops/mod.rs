//! The two ops: validate, choose a backend, run. Nothing is allocated before validation has passed.

mod bf16;
pub mod cpu;
mod device;
pub mod dropout;
mod features;

use crate::error::{Error, Result};
use crate::launch::driver::Driver;
use crate::launch::Launcher;
use crate::plan::BackwardMode;
use crate::problem::{self, Attention, Backend, DType, Device, Options};
use crate::tensor::{describe, readable_gradient};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// The tensors that both ops compute on.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub cu_seqlens_q: Option<Tensor>,
    pub cu_seqlens_k: Option<Tensor>,
    pub seqused_k: Option<Tensor>,
    pub attn_bias: Option<Tensor>,
    pub alibi_slopes: Option<Tensor>,
    pub sinks: Option<Tensor>,
    /// (2) int64, seed and offset; there with dropout
    pub rng_state: Option<Tensor>,
}

/// What both ops take.
pub struct Call {
    pub inputs: Inputs,
    pub options: Options,
    /// the current stream of q's device
    pub stream: *mut c_void,
}

/// What `volta_fa::bwd` takes beside.
pub struct Saved {
    pub dout: Tensor,
    pub out: Tensor,
    pub softmax_lse: Tensor,
    pub attn_bias_requires_grad: bool,
}

/// What `volta_fa::bwd` returns.
pub struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    /// where the bias is there and its gradient was asked for
    pub dattn_bias: Option<Tensor>,
    /// where the sinks are there
    pub dsinks: Option<Tensor>,
}

enum Target {
    Cpu,
    Kernels(Box<dyn Launcher>),
}

impl Target {
    fn of(q: &problem::TensorDesc, stream: *mut c_void) -> Result<Target> {
        match q.device {
            Device::Cuda(device) => Ok(Target::Kernels(Box::new(Driver { device, stream }))),
            Device::Cpu if matches!(q.dtype, DType::Half | DType::BFloat16) => simulated(),
            Device::Cpu => Ok(Target::Cpu),
        }
    }

    fn backend(&self) -> Backend {
        match self {
            Target::Cpu => Backend::Cpu,
            Target::Kernels(_) => Backend::Kernels,
        }
    }
}

/// fp16 and bf16 CPU tensors: the simulator where the environment asks for it, else the CPU backend.
#[cfg(feature = "sim")]
fn simulated() -> Result<Target> {
    Ok(match crate::launch::simulator::Simulator::from_env()? {
        Some(simulator) => Target::Kernels(Box::new(simulator)),
        None => Target::Cpu,
    })
}

#[cfg(not(feature = "sim"))]
fn simulated() -> Result<Target> {
    match std::env::var("VOLTA_FA_SIMULATE") {
        Ok(value) if !value.is_empty() && value != "0" => {
            Err(Error::unsupported("VOLTA_FA_SIMULATE is set, but this library was built without the simulator (cargo feature `sim`)"))
        }
        _ => Ok(Target::Cpu),
    }
}

/// `volta_fa::fwd`: (out, softmax_lse).
pub fn forward(call: &Call) -> Result<(Tensor, Tensor)> {
    let (target, a) = prepare(call)?;
    let inputs = &call.inputs;
    if a.is_empty() {
        return empty_forward(inputs, &a);
    }
    match target {
        Target::Cpu => cpu::forward(inputs, &a),
        Target::Kernels(launcher) => {
            half(inputs.q.kind(), || device::forward(inputs, &a, &*launcher), || bf16::forward(inputs, &a, &*launcher))
        }
    }
}

/// `volta_fa::bwd`.
pub fn backward(call: &Call, saved: &Saved) -> Result<Gradients> {
    let (target, a) = prepare(call)?;
    let inputs = &call.inputs;
    let saved = &Saved {
        dout: readable_gradient(&saved.dout)?,
        out: saved.out.shallow_clone(),
        softmax_lse: saved.softmax_lse.shallow_clone(),
        ..*saved
    };
    let rng_state = inputs.rng_state.as_ref().map(describe).transpose()?;
    problem::validate_backward(
        &describe(&saved.dout)?,
        &describe(&saved.out)?,
        &describe(&saved.softmax_lse)?,
        rng_state.as_ref(),
        &describe(&inputs.q)?,
        &a,
        target.backend(),
    )?;
    if saved.attn_bias_requires_grad {
        let given = match &inputs.attn_bias {
            None => Some("True without an attn_bias"),
            Some(bias) if bias.kind() == Kind::Bool => Some("True for an attn_bias of dtype torch.bool"),
            Some(_) => None,
        };
        if let Some(given) = given {
            return Err(Error::value("attn_bias_requires_grad", given, "False: there is no gradient"));
        }
    }
    if a.is_empty() {
        return empty_backward(inputs, saved, &a);
    }
    let deterministic = call.options.deterministic;
    match target {
        Target::Cpu => cpu::backward(inputs, saved, &a),
        Target::Kernels(launcher) => half(
            inputs.q.kind(),
            || device::backward(inputs, saved, &a, BackwardMode { deterministic, bf16_gradients: false }, &*launcher),
            || bf16::backward(inputs, saved, &a, deterministic, &*launcher),
        ),
    }
}

/// The kernels compute with fp16 only; bf16 is converted around them.
fn half<T>(kind: Kind, fp16: impl FnOnce() -> Result<T>, bf16: impl FnOnce() -> Result<T>) -> Result<T> {
    if kind == Kind::BFloat16 {
        bf16()
    } else {
        fp16()
    }
}

/// Whether to look at the values in cu_seqlens and seqused_k. On a GPU that means waiting for it, so there it is done on request
/// only; the kernels leave out a sequence that cannot be (csrc/sequence.cuh). Simulated kernels are
/// checked unless the environment says no, and then show what a GPU does. The CPU backend relies on the check.
fn checks_lengths(target: &Target, device: Device) -> Result<bool> {
    const VARIABLE: &str = "VOLTA_FA_CHECK_LENGTHS";
    let value = std::env::var_os(VARIABLE).unwrap_or_default();
    let asked = match value.to_str() {
        Some("") => None,
        Some("0") => Some(false),
        Some("1") => Some(true),
        _ => return Err(Error::value(VARIABLE, format!("`{}`", value.to_string_lossy()), "0 or 1")),
    };
    Ok(matches!(target, Target::Cpu) || asked.unwrap_or(device == Device::Cpu))
}

fn prepare(call: &Call) -> Result<(Target, Attention)> {
    let Call { inputs, options, stream } = call;
    let q_desc = describe(&inputs.q)?;
    let target = Target::of(&q_desc, *stream)?;
    let a = problem::validate(&q_desc, &describe(&inputs.k)?, &describe(&inputs.v)?, options, target.backend())?;
    if a.is_ragged() && checks_lengths(&target, q_desc.device)? {
        let values = |t: &Option<Tensor>| t.as_ref().map(|t| Vec::<i32>::try_from(t.f_to_device(tch::Device::Cpu)?)).transpose();
        let (cu_q, cu_k, used) = (values(&inputs.cu_seqlens_q)?, values(&inputs.cu_seqlens_k)?, values(&inputs.seqused_k)?);
        problem::validate_lengths(&a, cu_q.as_deref(), cu_k.as_deref(), used.as_deref())?;
    }
    Ok((target, a))
}

/// No key to look at: every row is fully masked, but for a sink.
fn empty_forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let device = inputs.q.device();
    let out = Tensor::f_zeros(a.query_shape(a.headdim_v), (inputs.q.kind(), device))?;
    let lse = Tensor::f_full(a.lse_shape(), f64::INFINITY, (Kind::Float, device))?;
    if let Some(sinks) = &inputs.sinks {
        // a sink of -inf is none
        lse.f_transpose(-1, -2)?.f_copy_(&sinks.f_masked_fill(&sinks.f_eq(f64::NEG_INFINITY)?, f64::INFINITY)?)?;
    }
    Ok((out, lse))
}

fn empty_backward(inputs: &Inputs, saved: &Saved, a: &Attention) -> Result<Gradients> {
    let zeros = |t: &Tensor| Tensor::f_zeros(t.size(), (t.kind(), t.device()));
    Ok(Gradients {
        dq: zeros(&inputs.q)?,
        dk: zeros(&inputs.k)?,
        dv: zeros(&inputs.v)?,
        dattn_bias: inputs.attn_bias.as_ref().filter(|_| a.features.attn_bias && saved.attn_bias_requires_grad).map(zeros).transpose()?,
        dsinks: inputs.sinks.as_ref().map(zeros).transpose()?,
    })
}
