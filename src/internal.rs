//! The table of internal operators, `torch.ops.volta_fa._*`, which the Python package, its tools and the tests call. The C++ shim registers
//! the rows with PyTorch's dispatcher (torch_ops/operators.cpp) and passes calls to `ffi::volta_fa_call_internal`. Internal operators that
//! only torch's C++ can compute are defined in torch_ops/ (sdpa.cpp, shim.cpp, registration.cpp).

use crate::error::{Error, Result};
use crate::info;
use crate::launch::tuning;
use crate::operators::optional; // the tensor of a value; None: absent
use crate::ops::dropout;
use crate::value::{arguments, Value};
use std::mem::ManuallyDrop;
use tch::{Device, Tensor};

/// Result of a call.
pub enum Output {
    Nothing,
    /// `str` in the schema: JSON
    Text(String),
    Tensor(Tensor),
}

/// A row of the table.
pub struct Internal {
    pub schema: &'static str,
    /// Computes a call, from its arguments in the order of the schema.
    pub run: fn(&[Value]) -> Result<Output>,
}

pub const INTERNAL: &[Internal] = &[
    // JSON: this build's kernels and limits, and this machine
    Internal { schema: "_info() -> str", run: |_| json(Ok(info::describe())) },
    // JSON: the kernels that a shape would run. `features`: comma-separated names, as in _info(), of what else the call uses. sms
    // (multiprocessors), major, minor (compute capability) and shared_bytes (the most shared memory that a block may have) describe a GPU,
    // by default a V100; `device` names one of this machine instead, -1 the simulator's.
    Internal {
        schema: "_plan(int batch, int seqlen_q, int seqlen_k, int nheads, int nheads_k, int headdim, int headdim_v, bool is_causal, \
                 int sms=80, int major=7, int minor=0, int shared_bytes=98304, bool deterministic=False, str features='', \
                 int? device=None) -> str",
        run: |values| json(info::plan(values)),
    },
    // A tuning, the JSON that `python -m volta_fa check --tune` writes, overrides the planner's choice of kernels. `text` replaces all
    // files until a call with "".
    Internal {
        schema: "_set_tuning(str text) -> ()",
        run: |values| {
            let [text] = arguments(values);
            tuning::force(&text.text()).map(|()| Output::Nothing)
        },
    },
    // JSON: a device's tuning file
    Internal {
        schema: "_tuning(int device) -> str",
        run: |values| {
            let [device] = arguments(values);
            json(info::tuning(device.int()))
        },
    },
    // loads a kernel ahead of its first launch
    Internal {
        schema: "_preload(str kernel, int device) -> ()",
        run: |values| {
            let [kernel, device] = arguments(values);
            info::driver_of(device.int())?.preload(&kernel.text()).map(|()| Output::Nothing)
        },
    },
    // JSON: the families of kernels (Volta, Turing) that a compute capability runs
    Internal {
        schema: "_families(int major, int minor) -> str",
        run: |values| {
            let [major, minor] = arguments(values);
            json(info::families((major.int() as i32, minor.int() as i32)))
        },
    },
    // bool (batch, nheads, seqlen_q, seqlen_k): true for each probability that dropout with this random state keeps. Its kernel for meta
    // tensors, of the same shape, is in torch_ops/operators.cpp.
    Internal {
        schema: "_dropout_mask(Tensor rng_state, int batch, int nheads, int seqlen_q, int seqlen_k, float dropout_p) -> Tensor",
        run: dropout_mask,
    },
    // JSON: launches that the simulator timed or recorded since the last call
    Internal { schema: "_sim_report() -> str", run: |_| Ok(Output::Text(info::take_simulations())) },
];

impl Internal {
    pub fn name(&self) -> &'static str {
        self.schema.split('(').next().unwrap_or(self.schema)
    }
}

fn json(found: Result<serde_json::Value>) -> Result<Output> {
    found.map(|value| Output::Text(value.to_string()))
}

fn dropout_mask(values: &[Value]) -> Result<Output> {
    let [rng_state, batch, nheads, seqlen_q, seqlen_k, dropout_p] = arguments(values);
    // the value borrows the shim's tensor: not freed here
    let rng_state = ManuallyDrop::new(optional(rng_state).ok_or_else(|| Error::value("rng_state", "None", "a tensor"))?);
    let shape = [batch, nheads, seqlen_q, seqlen_k].map(Value::int);
    let kept = dropout::mask(&rng_state.f_to_device(Device::Cpu)?, shape, dropout_p.float())?;
    Ok(Output::Tensor(kept.f_to_device(rng_state.device())?))
}
