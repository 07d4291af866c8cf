//! Plans the backward pass: how kernels compute dq, the key blocks (keys of one block) of each launch, and the scratch memory. A main
//! kernel sums dk and dv in registers, but each key block adds to every dq. P: probabilities. dS: gradients of scores. A tuning has
//! choices of kernels that were measured on the GPU. Tests: tests/plan/backward.rs.

mod fused;
mod parts;
mod plan;
mod stored;
mod stream_k;

pub use plan::{BackwardPlan, StoredPlan, Tail, STORED_ROWS};
pub use stream_k::{BackwardStreamKPlan, BackwardStreamKSchedule};

use super::device::DeviceLimits;
use super::features::BackwardMode; // deterministic, fp32_gradients, has_dlse, split
use super::kernel::{PlannedKernel, Reason}; // Tuned: the tuning names the kernel; TunedMode: it forbids atomics
use crate::error::Result;
use crate::kernels::{Kernels, COMPILED};
use crate::problem::Attention;
use fused::fused;
use parts::in_parts;
use stored::{faster_stored, needs_stored, stored}; // stored: the plan that passes P and dS through memory

/// Plans the backward pass of a non-empty problem.
///
/// By default the main kernel adds to dq by atomics, in any order. A deterministic pass takes the faster of two plans. It launches the main
/// kernel several times, so that one block at a time adds to an accumulator of dq. Or a separate kernel computes scores again, for dq.
///
/// The separate kernel also runs if the tuning chooses it, or if a kernel with atomics failed and no other replaces it. No tuning makes a
/// deterministic pass depend on the order of blocks.
pub fn backward(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    backward_among(*COMPILED, a, mode, d)
}

/// Plans the backward pass with these kernels to choose from.
///
/// For large headdims, and fp32 tensors as sums of two fp16 (`split`), two kernels pass P and dS through memory. One fused kernel may take
/// few keys, unless there is a gradient of softmax_lse (`has_dlse`): the host adds it after the preprocess kernel, which a fused pass
/// lacks. All other problems run in parts: preprocess, main, and postprocess or dq. What the GPU's tuning chose comes first.
pub fn backward_among(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    if mode.split || needs_stored(a) {
        return stored(kernels, a, mode, d);
    }
    let in_one_kernel = || if mode.has_dlse { None } else { fused(kernels, a, mode, d) };
    // faster than parts by the planner's rules; a tuning may know better
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
