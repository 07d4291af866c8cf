//! Plans the indexer: a kernel on a grid as large as the GPU, whose blocks divide the keys on the device (csrc/indexer/schedule.cuh).

use super::cached::{cached_plan, PlanCache};
use super::choose::{choose, is_applicable};
use super::device::DeviceLimits;
use super::kernel::{PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{CacheFormat, FeatureSet, Pass, COMPILED};
use crate::problem::{Indexer, INDEXER_HEADDIM};
use crate::tuning::Shape;
use std::cell::Cell;

/// Logarithm of the fewest and the most rows that a query has in a tile: a warp's, or two warps'.
const HEAD_SHIFTS: [i32; 2] = [5, 6];
/// A sequence's rows from which the largest tile is faster: smaller ones convert keys more often, larger ones compute missing rows.
const MIN_ROWS: i64 = 192;

/// Returns the logarithm of the rows that a query of this many heads has in a tile.
pub fn indexer_head_shift(nheads: i64) -> i32 {
    let [small, large] = HEAD_SHIFTS;
    if nheads <= 1 << small {
        small
    } else {
        large
    }
}

/// Plans a call that has logits.
pub fn indexer(x: &Indexer, d: &DeviceLimits) -> Result<PlannedKernel> {
    thread_local!(static LAST: PlanCache<Indexer, PlannedKernel> = const { Cell::new(None) });
    cached_plan(&LAST, *x, d, || {
        let shape = Shape {
            headdim: INDEXER_HEADDIM,
            headdim_v: INDEXER_HEADDIM,
            seqlen_q: x.seqlen_q,
            seqlen_k: x.columns,
            rows: x.batch * x.seqlen_q * x.nheads,
            is_causal: None,
            cache: CacheFormat::Unquantized,
            is_bf16: false,
            is_batch_invariant: false,
            rows_before_keys: 0,
        };
        let [(chosen, reason)] = choose(*COMPILED, [Pass::Indexer], &shape, FeatureSet::NONE, d)?;
        let is_large = x.seqlen_q << indexer_head_shift(x.nheads) >= MIN_ROWS;
        let rows = |v: &&crate::kernels::Variant| if is_large { -i64::from(v.block_rows) } else { i64::from(v.block_rows) };
        let own = COMPILED.of(&chosen.family, Pass::Indexer).filter(|v| is_applicable(v, &shape, FeatureSet::NONE, d));
        let variant = if reason == Reason::Tuned { chosen } else { own.min_by_key(rows).unwrap_or(chosen) };
        let blocks = d.sms * variant.blocks_per_sm;
        Ok(PlannedKernel { variant, blocks: [blocks, 1], reason, stream_k: None, backward_stream_k: None })
    })
}
