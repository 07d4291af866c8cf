//! Launches of stream-K grids: their scratch memory and the schedule of their splits.

use super::blocks::at;
use super::launches::launch_id;
use crate::error::Result;
use crate::kernels::Pass;
use crate::launch::Launcher;
use crate::limits::{MAX_BACKWARD_SPLITS, MAX_STREAM_K_SPLITS, PAGED_PARTS};
use crate::params::{BwdParams, BwdSplits, BwdStreamKParams, FwdParams, FwdStreamKParams, StreamKParams, StreamKSplit};
use crate::plan::{BackwardStreamKPlan, BackwardStreamKSchedule, PlannedKernel, StreamKPlan, StreamKSchedule};
use crate::tensor;
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// Scratch memory and schedule of a stream-K launch.
pub struct Launch {
    schedule: Rc<StreamKSchedule>,
    plan: StreamKPlan,
    /// Results of splits, then a semaphore per stream-K tile.
    scratch: Tensor,
    /// Floats of the results.
    partials: i64,
    /// Splits count in parts of a tile's iterations.
    is_paged: bool,
}

/// Returns the schedule of a plan. A thread keeps the last one, because all layers of a model use the same.
fn schedule(plan: StreamKPlan) -> Rc<StreamKSchedule> {
    thread_local!(static LAST: RefCell<Option<(StreamKPlan, Rc<StreamKSchedule>)>> = const { RefCell::new(None) });
    LAST.with_borrow_mut(|last| match last {
        Some((same, schedule)) if *same == plan => schedule.clone(),
        _ => last.insert((plan, Rc::new(plan.schedule()))).1.clone(),
    })
}

impl Launch {
    pub fn new(kernel: &PlannedKernel, plan: StreamKPlan, launcher: &dyn Launcher) -> Result<Launch> {
        let schedule = schedule(plan);
        // per row: its output in fp32, and of each 128 columns row maxima and sums of 8 lanes (`store_partial` in layout.cuh)
        let columns = i64::from(kernel.variant.headdim_v);
        let floats = i64::from(kernel.variant.block_rows) * (columns + 8 * (columns as u64).div_ceil(128) as i64);
        let partials = i64::from(plan.stream_k_tiles) * i64::from(schedule.max_splits) * floats;
        let scratch = tensor::empty(&[partials + 2 * i64::from(plan.stream_k_tiles)], Kind::Float, launcher)?;
        Ok(Launch { schedule, plan, scratch, partials, is_paged: kernel.variant.pass == Pass::PrefillStreamK })
    }

    /// Returns the scratch memory.
    pub fn scratch(&self) -> &Tensor {
        &self.scratch
    }

    /// Returns the parameter block.
    pub fn params(&self, forward: FwdParams, launcher: &dyn Launcher) -> Result<FwdStreamKParams> {
        let mut splits = [StreamKSplit::default(); MAX_STREAM_K_SPLITS];
        splits[..self.schedule.splits.len()].copy_from_slice(&self.schedule.splits);
        if self.is_paged {
            let parts = |iteration: u16| (u32::from(iteration) * PAGED_PARTS / self.plan.iterations) as u16;
            splits.iter_mut().for_each(|split| (split.first, split.end) = (parts(split.first), parts(split.end)));
        }
        let semaphores: *mut u64 = at(&self.scratch, self.partials).cast();
        let launch_id = launch_id();
        if !launcher.runs_all_blocks() {
            self.fake_arrivals(&mut splits[..self.schedule.splits.len()], semaphores, launch_id);
        }
        let stream_k = StreamKParams {
            partials: at(&self.scratch, 0),
            semaphores,
            launch_id,
            data_parallel_tiles: self.plan.data_parallel_tiles as i32,
            max_splits: self.schedule.max_splits as i32,
            splits,
        };
        Ok(FwdStreamKParams { forward, stream_k })
    }

    /// Prepares a run of a part of the grid: the last split of each tile finds every arrival counted, and the others do not. So a timed run
    /// has as many combinations as a full one.
    fn fake_arrivals(&self, splits: &mut [StreamKSplit], semaphores: *mut u64, launch_id: u64) {
        let mut has_last = vec![false; self.plan.stream_k_tiles as usize];
        for split in splits.iter_mut().rev() {
            let (tile, all) = (usize::from(split.tile), split.splits());
            if !std::mem::replace(&mut has_last[tile], true) {
                // SAFETY: a simulator's memory is the host's, and each stream-K tile has a semaphore.
                unsafe { semaphores.add(tile).write(launch_id << 16 | (u64::from(all) - 1)) };
            } else {
                split.part |= 0xff;
            }
        }
    }
}

/// Scratch memory and schedule of a stream-K launch of the backward pass.
pub struct BackwardLaunch {
    schedule: BackwardStreamKSchedule,
    heads: i64,
    /// Gradients of splits, then a semaphore per split key block.
    scratch: Tensor,
    /// Floats of the gradients.
    partials: i64,
}

impl BackwardLaunch {
    pub fn new(kernel: &PlannedKernel, plan: BackwardStreamKPlan, launcher: &dyn Launcher) -> Result<BackwardLaunch> {
        let (schedule, heads) = (plan.schedule(), i64::from(plan.heads));
        let v = kernel.variant;
        let floats = i64::from(v.block_rows * (v.headdim + v.headdim_v));
        let tiles = heads * i64::from(schedule.tiles);
        let partials = tiles * i64::from(schedule.max_splits) * floats;
        let scratch = tensor::empty(&[partials + 2 * tiles], Kind::Float, launcher)?;
        Ok(BackwardLaunch { schedule, heads, scratch, partials })
    }

    /// Returns the scratch memory.
    pub fn scratch(&self) -> &Tensor {
        &self.scratch
    }

    /// Returns the parameter block.
    pub fn params(&self, backward: BwdParams, launcher: &dyn Launcher) -> BwdStreamKParams {
        let mut splits = [StreamKSplit::default(); MAX_BACKWARD_SPLITS];
        splits[..self.schedule.splits.len()].copy_from_slice(&self.schedule.splits);
        let semaphores: *mut u64 = at(&self.scratch, self.partials).cast();
        let launch_id = launch_id();
        if !launcher.runs_all_blocks() {
            self.fake_arrivals(&mut splits[..self.schedule.splits.len()], semaphores, launch_id);
        }
        let stream_k = BwdSplits {
            partials: at(&self.scratch, 0),
            semaphores,
            launch_id,
            first_tile: self.schedule.first_tile as i32,
            tiles: self.schedule.tiles as i32,
            max_splits: self.schedule.max_splits as i32,
            splits,
        };
        BwdStreamKParams { backward, stream_k }
    }

    /// As [`Launch::fake_arrivals`]: each head is divided alike.
    fn fake_arrivals(&self, splits: &mut [StreamKSplit], semaphores: *mut u64, launch_id: u64) {
        let mut has_last = vec![false; self.schedule.tiles as usize];
        for split in splits.iter_mut().rev().filter(|split| split.splits() > 1) {
            let (tile, all) = (usize::from(split.tile) - self.schedule.first_tile as usize, split.splits());
            if !std::mem::replace(&mut has_last[tile], true) {
                for head in 0..self.heads as usize {
                    // SAFETY: a simulator's memory is the host's, and each split key block has a semaphore.
                    unsafe { semaphores.add(head * has_last.len() + tile).write(launch_id << 16 | (u64::from(all) - 1)) };
                }
            } else {
                split.part |= 0xff;
            }
        }
    }
}
