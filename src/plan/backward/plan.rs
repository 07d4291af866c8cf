//! The plan of a backward pass.

use super::tiles::StoredPlan;
use crate::kernels::{Scratch, Variant};
use crate::limits::MAX_GRID_YZ;
use crate::plan::kernel::PlannedKernel;
use crate::plan::kernel::{chunks, rounded, scratch};
use crate::problem::Attention;

/// The kernels of a backward pass, launched in this order, and the scratch memory that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlan {
    /// Computes row statistics from out, dout and softmax_lse, and zeroes dq's accumulators. None: `main` computes everything.
    pub prepare: Option<PlannedKernel>,
    /// Computes dk and dv, and adds to dq's accumulators if there are any, in `main_launches` launches of this grid. With `stored`:
    /// computes P and dS.
    pub main: PlannedKernel,
    /// Computes dq, from its accumulators if there are any; with `stored`, all gradients. None: `main` computes everything.
    pub finish: Option<PlannedKernel>,
    /// Whether each sum has a fixed order, by request, by tuning, or because the chosen kernels have no atomics.
    pub deterministic: bool,
    /// Launches of `main`, each for the next key blocks of every head.
    pub main_launches: u32,
    /// Launch for the last keys of every head, if large blocks would need another wave for them.
    pub tail: Option<Tail>,
    /// Accumulators of dq. 0: `finish` computes dq without one, or `main` computes everything.
    pub dq_accum_splits: u32,
    /// Layout of the row statistics.
    pub scratch: Scratch,
    /// Rows of an entry in dq's accumulators and in the row statistics; rows of all entries if packed.
    pub scratch_rows: i64,
    /// Columns of dq's accumulators; 0 without accumulators.
    pub headdim_rounded: i64,
    /// Memory between `main` and `finish` for large headdims, where each launch of `main` precedes one of `finish`.
    pub stored: Option<StoredPlan>,
}

impl BackwardPlan {
    /// Returns (first batch entry, number of entries) of each part of the batch.
    pub fn batch_chunks(&self, batch: i64) -> impl Iterator<Item = (i64, i64)> {
        chunks(batch, self.stored.map_or(MAX_GRID_YZ, |s| s.batches))
    }

    /// Returns the most batch entries of a launch.
    pub fn launch_entries(&self, batch: i64) -> i64 {
        self.batch_chunks(batch).map(|(_, n)| n).max().unwrap_or(0)
    }

    /// Returns the number of launches of `main` for all batch entries.
    pub fn all_main_launches(&self, batch: i64) -> i64 {
        self.batch_chunks(batch).count() as i64 * i64::from(self.main_launches)
    }

    /// Returns all kernels in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = PlannedKernel> {
        [self.prepare, Some(self.main), self.tail.map(|tail| tail.kernel), self.finish].into_iter().flatten()
    }
}

/// A last launch of the main kernel with smaller blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Kernel on a grid of the remaining key blocks.
    pub kernel: PlannedKernel,
    /// Number of its first key block, in units of its own block size.
    pub first_block: u32,
}

/// Returns the query rows of an entry in the scratch memory, or of all entries.
pub(super) fn scratch_rows(v: &Variant, a: &Attention) -> i64 {
    let multiple = scratch(v).row_rounding;
    // A packed sequence begins at (its first row + its number * row_rounding), rounded down (csrc/backward/scratch.cuh): that leaves each
    // of them room for its own rounding.
    a.total_q().map_or(rounded(a.seqlen_q, multiple), |total| rounded(total + a.batch * i64::from(multiple), multiple))
}
