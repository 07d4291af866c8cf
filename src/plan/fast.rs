//! Plans the fast forward (`volta_fa::fwd_fast`, int8 scores): its kernels, or none where the exact forward serves the call. A tuning has
//! choices of kernels that were measured on the GPU, and a family is the kernels for one kind of tensor core. Tests: tests/test_fast.py.

use super::choose::choose; // the tuned or cheapest kernel of each pass
use super::device::{families, DeviceLimits};
use super::features::{features, BackwardMode};
use super::kernel::{planned, ChosenKernel, PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{Pass, COMPILED};
use crate::problem::Attention;
use crate::tuning::Shape;

/// Fewest keys for which the fast kernels are chosen. Measured on a simulated RTX 2080 Ti, with a head for each SM and as many queries as
/// keys. At 768 keys the call takes 0.79, 0.78 and 0.80 of the exact kernel's time (headdim 64, 128, 256); at 512 keys 0.91, 0.86 and 0.85,
/// without the cost of its second launch, which the simulator leaves out. On a T4, which the planner cannot tell from it, both calls are
/// within 15% from 1024 keys on (2026-11-26; `python -m benchmarks.tables fast --seqlen N`).
pub const FAST_MIN_KEYS: i64 = 768;

/// Fewest query rows of a KV head (queries times its query heads) for which preparing its keys pays: preparing takes as much time per key
/// as 240 to 390 rows save on a simulated RTX 2080 Ti (the same runs). A block has 256 rows, or 128 at headdim 256: two or four blocks.
pub const FAST_MIN_ROWS: i64 = 512;

/// Blocks of the prepare kernel for each SM where a mask is packed (to a bit per element), twice what an SM runs at a time. All blocks
/// share the packing: the few blocks that K has may be too few. Those alone took 312 us instead of 24 (8 heads on 1 KV head, 1024 queries
/// and keys, a mask for each head, 2026-11-26).
const PACKING_BLOCKS: u32 = 4;

/// The kernels of a fast forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastPlan {
    /// Quantizes K, takes the range of V (its largest magnitudes), scales V in bf16 and packs a mask.
    pub prepare: PlannedKernel,
    /// Computes out and softmax_lse.
    pub forward: PlannedKernel,
}

/// Plans the fast kernels of a non-empty problem, whose headdims are multiples of 8. None: use the exact forward, because the device has no
/// fast kernel for the problem that works, or because the sequences are too short to pay. A tuning that names a fast kernel overrides the
/// length. A boolean mask is the feature `attn_bias`. `is_prepared`: keys and values need no preparation, a mask still does.
pub fn fast(a: &Attention, is_prepared: bool, d: &DeviceLimits) -> Result<Option<FastPlan>> {
    let Ok([forward]) = choose(*COMPILED, [Pass::FastForward], &Shape::of(a), features(a, BackwardMode::default()), d) else {
        // also after an error of the families: the exact forward's plan finds the same and reports it
        return Ok(None);
    };
    let pays = a.seqlen_k >= FAST_MIN_KEYS && (is_prepared || a.seqlen_q * (a.nheads / a.nheads_k) >= FAST_MIN_ROWS);
    if !pays && forward.reason != Reason::Tuned {
        return Ok(None);
    }
    let mut prepares = COMPILED.of(&forward.variant.family, Pass::FastPrepare);
    let prepare = prepares.find(|v| v.headdim == forward.variant.headdim).expect("each fast forward kernel has a prepare kernel");
    let mut prepare = planned(ChosenKernel { variant: prepare, reason: forward.reason }, a);
    if a.features.attn_bias {
        // all blocks of the grid share the packing, so more of them than K needs
        let [of_keys, heads] = prepare.blocks;
        prepare.blocks[0] = of_keys.max((PACKING_BLOCKS * d.sms).div_ceil(heads.saturating_mul(a.batch as u32)));
    }
    Ok(Some(FastPlan { prepare, forward: planned(forward, a) }))
}

/// Plans the kernel that prepares K and V for any later forward. None: the device has no fast kernels. Reports errors of `VOLTA_FA_FAMILY`
/// itself, because no exact forward follows that would.
pub fn fast_prepare(a: &Attention, d: &DeviceLimits) -> Result<Option<PlannedKernel>> {
    let needed = a.headdim.max(a.headdim_v); // a fast kernel has one headdim for both
    let of_family = |family| COMPILED.of(family, Pass::FastPrepare).filter(|v| i64::from(v.headdim) >= needed).min_by_key(|v| v.headdim);
    let found = families(*COMPILED, d)?.into_iter().find_map(|(family, _)| of_family(family));
    Ok(found.map(|variant| planned(ChosenKernel { variant, reason: Reason::Cheapest }, a)))
}
