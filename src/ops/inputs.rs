//! Inputs and results of attention operators, and the choice of a backend ([`Target`]): ATen, or kernels on a GPU or in the simulator.
//! src/operators.rs makes [`Inputs`] and [`Saved`] from a call's arguments; all of src/ops/ reads them.

use crate::error::{Error, Result};
use crate::launch::driver::Driver;
use crate::launch::{flag, Launcher}; // flag: an environment variable that is 0 or 1; None: not set
use crate::limits::MAX_HEADDIM;
use crate::options::Options;
use crate::problem::{self, Attention, Backend, DType, Device, TensorDesc}; // Backend: what validation knows of a Target
use crate::shim::volta_fa_reduces_fp32;
use crate::tensor::{describe, share};
use std::convert::Infallible;
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// Tensors and options of an attention operator.
pub(crate) struct Inputs {
    /// (batch, seqlen_q, nheads, headdim), packed (total_q, nheads, headdim).
    pub q: Tensor,
    /// Keys: (batch, seqlen_k, nheads_k, headdim), packed (total_k, nheads_k, headdim); or the cache that holds them,
    /// (entries or pages, rows, nheads_k, headdim).
    pub k: Tensor,
    /// Values, or their cache: the shape of k with headdim_v for headdim. In a cache of latents, the first columns of k.
    pub v: Tensor,
    /// New k and v, which a call appends to the caches before it attends.
    pub appended: Option<[Tensor; 2]>,
    /// (2) int64, seed and offset; given with dropout.
    pub rng_state: Option<Tensor>,
    pub options: Options<Tensor>,
    /// Current stream of q's device.
    pub stream: *mut c_void,
}

impl Inputs {
    /// Returns inputs without tokens to append, and without dropout.
    pub fn new([q, k, v]: [Tensor; 3], options: Options<Tensor>, stream: *mut c_void) -> Inputs {
        Inputs { q, k, v, appended: None, rng_state: None, options, stream }
    }

    /// Returns another handle of the same tensors.
    pub fn share(&self) -> Inputs {
        let Ok(options) = self.options.try_map(|t| Ok::<_, Infallible>(t.shallow_clone()));
        Inputs {
            q: self.q.shallow_clone(),
            k: self.k.shallow_clone(),
            v: self.v.shallow_clone(),
            appended: self.appended.as_ref().map(|new| new.each_ref().map(Tensor::shallow_clone)),
            rng_state: share(&self.rng_state),
            options,
            stream: self.stream,
        }
    }

    /// Describes every tensor. `VOLTA_FA_BATCH_INVARIANT=1` sets the option `batch_invariant` of every call. Fails for tensors without
    /// strides, or on other devices than cpu, cuda and meta.
    pub(super) fn describe(&self) -> Result<Described> {
        let options = self.options.try_map(describe)?;
        let batch_invariant = options.batch_invariant || all_are_batch_invariant()?;
        Ok(Described {
            q: describe(&self.q)?,
            k: describe(&self.k)?,
            v: describe(&self.v)?,
            appended: self.appended.as_ref().map(|[k, v]| Ok::<_, Error>([describe(k)?, describe(v)?])).transpose()?,
            rng_state: self.rng_state.as_ref().map(describe).transpose()?,
            options: problem::Options { batch_invariant, ..options },
        })
    }
}

/// Descriptions of the tensors of [`Inputs`], for validation (src/problem/).
pub(super) struct Described {
    pub q: TensorDesc,
    pub k: TensorDesc,
    pub v: TensorDesc,
    pub appended: Option<[TensorDesc; 2]>,
    pub rng_state: Option<TensorDesc>,
    pub options: problem::Options,
}

/// Arguments of `volta_fa::bwd` beyond the inputs of `volta_fa::fwd`.
pub(crate) struct Saved {
    /// Gradient of out, with its shape: q's with headdim_v.
    pub dout: Tensor,
    /// Result of the forward pass, as softmax_lse.
    pub out: Tensor,
    /// fp32 (batch, nheads, seqlen_q), packed (nheads, total_q): natural logarithms.
    pub softmax_lse: Tensor,
    /// Gradient of softmax_lse.
    pub dlse: Option<Tensor>,
    pub attn_bias_requires_grad: bool,
}

impl Saved {
    /// Returns another handle of the same tensors.
    pub fn share(&self) -> Saved {
        Saved {
            dout: self.dout.shallow_clone(),
            out: self.out.shallow_clone(),
            softmax_lse: self.softmax_lse.shallow_clone(),
            dlse: share(&self.dlse),
            ..*self
        }
    }
}

/// Results of `volta_fa::bwd`: gradients with the shapes of their tensors.
pub(crate) struct Gradients {
    pub dq: Tensor,
    pub dk: Tensor,
    pub dv: Tensor,
    /// Given with a bias that requires a gradient.
    pub dattn_bias: Option<Tensor>,
    /// Given with sinks.
    pub dsinks: Option<Tensor>,
}

/// Returns true if PyTorch's settings allow products of fp32 matrices in fewer digits (`torch.set_float32_matmul_precision`).
pub(super) fn reduces_fp32() -> bool {
    // SAFETY: reads a setting of this process.
    unsafe { volta_fa_reduces_fp32() }
}

/// Where a call computes.
pub(super) enum Target {
    /// With ATen operations (cpu/).
    Cpu,
    /// On kernels, which this launcher runs.
    Kernels(Box<dyn Launcher>),
}

impl Target {
    /// Chooses a backend by the device and dtype of q.
    pub fn of(q: &TensorDesc, stream: *mut c_void) -> Result<Target> {
        match q.device {
            Device::Cuda(device) => Ok(Target::Kernels(Box::new(Driver { device, stream }))),
            Device::Cpu if matches!(q.dtype, DType::Half | DType::BFloat16) => simulated(),
            Device::Cpu => Ok(Target::Cpu),
            // reached only by the dispatcher's checks, with tensors on several devices
            Device::Meta => Err(Error::unsupported("a meta tensor has no data to compute with")),
        }
    }

    /// Chooses a backend of `fwd` and `bwd`, which run fp32 on kernels too: cast to fp16, or as sums of two fp16 numbers.
    pub fn of_dense(q: &TensorDesc, stream: *mut c_void) -> Result<Target> {
        match (q.dtype, q.device) {
            (DType::Float, Device::Cpu) => simulated(),
            _ => Target::of(q, stream),
        }
    }

    /// Returns the backend as validation of `fwd` and `bwd` sees it.
    pub fn dense_backend(&self) -> Backend {
        match self {
            Target::Cpu => Backend::Cpu,
            Target::Kernels(_) => Backend::KernelsWithFp32,
        }
    }

    /// Returns the backend as validation of operators without fp32 sees it.
    pub fn backend(&self) -> Backend {
        match self {
            Target::Cpu => Backend::Cpu,
            Target::Kernels(_) => Backend::Kernels,
        }
    }

    /// Returns true if the call checks the values of its length tensors. On a GPU that synchronizes, so it needs a request by the call
    /// or the environment; kernels skip sequences with invalid lengths (csrc/seqlen_info.cuh). Simulated kernels check unless the
    /// environment says no. The CPU backend relies on the check.
    pub fn checks_lengths(&self, requested: bool) -> Result<bool> {
        let environment = flag("VOLTA_FA_CHECK_LENGTHS")?;
        Ok(match self {
            Target::Cpu => true,
            Target::Kernels(launcher) => requested || environment.unwrap_or(launcher.device() == tch::Device::Cpu),
        })
    }

    /// Checks the values of a call's `cu_seqlens_q`, `cu_seqlens_k` and `seqused_k` if [`Target::checks_lengths`].
    pub fn check_seqlens(&self, inputs: &Inputs, a: &Attention) -> Result<()> {
        let o = &inputs.options;
        if a.is_varlen() && self.checks_lengths(o.check_lengths)? {
            let [cu_q, cu_k, used] = [&o.cu_seqlens_q, &o.cu_seqlens_k, &o.seqused_k].map(int32_values);
            problem::validate_lengths(a, cu_q?.as_deref(), cu_k?.as_deref(), used?.as_deref())?;
        }
        Ok(())
    }
}

/// Returns whether the environment asks for batch invariance in all calls.
pub fn all_are_batch_invariant() -> Result<bool> {
    Ok(flag("VOLTA_FA_BATCH_INVARIANT")?.unwrap_or(false))
}

/// Chooses for fp16 and bf16 CPU tensors: the simulator if the environment requests it, else the CPU backend.
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

/// Returns the largest headdim of fp16 CPU tensors: the simulated GPU's, if the environment requests one.
pub(crate) fn cpu_max_headdim() -> i64 {
    match simulated() {
        Ok(Target::Kernels(simulator)) => {
            simulator.limits().map_or(MAX_HEADDIM, |limits| crate::kernels::COMPILED.max_headdim(limits.sm()))
        }
        _ => MAX_HEADDIM,
    }
}

/// Rejects the request for a gradient of a bias that is boolean or not given.
pub(super) fn check_bias_gradient(inputs: &Inputs, saved: &Saved) -> Result<()> {
    let reject = |given| Err(Error::value("attn_bias_requires_grad", given, "False: there is no gradient"));
    match &inputs.options.attn_bias {
        None if saved.attn_bias_requires_grad => reject("True without an attn_bias"),
        Some(bias) if saved.attn_bias_requires_grad && bias.kind() == Kind::Bool => reject("True for an attn_bias of dtype torch.bool"),
        _ => Ok(()),
    }
}

/// Returns the values of an int32 tensor. On a GPU this synchronizes.
pub(super) fn int32_values(t: &Option<Tensor>) -> Result<Option<Vec<i32>>> {
    t.as_ref().map(|t| Ok(Vec::<i32>::try_from(t.f_to_device(tch::Device::Cpu)?.f_reshape([-1_i64].as_slice())?)?)).transpose()
}
