//! Grids: the number of blocks of a kernel, and their order.

use super::kernel::{PlannedKernel, Reason};
use crate::kernels::{RowKind, Scratch, Variant};
use crate::limits::MAX_GRID_YZ;
use crate::problem::Attention;

/// Rounds up to a multiple.
pub(super) fn rounded(rows: i64, multiple: u32) -> i64 {
    (rows as u64).next_multiple_of(u64::from(multiple)) as i64
}

/// Returns (rows, heads) of one batch entry that the grid covers: of queries or keys, as the pass defines. Blocks divide the rows.
pub(super) fn rows_and_heads(variant: &Variant, a: &Attention) -> (i64, i64) {
    match variant.pass.info().rows {
        RowKind::Queries => (a.seqlen_q, a.nheads),
        RowKind::ScratchQueries => (rounded(a.seqlen_q, scratch(variant).row_rounding), a.nheads),
        RowKind::Keys => (a.seqlen_k, a.nheads_k),
        RowKind::PackedQueries | RowKind::StoredTiles => unreachable!("plan::decode and plan::backward plan these grids"),
    }
}

/// Plans a kernel on a grid of all its rows. The pass defines the rows.
pub(super) fn planned(kernel: (&'static Variant, Reason), a: &Attention) -> PlannedKernel {
    let (rows, heads) = rows_and_heads(kernel.0, a);
    of_rows(kernel, rows, heads, a)
}

/// Plans a kernel on a grid of this many rows.
pub(super) fn of_rows((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64, a: &Attention) -> PlannedKernel {
    let mut planned = on_grid((variant, reason), rows, heads);
    // Blocks start in the order of the grid. If a long block starts late, the other SMs idle until it ends. Under a causal mask, blocks of
    // late queries are long, and so are blocks of early keys (backward). A block mask says which row tiles are long. Kernels start with
    // their long row tiles. With row tiles as the
    // second axis, the long blocks of all heads start first.
    // The GPU then reads K and V of all heads at once, which costs 5% if they exceed an H200's L2.
    let fits = planned.blocks.iter().all(|&n| i64::from(n) <= MAX_GRID_YZ);
    let is_uneven = a.window.right.is_some() || a.features.block_mask;
    if variant.family.either_order.contains(&variant.pass) && is_uneven && fits {
        planned.blocks.reverse();
    }
    planned
}

/// Plans a kernel with one block per row tile and head, row tiles first.
pub(super) fn on_grid((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64) -> PlannedKernel {
    PlannedKernel {
        variant,
        blocks: [(rows as u64).div_ceil(variant.block_rows as u64) as u32, heads as u32],
        reason,
        stream_k: None,
        backward_stream_k: None,
    }
}

/// Returns the scratch layout of a backward kernel's family.
pub(super) fn scratch(variant: &Variant) -> Scratch {
    variant.family.scratch.expect("families with backward kernels define a scratch layout")
}

/// Returns (first batch entry, number of entries) of each launch. The batch is the grid's z axis, which limits the number.
pub fn batch_chunks(batch: i64) -> impl Iterator<Item = (i64, i64)> {
    chunks(batch, MAX_GRID_YZ)
}

/// Returns (first batch entry, number of entries) of launches of at most this many entries.
pub(super) fn chunks(batch: i64, of: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..batch).step_by(of as usize).map(move |first| (first, of.min(batch - first)))
}
