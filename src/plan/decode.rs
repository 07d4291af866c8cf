//! Planning attention of few queries a sequence over a KV cache.
//!
//! The grid is as large as the GPU, whatever the lengths, which the host does not know: blocks share them on the device
//! (`csrc/decode/tile_scheduler.cuh`). So a plan depends on nothing but headdims and the most rows that a sequence has.

use super::cached::{cached_plan, PlanCache};
use super::choose::{choose, holds};
use super::device::DeviceLimits;
use super::kernel::{PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{CacheFormat, FeatureSet, Pass, COMPILED};
use crate::limits::MAX_DECODE_ROWS;
use crate::problem::{Attention, DType};
use crate::tuning::Shape;
use std::cell::Cell;

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

/// Plans decoding of a problem with headdims as kernels read them. `has_long`: another kernel computes sequences of more than
/// [`MAX_DECODE_ROWS`] rows.
pub fn decode(a: &Attention, has_long: bool, d: &DeviceLimits) -> Result<DecodePlan> {
    thread_local!(static LAST: PlanCache<(Shape, Pass, i64, bool), DecodePlan> = const { Cell::new(None) });
    let shape = Shape { cache: kernel_format(a), ..Shape::of(a) };
    let pass = if a.has_latents() { Pass::DecodeMla } else { Pass::Decode };
    let rows = a.rows_per_kv_head();
    cached_plan(&LAST, (shape, pass, rows, has_long), d, || decode_shape(&shape, pass, rows, has_long, d))
}

/// Returns the format that a kernel reads: its table names fp16 `Unquantized`, and bf16 has kernels of its own.
fn kernel_format(a: &Attention) -> CacheFormat {
    match (a.dtype, a.cache_format()) {
        (DType::BFloat16, CacheFormat::Unquantized) => CacheFormat::Bf16,
        (_, format) => format,
    }
}

fn decode_shape(shape: &Shape, pass: Pass, rows: i64, has_long: bool, d: &DeviceLimits) -> Result<DecodePlan> {
    let kernels = *COMPILED;
    let [(chosen, reason)] = choose(kernels, [pass], shape, FeatureSet::NONE, d)?;
    // Of those for the same headdims the one with the fewest rows that has room for a sequence's; else the one with the most. Where
    // there are sequences of few rows beside some of very many, no kernel has room for these, and most have one query.
    const MIXED_ROWS: i64 = 32;
    let wanted = if has_long { rows.min(MIXED_ROWS) } else { rows };
    let fits = |v: &&'static crate::kernels::Variant| {
        (v.headdim, v.headdim_v) == (chosen.headdim, chosen.headdim_v)
            && holds(v, shape, FeatureSet::NONE, d)
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
        kernel: PlannedKernel { variant, blocks: [blocks, 1], reason, stream_k: None },
        max_rows: if has_long { MAX_DECODE_ROWS } else { i64::MAX },
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
