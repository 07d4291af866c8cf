//! Plans the fast forward: its kernels, or none where the exact forward serves the call.

use super::choose::choose;
use super::device::families;
use super::device::DeviceLimits;
use super::features::{features, BackwardMode};
use super::kernel::planned;
use super::kernel::{PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{self, Pass, COMPILED};
use crate::problem::Attention;
use crate::tuning::Shape;

/// Fewest keys for which the fast kernels are chosen: on a simulated RTX 2080 Ti, with a head for each SM and as many queries as keys, the
/// call takes 0.79, 0.78 and 0.80 of the exact kernel's time at 768 keys (headdim 64, 128, 256). At 512 keys, 0.91, 0.86 and 0.85, and a
/// launch more that the simulator leaves out. On a T4, which the planner cannot tell apart, both calls are within 15% from 1024 keys on
/// (`python -m benchmarks.tables fast --every-length`, 2026-11-26).
pub const FAST_MIN_KEYS: i64 = 768;

/// Fewest query rows of a KV head for which preparing its keys pays: its time per key is that which 240 to 390 rows save on a simulated RTX
/// 2080 Ti (the same runs), and a block has 256 rows, or 128 at headdim 256.
pub const FAST_MIN_ROWS: i64 = 512;

/// Blocks of the prepare kernel for each SM where a mask is packed, twice what an SM runs at a time. All blocks share the packing, also
/// where K has few blocks of its own: those alone took 312 us instead of 24 (8 heads on 1, N=1024, a mask for each head, 2026-11-26).
const PACKING_BLOCKS: u32 = 4;

/// The kernels of a fast forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastPlan {
    /// Quantizes K, takes the range of V, scales V in bf16 and packs a mask.
    pub prepare: PlannedKernel,
    /// Computes out and softmax_lse.
    pub forward: PlannedKernel,
}

/// Plans the fast kernels of a non-empty problem, whose headdims are multiples of 8. None: use the exact forward, because the device has
/// no fast kernel for the problem that works, or because the sequences are too short to pay. A tuning that names a fast kernel overrides
/// the length.
/// A boolean mask is the feature `attn_bias`. `is_prepared`: keys and values need no preparation, a mask still does.
pub fn fast(a: &Attention, is_prepared: bool, d: &DeviceLimits) -> Result<Option<FastPlan>> {
    let Ok([forward]) = choose(*COMPILED, kernels::FAST_FORWARD, &Shape::of(a), features(a, BackwardMode::default()), d) else {
        return Ok(None);
    };
    let pays = a.seqlen_k >= FAST_MIN_KEYS && (is_prepared || a.seqlen_q * (a.nheads / a.nheads_k) >= FAST_MIN_ROWS);
    if !pays && forward.1 != Reason::Tuned {
        return Ok(None);
    }
    let mut prepares = COMPILED.of(&forward.0.family, Pass::FastPrepare);
    let prepare = prepares.find(|v| v.headdim == forward.0.headdim).expect("each fast forward kernel has a prepare kernel");
    let mut prepare = planned((prepare, forward.1), a);
    if a.features.attn_bias {
        let [of_keys, heads] = prepare.blocks;
        prepare.blocks[0] = of_keys.max((PACKING_BLOCKS * d.sms).div_ceil(heads.saturating_mul(a.batch as u32)));
    }
    Ok(Some(FastPlan { prepare, forward: planned(forward, a) }))
}

/// Plans the kernel that prepares K and V for any later forward. None: the device has no fast kernels.
pub fn fast_prepare(a: &Attention, d: &DeviceLimits) -> Result<Option<PlannedKernel>> {
    let needed = a.headdim.max(a.headdim_v);
    let of_family = |family| COMPILED.of(family, Pass::FastPrepare).filter(|v| i64::from(v.headdim) >= needed).min_by_key(|v| v.headdim);
    let found = families(*COMPILED, d)?.into_iter().find_map(|(family, _)| of_family(family));
    Ok(found.map(|v| planned((v, Reason::Cheapest), a)))
}
