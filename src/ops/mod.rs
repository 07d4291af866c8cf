//! The ops: validate, choose a backend, run. Nothing is allocated before validation has passed.

mod bf16;
pub mod cpu;
mod device;
pub(crate) mod dropout;
pub(crate) mod kvcache;
pub(crate) mod merge;
mod parameters;
mod stream_k;

use crate::error::{Error, Result};
use crate::launch::driver::Driver;
use crate::launch::Launcher;
use crate::options::Options;
use crate::plan::BackwardMode;
use crate::problem::{self, Attention, Backend, DType, Device, TensorDesc};
use crate::tensor::{describe, readable_gradient};
use std::convert::Infallible;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// What fwd and bwd compute on.
pub(crate) struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// (2) int64, seed and offset; there with dropout
    pub rng_state: Option<Tensor>,
    pub options: Options<Tensor>,
}

impl Inputs {
    /// The same tensors again.
    pub fn shallow_clone(&self) -> Inputs {
        let Ok(options) = self.options.try_map(|t| Ok::<_, Infallible>(t.shallow_clone()));
        Inputs {
            q: self.q.shallow_clone(),
            k: self.k.shallow_clone(),
            v: self.v.shallow_clone(),
            rng_state: self.rng_state.as_ref().map(Tensor::shallow_clone),
            options,
        }
    }
}

/// What fwd and bwd take.
pub(crate) struct Call {
    pub inputs: Inputs,
    /// the current stream of q's device
    pub stream: *mut c_void,
}

/// What `volta_fa::bwd` takes beside.
pub(crate) struct Saved {
    pub dout: Tensor,
    pub out: Tensor,
    pub softmax_lse: Tensor,
    pub attn_bias_requires_grad: bool,
}

/// What `volta_fa::bwd` returns.
pub(crate) struct Gradients {
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
    fn of(q: &TensorDesc, stream: *mut c_void) -> Result<Target> {
        match q.device {
            Device::Cuda(device) => Ok(Target::Kernels(Box::new(Driver { device, stream }))),
            Device::Cpu if matches!(q.dtype, DType::Half | DType::BFloat16) => simulated(),
            Device::Cpu => Ok(Target::Cpu),
            // only the dispatcher's own checks come here, with tensors of several devices
            Device::Meta => Err(Error::unsupported("a meta tensor has no data to compute with")),
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
pub(crate) fn forward(call: &Call) -> Result<(Tensor, Tensor)> {
    let (target, a, _) = prepare(call)?;
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

/// The CPU backend for a problem that others have validated.
pub(crate) fn forward_on_cpu(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    if a.is_empty() {
        return empty_forward(inputs, a);
    }
    cpu::forward(inputs, a)
}

/// `volta_fa::bwd`.
pub(crate) fn backward(call: &Call, saved: &Saved) -> Result<Gradients> {
    let (target, a, q) = prepare(call)?;
    let inputs = &call.inputs;
    let saved = &Saved {
        dout: readable_gradient(&saved.dout)?,
        out: saved.out.shallow_clone(),
        softmax_lse: saved.softmax_lse.shallow_clone(),
        ..*saved
    };
    validate_backward(inputs, &q, saved, &a, target.backend())?;
    if a.is_empty() {
        return empty_backward(inputs, saved, &a);
    }
    let deterministic = inputs.options.deterministic;
    match target {
        Target::Cpu => cpu::backward(inputs, saved, &a),
        Target::Kernels(launcher) => half(
            inputs.q.kind(),
            || device::backward(inputs, saved, &a, BackwardMode { deterministic, bf16_gradients: false }, &*launcher),
            || bf16::backward(inputs, saved, &a, deterministic, &*launcher),
        ),
    }
}

/// What [`forward`] would refuse of tensors that may have no data, as far as their sizes are known.
pub(crate) fn check_forward(call: &Call) -> Result<()> {
    let inputs = &call.inputs;
    validate(inputs, &describe(&inputs.q)?, Backend::Meta).map(|_| ())
}

/// The same for [`backward`].
pub(crate) fn check_backward(call: &Call, saved: &Saved) -> Result<()> {
    let inputs = &call.inputs;
    let q = describe(&inputs.q)?;
    let a = validate(inputs, &q, Backend::Meta)?;
    validate_backward(inputs, &q, saved, &a, Backend::Meta)
}

/// `q` is the description of inputs.q, which callers need too.
fn validate(inputs: &Inputs, q: &TensorDesc, backend: Backend) -> Result<Attention> {
    let options = inputs.options.try_map(describe)?;
    problem::validate(q, &describe(&inputs.k)?, &describe(&inputs.v)?, &options, backend)
}

fn validate_backward(inputs: &Inputs, q: &TensorDesc, saved: &Saved, a: &Attention, backend: Backend) -> Result<()> {
    let rng_state = inputs.rng_state.as_ref().map(describe).transpose()?;
    problem::validate_backward(
        &describe(&saved.dout)?,
        &describe(&saved.out)?,
        &describe(&saved.softmax_lse)?,
        rng_state.as_ref(),
        q,
        a,
        backend,
    )?;
    let refuse = |given| Err(Error::value("attn_bias_requires_grad", given, "False: there is no gradient"));
    match &inputs.options.attn_bias {
        None if saved.attn_bias_requires_grad => refuse("True without an attn_bias"),
        Some(bias) if saved.attn_bias_requires_grad && bias.kind() == Kind::Bool => refuse("True for an attn_bias of dtype torch.bool"),
        _ => Ok(()),
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
/// only, by the call (`requested`) or in the environment; the kernels leave out a sequence that cannot be (csrc/seqlen_info.cuh).
/// Simulated kernels are checked unless the environment says no, and then show what a GPU does. The CPU backend relies on the check.
fn checks_lengths(target: &Target, device: Device, requested: bool) -> Result<bool> {
    const VARIABLE: &str = "VOLTA_FA_CHECK_LENGTHS";
    let value = std::env::var_os(VARIABLE).unwrap_or_default();
    let asked = match value.to_str() {
        Some("") => None,
        Some("0") => Some(false),
        Some("1") => Some(true),
        _ => return Err(Error::value(VARIABLE, format!("`{}`", value.to_string_lossy()), "0 or 1")),
    };
    Ok(requested || matches!(target, Target::Cpu) || asked.unwrap_or(device == Device::Cpu))
}

/// Who computes, the checked problem, and the description of q.
fn prepare(call: &Call) -> Result<(Target, Attention, TensorDesc)> {
    let Call { inputs, stream } = call;
    let q = describe(&inputs.q)?;
    let target = Target::of(&q, *stream)?;
    let a = validate(inputs, &q, target.backend())?;
    if a.is_ragged() && checks_lengths(&target, q.device, inputs.options.check_lengths)? {
        let o = &inputs.options;
        let values = |t: &Option<Tensor>| t.as_ref().map(|t| Vec::<i32>::try_from(t.f_to_device(tch::Device::Cpu)?)).transpose();
        let (cu_q, cu_k, used) = (values(&o.cu_seqlens_q)?, values(&o.cu_seqlens_k)?, values(&o.seqused_k)?);
        problem::validate_lengths(&a, cu_q.as_deref(), cu_k.as_deref(), used.as_deref())?;
    }
    Ok((target, a, q))
}

/// No key to look at: every row is fully masked, but for a sink.
fn empty_forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let device = inputs.q.device();
    let out = Tensor::f_zeros(a.query_shape(a.headdim_v), (inputs.q.kind(), device))?;
    let lse = Tensor::f_full(a.lse_shape(), f64::INFINITY, (Kind::Float, device))?;
    if let Some(sinks) = &inputs.options.sinks {
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
        dattn_bias: inputs
            .options
            .attn_bias
            .as_ref()
            .filter(|_| a.features.attn_bias && saved.attn_bias_requires_grad)
            .map(zeros)
            .transpose()?,
        dsinks: inputs.options.sinks.as_ref().map(zeros).transpose()?,
    })
}
