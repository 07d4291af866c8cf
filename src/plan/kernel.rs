//! A planned kernel: the kernel, the reason for it, and its grid. All plans end here; src/ops/ launches the result.
//! - row tile: the rows (queries or keys) of one block; resident blocks: those that the GPU holds at once; wave: as many blocks of a grid;
//! - pass: what a kernel computes; family: the kernels for one kind of tensor core; tuning: a file of choices measured on a GPU.

use super::backward::BackwardStreamKPlan;
use super::stream_k::StreamKPlan;
use crate::kernels::{named, RowKind, Scratch, Variant}; // named!: an enum whose name() returns the texts
use crate::limits::MAX_GRID_YZ; // 65535
use crate::problem::Attention;
use std::fmt;

named! {
    /// Why a plan has a kernel, and the text of it in `_plan()`. Blocks are those of the kernel's grid.
    enum Reason {
        Cheapest = "the cheapest that covers it",
        LaterFamily = "the cheapest that covers it, where the preferred family does not",
        Resident = "smaller blocks, since all run at once",
        NoMoreBlocks = "smaller blocks, since there are no more of them",
        Tail = "smaller blocks for the last rows, since all run at once",
        FewerRows = "smaller blocks, since an SM gets fewer rows",
        ShortWindow = "smaller blocks, since the window is short",
        ShortDiagonal = "smaller blocks, since a causal mask hides much",
        ShorterLongest = "smaller blocks, since the longest one decides",
        StreamK = "stream-K, since the last wave would leave SMs idle",
        Tuned = "tuned",
        TunedMode = "tuned: faster without atomics",
        FailedAvoided = "another one failed on this card",
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A chosen kernel, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChosenKernel {
    pub variant: &'static Variant,
    pub reason: Reason,
}

/// A kernel and the grid it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedKernel {
    /// The kernel, with the threads and shared memory of a block.
    pub variant: &'static Variant,
    /// Row tiles and heads, in this order or the other. The third axis is the batch, see [`super::batch_chunks`].
    pub blocks: [u32; 2],
    pub reason: Reason,
    /// Division of a stream-K grid of the forward pass, whose one axis has the tiles of all heads and batch entries; None: another grid.
    pub stream_k: Option<StreamKPlan>,
    /// Division of a stream-K grid of the backward pass, whose axes have the heads of all batch entries, and the parts of work of each.
    pub backward_stream_k: Option<BackwardStreamKPlan>,
}

impl PlannedKernel {
    /// Returns a kernel on a grid that is no stream-K grid.
    pub(super) fn new(ChosenKernel { variant, reason }: ChosenKernel, blocks: [u32; 2]) -> PlannedKernel {
        PlannedKernel { variant, blocks, reason, stream_k: None, backward_stream_k: None }
    }

    /// Returns the grid of a launch of `batches` entries: [`Self::blocks`] and the batch; stream-K grids have all entries in `blocks`.
    pub fn grid(&self, batches: i64) -> [u32; 3] {
        let [x, y] = self.blocks;
        let has_all_batches = self.stream_k.is_some() || self.backward_stream_k.is_some();
        [x, y, if has_all_batches { 1 } else { batches as u32 }]
    }
}

/// Rounds up to a multiple.
pub(super) fn rounded(rows: i64, multiple: u32) -> i64 {
    (rows as u64).next_multiple_of(u64::from(multiple)) as i64
}

/// Returns (rows, heads) of one batch entry that the grid covers: of queries or keys, as the pass defines.
pub(super) fn rows_and_heads(variant: &Variant, a: &Attention) -> (i64, i64) {
    match variant.pass.info().rows {
        RowKind::Queries => (a.seqlen_q, a.nheads),
        RowKind::ScratchQueries => (rounded(a.seqlen_q, scratch(variant).row_rounding), a.nheads),
        RowKind::Keys => (a.seqlen_k, a.nheads_k),
        RowKind::PackedQueries | RowKind::StoredTiles => unreachable!("plan::decode and plan::backward plan these grids"),
    }
}

/// Returns the blocks of the usual grid: one for each row tile of all heads and batch entries.
pub(super) fn usual_blocks(variant: &Variant, a: &Attention) -> u64 {
    let (rows, heads) = rows_and_heads(variant, a);
    (rows as u64).div_ceil(u64::from(variant.block_rows)) * (heads / i64::from(variant.heads) * a.batch) as u64
}

/// Plans a kernel on its usual grid, for all rows that the pass defines.
pub(super) fn planned(kernel: ChosenKernel, a: &Attention) -> PlannedKernel {
    let (rows, heads) = rows_and_heads(kernel.variant, a);
    of_rows(kernel, rows, heads, a)
}

/// As [`on_grid`], but with row tiles as the second axis where the long ones should start first.
pub(super) fn of_rows(kernel: ChosenKernel, rows: i64, heads: i64, a: &Attention) -> PlannedKernel {
    let mut planned = on_grid(kernel, rows, heads);
    // Blocks start in the order of the grid, the first axis fastest. If a long block starts late, the other SMs idle until it ends. Under a
    // causal mask, blocks of late queries are long, and so are blocks of early keys (backward). A block mask's lists say which row tiles
    // are long. Kernels start with their long row tiles. With row tiles as the second axis, the long blocks of all heads start first. The
    // GPU then reads K and V of all heads at once, which costs 5% if they exceed an H200's L2.
    let fits = planned.blocks.iter().all(|&n| i64::from(n) <= MAX_GRID_YZ);
    let is_uneven = a.window.right.is_some() || a.features.block_mask;
    // either_order: passes whose kernels accept both orders of the axes; heads: query heads of a block
    let may_reverse = kernel.variant.family.either_order.contains(&kernel.variant.pass) && kernel.variant.heads == 1;
    if may_reverse && is_uneven && fits {
        planned.blocks.reverse();
    }
    planned
}

/// Plans a kernel with one block per row tile and head, row tiles first.
pub(super) fn on_grid(kernel: ChosenKernel, rows: i64, heads: i64) -> PlannedKernel {
    PlannedKernel::new(kernel, [(rows as u64).div_ceil(kernel.variant.block_rows as u64) as u32, heads as u32 / kernel.variant.heads])
}

/// Returns the layout of row statistics that the backward kernels of a kernel's family keep in scratch memory.
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
