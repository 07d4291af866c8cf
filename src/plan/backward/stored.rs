//! Plans the backward pass for large headdims, and for fp32: a scores kernel stores P (probabilities) and dS (gradients of scores), and a
//! gradients kernel multiplies them to dq, dk and dv. plan.rs divides both into launches, so that P and dS fit their memory: a launch has
//! some KV heads (`heads`) and of each some key tiles (`key_tiles`, of 128 keys). A block of the scores kernel computes one tile of 128
//! queries by 128 keys, of one query head; a block of the gradients kernel one tile of dq, dk or dv. Tests: tests/plan/backward.rs.

use super::plan::{tiles, BackwardPlan, StoredPlan};
use crate::error::Result;
use crate::kernels::{self, Family, Kernels};
use crate::limits::COMMON_HEADDIM; // 256
use crate::plan::choose::choose; // the tuned or cheapest kernels of one family
use crate::plan::device::DeviceLimits;
use crate::plan::features::{features, BackwardMode}; // features: those of problem and mode, which kernels need code for
use crate::plan::kernel::{planned, PlannedKernel, Reason}; // planned: a kernel on a grid of a block for each row tile and head
use crate::problem::Attention;
use crate::tuning::Shape;

/// Query tiles (of 128) that consecutive blocks of the scores kernel visit for each key tile: blocks that run at once share operands in L2.
/// The grid has a multiple of it, and blocks beyond the last query tile have no work.
const QUERY_TILES_TOGETHER: i64 = 8;

/// Returns true if no other kernels have room for the headdims.
pub(super) fn needs_stored(a: &Attention) -> bool {
    a.headdim.max(a.headdim_v) > COMMON_HEADDIM
}

/// Plans a backward pass that stores P and dS, if that is faster than other kernels of the family (volta or turing).
pub(super) fn faster_stored(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Option<BackwardPlan> {
    // stored_above: the largest headdim at which other kernels of the family are as fast
    let is_wide = |family: &Family| a.headdim.max(a.headdim_v) > i64::from(family.stored_above);
    if !kernels.families().any(is_wide) {
        return None; // most problems end here, without a search for kernels
    }
    let plan = stored(kernels, a, mode, d).ok()?;
    // with other reasons a kernel of the family failed, or the preferred family has none: `stored_above` compares usual choices alone
    // fills_launches: a launch has all keys of its heads, or enough to fill a GPU
    let is_faster = |k: PlannedKernel| matches!(k.reason, Reason::Cheapest | Reason::Tuned) && is_wide(&k.variant.family);
    (plan.kernels().all(is_faster) && plan.stored?.fills_launches()).then_some(plan)
}

/// Plans the kernels of a backward pass that stores P and dS.
pub(super) fn stored(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let passes = if mode.split { kernels::SPLIT_BACKWARD } else { kernels::STORED_BACKWARD };
    let [preprocess, scores, gradients] = choose(kernels, passes, &Shape::of(a), features(a, mode), d)?;
    let plan = StoredPlan::new(a, mode.split);
    let group = a.nheads / a.nheads_k;
    let query_tiles = tiles(a.seqlen_q);
    let rounded = (query_tiles as u64).next_multiple_of(QUERY_TILES_TOGETHER as u64) as i64;
    let on = |kernel, blocks: [i64; 2]| PlannedKernel::new(kernel, blocks.map(|n| n as u32));
    Ok(BackwardPlan {
        preprocess: Some(planned(preprocess, a)),
        // the gradients kernel runs after the scores kernel, in the place of a postprocess kernel; blocks_of_head: of a KV head's gradients
        postprocess: Some(on(gradients, [plan.heads * plan.blocks_of_head(a), 1])),
        main_launches: plan.launches(a.nheads_k).count() as u32,
        stored: Some(plan),
        ..BackwardPlan::new(on(scores, [rounded * plan.key_tiles, plan.heads * group]), a)
    })
}
