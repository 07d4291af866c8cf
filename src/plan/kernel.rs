//! A planned kernel: which variant runs, on which grid, and why.

use super::stream_k::StreamKPlan;
use crate::kernels::Variant;
use std::fmt;

/// Why a plan has a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// it is the cheapest that covers the problem
    Cheapest,
    /// the same in its family; those that the device prefers do not cover the problem
    LaterFamily,
    /// it has smaller blocks than the cheapest, and all of them run at once
    Resident,
    /// it has smaller blocks than the cheapest, and no more of them
    NoMoreBlocks,
    /// it has smaller blocks than the kernel before, and all of the last rows' run at once
    Tail,
    /// it has smaller blocks than the cheapest, and an SM gets so many fewer rows by them that it pays
    FewerRows,
    /// it has smaller blocks with more warps than the cheapest, all of whose blocks would run at once, so that the longest one decides
    ShorterLongest,
    /// what full rounds of the cheapest's grid leave over is cut along the keys, so that every place has as much of it
    StreamKPlan,
    /// the card's tuning says so
    Tuned,
    /// the card's tuning says that such a backward pass is faster without atomics, and this is the cheapest there
    TunedMode,
    /// the one that there would be otherwise failed on this card
    FailedAvoided,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Cheapest => "the cheapest that covers it",
            Reason::LaterFamily => "the cheapest that covers it, where the preferred family does not",
            Reason::Resident => "smaller blocks, since all run at once",
            Reason::Tail => "smaller blocks for the last rows, since all run at once",
            Reason::NoMoreBlocks => "smaller blocks, since there are no more of them",
            Reason::FewerRows => "smaller blocks, since an SM gets fewer rows",
            Reason::ShorterLongest => "smaller blocks, since the longest one decides",
            Reason::StreamKPlan => "equal shares, since the last round would leave places idle",
            Reason::Tuned => "tuned",
            Reason::TunedMode => "tuned: faster without atomics",
            Reason::FailedAvoided => "another one failed on this card",
        })
    }
}

/// A kernel and the grid it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedKernel {
    /// what is launched: it has the threads and the shared memory of a block too
    pub variant: &'static Variant,
    /// blocks of rows and heads, in this order or the other; the third axis is the batch, see [`batch_chunks`]
    pub blocks: [u32; 2],
    /// why it is this one
    pub reason: Reason,
    /// of a grid of equal shares, which has one axis for blocks of rows, heads and batch entries: who has what
    pub shares: Option<StreamKPlan>,
}

impl PlannedKernel {
    /// The grid of a launch of so many batch entries.
    pub fn grid(&self, batches: i64) -> [u32; 3] {
        let [x, y] = self.blocks;
        [x, y, if self.shares.is_some() { 1 } else { batches as u32 }]
    }
}
