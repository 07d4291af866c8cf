//! Plans the backward pass for large headdims: P and dS travel through memory.

use super::plan::{scratch_rows, BackwardPlan};
use super::tiles::{tiles, StoredPlan};
use crate::error::Result;
use crate::kernels::{self, Family, Kernels};
use crate::limits::COMMON_HEADDIM;
use crate::plan::choose::choose;
use crate::plan::device::DeviceLimits;
use crate::plan::features::{features, BackwardMode};
use crate::plan::kernel::scratch;
use crate::plan::kernel::{PlannedKernel, Reason};
use crate::problem::Attention;
use crate::tuning::Shape;

/// Query tiles that consecutive blocks of the scores kernel visit for each key tile: the grid has a multiple of it.
const QUERY_TILES_TOGETHER: i64 = 8;

/// Returns true if no other kernels have room for the headdims.
pub(super) fn needs_stored(a: &Attention) -> bool {
    a.headdim.max(a.headdim_v) > COMMON_HEADDIM
}

/// Plans a backward pass that stores P and dS, if that is faster than the family's other kernels.
pub(super) fn faster_stored(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Option<BackwardPlan> {
    let is_wide = |family: &Family| a.headdim.max(a.headdim_v) > i64::from(family.stored_above);
    if !kernels.families().any(is_wide) {
        return None; // without a search for kernels, as most problems
    }
    let plan = stored(kernels, a, mode, d).ok()?;
    let is_faster = |k: PlannedKernel| matches!(k.reason, Reason::Cheapest | Reason::Tuned) && is_wide(&k.variant.family);
    (plan.kernels().all(is_faster) && plan.stored?.fills_launches()).then_some(plan)
}

/// Plans the kernels of a backward pass that stores P and dS.
pub(super) fn stored(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let passes = if mode.split { kernels::SPLIT_BACKWARD } else { kernels::STORED_BACKWARD };
    let [prepare, scores, gradients] = choose(kernels, passes, &Shape::of(a), features(a, mode), d)?;
    let plan = StoredPlan::new(a, mode.split);
    let group = a.nheads / a.nheads_k;
    let query_tiles = tiles(a.seqlen_q);
    let rounded = (query_tiles as u64).next_multiple_of(QUERY_TILES_TOGETHER as u64) as i64;
    let on = |(variant, reason), [x, y]: [i64; 2]| PlannedKernel {
        variant,
        blocks: [x as u32, y as u32],
        reason,
        stream_k: None,
        backward_stream_k: None,
    };
    Ok(BackwardPlan {
        prepare: Some(crate::plan::kernel::planned(prepare, a)),
        main: on(scores, [rounded * plan.key_tiles, plan.heads * group]),
        finish: Some(on(gradients, [plan.heads * plan.blocks_of_head(a), 1])),
        deterministic: true,
        main_launches: plan.launches(a.nheads_k).count() as u32,
        tail: None,
        dq_accum_splits: 0,
        scratch: scratch(scores.0),
        scratch_rows: scratch_rows(scores.0, a),
        headdim_rounded: 0,
        stored: Some(plan),
    })
}
