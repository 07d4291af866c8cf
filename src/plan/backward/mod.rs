//! Plans the backward pass: how kernels compute dq, the key blocks of each launch, and the scratch memory.

mod blocks;
mod fused;
mod parts;
mod plan;
mod stored;
mod stream_k;
mod tiles;

pub use plan::{BackwardPlan, Tail};
pub use stream_k::{BackwardStreamKPlan, BackwardStreamKSchedule};
pub use tiles::{StoredPlan, STORED_ROWS};

use super::device::DeviceLimits;
use super::features::BackwardMode;
use super::kernel::{PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{Kernels, COMPILED};
use crate::problem::Attention;
use fused::fused;
use parts::in_parts;
use stored::{faster_stored, needs_stored, stored};

/// Plans the backward pass of a non-empty problem.
///
/// By default the main kernel adds to dq by atomics, in any order. A deterministic pass takes the faster of two plans. It launches the main
/// kernel several times, so that one block at a time adds to an accumulator. Or a separate kernel computes S and dP again for dq.
///
/// The separate kernel also runs if the tuning chooses it, or if a kernel with atomics failed and no other replaces it. No tuning makes a
/// deterministic pass depend on the order of blocks.
pub fn backward(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    backward_among(*COMPILED, a, mode, d)
}

/// Plans the backward pass with these kernels to choose from.
///
/// Large headdims, and fp32 tensors as sums of two fp16 (`split`), store P and dS between two kernels. One fused kernel may take few keys,
/// unless there is a gradient of softmax_lse (`has_dlse`): the host adds it after the preprocess kernel, which a fused kernel lacks. All
/// other problems run in parts: preprocess, main, and postprocess or dq. Parts that the GPU's tuning chose precede a plan that it did not
/// choose.
pub fn backward_among(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    if mode.split || needs_stored(a) {
        return stored(kernels, a, mode, d);
    }
    let in_one_kernel = || if mode.has_dlse { None } else { fused(kernels, a, mode, d) };
    let Some(faster) = faster_stored(kernels, a, mode, d).or_else(in_one_kernel) else { return in_parts(kernels, a, mode, d) };
    if d.tuning.is_some() && faster.main.reason != Reason::Tuned {
        let parts = in_parts(kernels, a, mode, d)?;
        let of_tuning = |k: &PlannedKernel| matches!(k.reason, Reason::Tuned | Reason::TunedMode);
        if parts.kernels().any(|k| of_tuning(&k)) {
            return Ok(parts);
        }
    }
    Ok(faster)
}
