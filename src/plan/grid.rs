//! Grids: how many blocks a kernel has, and in which order they start.

use super::kernel::{PlannedKernel, Reason};
use crate::kernels::{RowKind, Scratch, Variant};
use crate::limits::MAX_GRID_YZ;
use crate::problem::Attention;

pub(super) fn rounded(rows: i64, multiple: u32) -> i64 {
    (rows as u64).next_multiple_of(u64::from(multiple)) as i64
}

/// What a kernel has blocks of, and for how many heads.
pub(super) fn rows_and_heads(variant: &Variant, a: &Attention) -> (i64, i64) {
    match variant.pass.info().rows {
        RowKind::Queries => (a.seqlen_q, a.nheads),
        RowKind::ScratchQueries => (rounded(a.seqlen_q, scratch(variant).row_rounding), a.nheads),
        RowKind::Keys => (a.seqlen_k, a.nheads_k),
        RowKind::PackedQueries => unreachable!("decode kernels have a planner of their own"),
    }
}

/// The grid of a kernel: what its rows are, the pass says.
pub(super) fn planned(kernel: (&'static Variant, Reason), a: &Attention) -> PlannedKernel {
    let (rows, heads) = rows_and_heads(kernel.0, a);
    of_rows(kernel, rows, heads, a)
}

/// The same of some of its rows.
pub(super) fn of_rows((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64, a: &Attention) -> PlannedKernel {
    let mut planned = on_grid((variant, reason), rows, heads);
    // Blocks start in the order of the grid, and a long one that starts late is a tail. So, where the last rows see the most keys, and the
    // first keys the most rows, these come first of all heads. (All heads' K and V are then read at once, which costs 5% where they exceed
    // an H200's cache.)
    let fits = planned.blocks.iter().all(|&n| i64::from(n) <= MAX_GRID_YZ);
    if variant.family.either_order.contains(&variant.pass) && a.window.right.is_some() && fits {
        planned.blocks.reverse();
    }
    planned
}

pub(super) fn on_grid((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64) -> PlannedKernel {
    PlannedKernel { variant, blocks: [(rows as u64).div_ceil(variant.block_rows as u64) as u32, heads as u32], reason, stream_k: None }
}

pub(super) fn scratch(variant: &Variant) -> Scratch {
    variant.family.scratch.expect("a family with backward kernels says how their scratch memory lies")
}

/// (first batch, batches) of each launch: the batch lies on the grid's z axis.
pub fn batch_chunks(batch: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..batch).step_by(MAX_GRID_YZ as usize).map(move |first| (first, MAX_GRID_YZ.min(batch - first)))
}
