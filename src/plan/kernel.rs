//! A planned kernel: which variant runs, on which grid, and why.

use super::backward::BackwardStreamKPlan;
use super::stream_k::StreamKPlan;
use crate::kernels::Variant;
use std::fmt;

/// Why a plan has a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is the cheapest applicable kernel.
    Cheapest,
    /// It is the cheapest of its family; preferred families have no applicable kernel.
    LaterFamily,
    /// Its blocks are smaller than those of the cheapest, and all are resident at once.
    Resident,
    /// Its blocks are smaller than those of the cheapest, and as few.
    NoMoreBlocks,
    /// Its blocks are smaller than those of the launch before, and all blocks of the last rows are resident at once.
    Tail,
    /// Its blocks are smaller than those of the cheapest, and SMs compute sufficiently fewer rows.
    FewerRows,
    /// The blocks of the cheapest are resident at once, so the longest one decides; these are smaller, with more warps per row.
    ShorterLongest,
    /// A stream-K grid divides the keys of the last, partial wave evenly.
    StreamK,
    /// The GPU's tuning chooses it.
    Tuned,
    /// The GPU's tuning chooses the backward pass without atomics, and this is the cheapest kernel for it.
    TunedMode,
    /// Another kernel would be chosen, but it failed on this GPU.
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
            Reason::StreamK => "stream-K, since the last wave would leave SMs idle",
            Reason::Tuned => "tuned",
            Reason::TunedMode => "tuned: faster without atomics",
            Reason::FailedAvoided => "another one failed on this card",
        })
    }
}

/// A kernel and the grid it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedKernel {
    /// The kernel, with the threads and shared memory of a block.
    pub variant: &'static Variant,
    /// Row tiles and heads, in this order or the other. The third axis is the batch, see [`super::batch_chunks`].
    pub blocks: [u32; 2],
    /// Why it was chosen.
    pub reason: Reason,
    /// Division of a stream-K grid, whose one axis has the tiles of all heads and batch entries.
    pub stream_k: Option<StreamKPlan>,
    /// Division of a stream-K grid of the backward pass, whose axes have the heads of all batch entries, and the splits of each.
    pub backward_stream_k: Option<BackwardStreamKPlan>,
}

impl PlannedKernel {
    /// Returns the grid of a launch for this many batch entries.
    pub fn grid(&self, batches: i64) -> [u32; 3] {
        let [x, y] = self.blocks;
        let has_all_batches = self.stream_k.is_some() || self.backward_stream_k.is_some();
        [x, y, if has_all_batches { 1 } else { batches as u32 }]
    }
}
