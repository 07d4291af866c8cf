//! The two ops: validate, choose a backend, run. Nothing is allocated before validation has passed.

pub mod cpu;
mod device;

use crate::error::Result;
use crate::launch::driver::Driver;
use crate::launch::Launcher;
use crate::problem::{self, Attention, Backend, DType, Device, Options};
use crate::tensor::{describe, readable_gradient};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// The tensors and options that both ops take.
pub struct Call {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub options: Options,
    /// the current stream of q's device
    pub stream: *mut c_void,
}

/// What `volta_fa::bwd` takes beside.
pub struct Saved {
    pub dout: Tensor,
    pub out: Tensor,
    pub softmax_lse: Tensor,
}

enum Target {
    Cpu,
    Kernels(Box<dyn Launcher>),
}

impl Target {
    fn of(q: &problem::TensorDesc, stream: *mut c_void) -> Result<Target> {
        match q.device {
            Device::Cuda(device) => Ok(Target::Kernels(Box::new(Driver { device, stream }))),
            Device::Cpu if q.dtype == DType::Half => simulated(),
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

/// fp16 CPU tensors: the simulator where the environment asks for it, else the CPU backend.
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
        Ok(value) if !value.is_empty() && value != "0" => Err(crate::error::Error::unsupported(
            "VOLTA_FA_SIMULATE is set, but this library was built without the simulator (cargo feature `sim`)",
        )),
        _ => Ok(Target::Cpu),
    }
}

/// `volta_fa::fwd`: (out, softmax_lse, rng_state).
pub fn forward(call: &Call) -> Result<(Tensor, Tensor, Tensor)> {
    let Call { q, k, v, options, stream } = call;
    let (target, a) = prepare(q, k, v, options, *stream)?;
    let (out, softmax_lse) = if a.is_empty() {
        empty_forward(q, &a)?
    } else {
        match target {
            Target::Cpu => cpu::forward(q, k, v, &a)?,
            Target::Kernels(launcher) => device::forward(q, k, v, &a, &*launcher)?,
        }
    };
    Ok((out, softmax_lse, Tensor::f_empty([0], (Kind::Int64, q.device()))?))
}

/// `volta_fa::bwd`: (dq, dk, dv, dattn_bias, dsinks); absent ones are empty.
pub fn backward(call: &Call, saved: &Saved) -> Result<[Tensor; 5]> {
    let Call { q, k, v, options, stream } = call;
    let Saved { dout, out, softmax_lse } = saved;
    let (target, a) = prepare(q, k, v, options, *stream)?;
    let dout = &readable_gradient(dout)?;
    let q_desc = describe(q)?;
    problem::validate_backward(&describe(dout)?, &describe(out)?, &describe(softmax_lse)?, &q_desc, &a, target.backend())?;
    let (dq, dk, dv) = if a.is_empty() {
        let zeros = |t: &Tensor| t.f_zeros_like().and_then(|z| z.f_contiguous());
        (zeros(q)?, zeros(k)?, zeros(v)?)
    } else {
        match target {
            Target::Cpu => cpu::backward(dout, q, k, v, out, softmax_lse, &a)?,
            Target::Kernels(launcher) => device::backward(dout, q, k, v, out, softmax_lse, &a, options.deterministic, &*launcher)?,
        }
    };
    let absent = || Tensor::f_empty([0], (q.kind(), q.device()));
    Ok([dq, dk, dv, absent()?, absent()?])
}

fn prepare(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options, stream: *mut c_void) -> Result<(Target, Attention)> {
    let q_desc = describe(q)?;
    let target = Target::of(&q_desc, stream)?;
    let a = problem::validate(&q_desc, &describe(k)?, &describe(v)?, options, target.backend())?;
    Ok((target, a))
}

/// No key to look at: every row is fully masked.
fn empty_forward(q: &Tensor, a: &Attention) -> Result<(Tensor, Tensor)> {
    let out = Tensor::f_zeros([a.batch, a.seqlen_q, a.nheads, a.headdim_v], (q.kind(), q.device()))?;
    let lse = Tensor::f_full([a.batch, a.nheads, a.seqlen_q], f64::INFINITY, (Kind::Float, q.device()))?;
    Ok((out, lse))
}
