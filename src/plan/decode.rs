//! Planning attention of few queries a sequence over a KV cache.
//!
//! The grid is as large as the GPU, whatever the lengths, which the host does not know: blocks share them on the device
//! (`csrc/decode/tile_scheduler.cuh`). So a plan depends on nothing but headdims and the most rows that a sequence has.

use super::cached::{cached_plan, PlanCache};
use super::choose::{choose, holds};
use super::device::DeviceLimits;
use super::kernel::{PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{CacheFormat, FeatureSet, Kernels, Pass, COMPILED};
use crate::problem::{Attention, MAX_HEADDIM};
use crate::tuning::Shape;
use std::cell::Cell;

/// Rows (queries of all heads of a key head) from which on the forward kernels' tiles serve a sequence better, which share
/// loads of keys by more rows than a decode kernel has.
pub const MAX_ROWS: i64 = 64;

/// A decode kernel and its scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// its grid has one dimension
    pub kernel: PlannedKernel,
    /// sequences with more rows are another kernel's; [`i64::MAX`]: none are
    pub max_rows: i64,
    /// floats: what blocks found out of row sets that they share
    pub partials: i64,
    /// 8 bytes each: who has arrived at the merge of those
    pub semaphores: i64,
}

/// Rows of the longest sequence.
pub fn rows(a: &Attention) -> i64 {
    a.seqlen_q * (a.nheads / a.nheads_k.max(1))
}

/// Plan for a call that is not empty. `others`: whether another kernel takes sequences of many rows.
pub fn decode(a: &Attention, cache: CacheFormat, others: bool, d: &DeviceLimits) -> Result<DecodePlan> {
    thread_local!(static LAST: PlanCache<(Shape, i64, bool), DecodePlan> = const { Cell::new(None) });
    let shape = Shape { cache, ..Shape::of(a) };
    cached_plan(&LAST, (shape, rows(a), others), d, || decode_among(COMPILED, a, cache, others, d))
}

/// The same with other kernels to choose from.
pub fn decode_among(kernels: Kernels, a: &Attention, cache: CacheFormat, others: bool, d: &DeviceLimits) -> Result<DecodePlan> {
    let shape = Shape { cache, ..Shape::of(a) };
    // no decode kernel but those of latents has such a headdim
    let pass = if a.headdim > MAX_HEADDIM { Pass::DecodeMla } else { Pass::Decode };
    let [(chosen, reason)] = choose(kernels, [pass], &shape, FeatureSet::NONE, d)?;
    // Of those for the same headdims the one with the fewest rows that has room for a sequence's; else the one with the most. Where
    // there are sequences of few rows beside some of very many, no kernel has room for these, and most have one query.
    const MIXED_ROWS: i64 = 32;
    let wanted = if others { rows(a).min(MIXED_ROWS) } else { rows(a) };
    let fits = |v: &&'static crate::kernels::Variant| {
        (v.headdim, v.headdim_v) == (chosen.headdim, chosen.headdim_v)
            && holds(v, &shape, FeatureSet::NONE, d)
            && !d.tuning.is_some_and(|t| t.has_failed(v))
    };
    let badness = |rows: u32| (i64::from(rows) < wanted, if i64::from(rows) < wanted { -i64::from(rows) } else { i64::from(rows) });
    let variant = match reason {
        Reason::Tuned => chosen,
        _ => kernels.of(&chosen.family, pass).filter(fits).min_by_key(|v| badness(v.block_rows)).unwrap_or(chosen),
    };
    let blocks = d.sms * variant.blocks_per_sm;
    // csrc/decode/partials.cuh: two places for each block, whose states each level of the merge has for itself
    let places = 2 * i64::from(blocks);
    let levels = i64::from(merge_levels(blocks));
    let rows_of_place = i64::from(variant.block_rows);
    Ok(DecodePlan {
        kernel: PlannedKernel { variant, blocks: [blocks, 1], reason, shares: None },
        max_rows: if others { MAX_ROWS } else { i64::MAX },
        partials: places * rows_of_place * (i64::from(variant.headdim_v) + 2 * levels),
        semaphores: places * levels,
    })
}

/// Levels of the tree by which the parts of a row set are merged that all blocks share. The device's tree has no smaller radix.
fn merge_levels(blocks: u32) -> u32 {
    const LEAST_RADIX: u32 = 4;
    let (mut levels, mut nodes) = (1, blocks);
    while nodes > LEAST_RADIX {
        nodes = nodes.div_ceil(LEAST_RADIX);
        levels += 1;
    }
    levels
}
