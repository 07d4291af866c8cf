//! Launches of stream-K grids, in which several blocks share the steps of a tile, each computing a split: allocates scratch memory, and
//! fills parameter blocks with the schedule of splits. device.rs and kvcache/kernels.rs use it; src/plan/ divides the tiles.
//!
//! A tile is the query rows of one block (backward: its keys). A split stores its fp32 result in scratch memory and counts itself in the
//! tile's semaphore; the last block to arrive combines the splits.

use super::blocks::at; // address of an element of an fp32 tensor
use super::launches::launch_id; // 48 bits that no other launch has, so that semaphores need no clearing
use crate::error::Result;
use crate::kernels::Pass;
use crate::launch::Launcher;
use crate::limits::{MAX_BACKWARD_SPLITS, MAX_STREAM_K_SPLITS, PAGED_PARTS};
use crate::params::{BwdParams, BwdSplits, BwdStreamKParams, FwdParams, FwdStreamKParams, StreamKParams, StreamKSplit};
use crate::plan::{BackwardStreamKPlan, BackwardStreamKSchedule, PlannedKernel, StreamKPlan, StreamKSchedule};
use crate::tensor;
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::thread::LocalKey;
use tch::{Kind, Tensor};

/// The last plan of a thread and its schedule, kept because all layers of a model use the same.
type Kept<Plan, Schedule> = RefCell<Option<(Plan, Rc<Schedule>)>>;

/// Returns the schedule of a plan, which `make` computes unless the thread's last plan is the same.
fn schedule<Plan: Copy + PartialEq, Schedule>(
    last: &'static LocalKey<Kept<Plan, Schedule>>,
    plan: Plan,
    make: impl FnOnce(&Plan) -> Schedule,
) -> Rc<Schedule> {
    last.with_borrow_mut(|last| match last {
        Some((same, schedule)) if *same == plan => schedule.clone(),
        _ => last.insert((plan, Rc::new(make(&plan)))).1.clone(),
    })
}

/// Memory for the results of splits, and after them for a semaphore of each tile that is split.
struct Scratch {
    tensor: Tensor,
    /// Floats of the results.
    partials: i64,
}

impl Scratch {
    fn new(tiles: i64, floats_of_tile: i64, launcher: &dyn Launcher) -> Result<Scratch> {
        let partials = tiles * floats_of_tile;
        // a semaphore takes two floats
        Ok(Scratch { tensor: tensor::empty(&[partials + 2 * tiles], Kind::Float, launcher)?, partials })
    }

    fn partials(&self) -> *mut f32 {
        at(&self.tensor, 0)
    }

    fn semaphores(&self) -> *mut u64 {
        at(&self.tensor, self.partials).cast()
    }

    /// Prepares a simulator that runs some blocks only, to time them: the last split of each tile finds all other arrivals counted, and the
    /// others never find themselves the last. So as many timed blocks combine splits as in a full run. `semaphores_of`: indices, by tile.
    fn fake_arrivals(&self, splits: &mut [StreamKSplit], launch_id: u64, semaphores_of: impl Fn(usize) -> Vec<usize>) {
        let mut has_last = HashSet::new();
        for split in splits.iter_mut().rev().filter(|split| split.splits() > 1) {
            if has_last.insert(split.tile) {
                for number in semaphores_of(split.tile.into()) {
                    // the launch's id, then 16 bits (kSemaphoreCountBits in csrc/semaphore.cuh) of the count
                    // SAFETY: a simulator's memory is the host's, and each tile that is split has its semaphores.
                    unsafe { self.semaphores().add(number).write(launch_id << 16 | (u64::from(split.splits()) - 1)) };
                }
            } else {
                split.part |= 0xff; // its low byte: claims 255 splits, more than arrive, so this block is never the last
            }
        }
    }
}

/// Scratch memory and schedule of a stream-K launch.
pub struct Launch {
    schedule: Rc<StreamKSchedule>,
    plan: StreamKPlan,
    scratch: Scratch,
    /// True: kernels over a KV cache, whose lengths the host does not know, so splits begin and end at parts of a tile's iterations.
    is_paged: bool,
}

impl Launch {
    /// Allocates memory for a forward kernel on the grid that `plan` divides.
    pub fn new(kernel: &PlannedKernel, plan: StreamKPlan, launcher: &dyn Launcher) -> Result<Launch> {
        thread_local!(static LAST: Kept<StreamKPlan, StreamKSchedule> = const { RefCell::new(None) });
        let schedule = schedule(&LAST, plan, StreamKPlan::schedule);
        // per row, in floats: its output, and 8 for each 128 columns, because each lane that has a part of the row stores row_max and sum
        // (`store_partial` in csrc/volta/forward/layout.cuh)
        let columns = i64::from(kernel.variant.headdim_v);
        let floats = i64::from(kernel.variant.block_rows) * (columns + 8 * (columns as u64).div_ceil(128) as i64);
        let scratch = Scratch::new(i64::from(plan.stream_k_tiles), i64::from(schedule.max_splits) * floats, launcher)?;
        Ok(Launch { schedule, plan, scratch, is_paged: kernel.variant.pass == Pass::PrefillStreamK })
    }

    pub fn scratch(&self) -> &Tensor {
        &self.scratch.tensor
    }

    /// Returns the parameters of a launch: those of any forward kernel, and the schedule.
    pub fn params(&self, forward: FwdParams, launcher: &dyn Launcher) -> Result<FwdStreamKParams> {
        let mut splits = [StreamKSplit::default(); MAX_STREAM_K_SPLITS];
        splits[..self.schedule.splits.len()].copy_from_slice(&self.schedule.splits);
        if self.is_paged {
            let parts = |iteration: u16| (u32::from(iteration) * PAGED_PARTS / self.plan.iterations) as u16;
            splits.iter_mut().for_each(|split| (split.first, split.end) = (parts(split.first), parts(split.end)));
        }
        let launch_id = launch_id();
        if !launcher.runs_all_blocks() {
            self.scratch.fake_arrivals(&mut splits, launch_id, |tile| vec![tile]);
        }
        let stream_k = StreamKParams {
            partials: self.scratch.partials(),
            semaphores: self.scratch.semaphores(),
            launch_id,
            data_parallel_tiles: self.plan.data_parallel_tiles as i32,
            max_splits: self.schedule.max_splits as i32,
            splits,
        };
        Ok(FwdStreamKParams { forward, stream_k })
    }
}

/// Scratch memory and schedule of a stream-K launch of the backward pass. Only tiles (key blocks) from `first_tile` on are split. All heads
/// have the same schedule, and scratch memory for these tiles.
pub struct BackwardLaunch {
    schedule: Rc<BackwardStreamKSchedule>,
    /// KV heads of all batch entries.
    heads: usize,
    scratch: Scratch,
}

impl BackwardLaunch {
    pub fn new(kernel: &PlannedKernel, plan: BackwardStreamKPlan, launcher: &dyn Launcher) -> Result<BackwardLaunch> {
        thread_local!(static LAST: Kept<BackwardStreamKPlan, BackwardStreamKSchedule> = const { RefCell::new(None) });
        let schedule = schedule(&LAST, plan, BackwardStreamKPlan::schedule);
        let v = kernel.variant;
        let floats = i64::from(v.block_rows * (v.headdim + v.headdim_v)); // dk and dv of a key block
        let tiles = i64::from(plan.heads) * i64::from(schedule.tiles);
        let scratch = Scratch::new(tiles, i64::from(schedule.max_splits) * floats, launcher)?;
        Ok(BackwardLaunch { schedule, heads: plan.heads as usize, scratch })
    }

    pub fn scratch(&self) -> &Tensor {
        &self.scratch.tensor
    }

    pub fn params(&self, backward: BwdParams, launcher: &dyn Launcher) -> BwdStreamKParams {
        let schedule = &self.schedule;
        let mut splits = [StreamKSplit::default(); MAX_BACKWARD_SPLITS];
        splits[..schedule.splits.len()].copy_from_slice(&schedule.splits);
        let launch_id = launch_id();
        if !launcher.runs_all_blocks() {
            let (first, tiles) = (schedule.first_tile as usize, schedule.tiles as usize);
            let of_each_head = |tile: usize| (0..self.heads).map(|head| head * tiles + tile - first).collect();
            self.scratch.fake_arrivals(&mut splits, launch_id, of_each_head);
        }
        let stream_k = BwdSplits {
            partials: self.scratch.partials(),
            semaphores: self.scratch.semaphores(),
            launch_id,
            first_tile: schedule.first_tile as i32,
            tiles: schedule.tiles as i32,
            max_splits: schedule.max_splits as i32,
            splits,
        };
        BwdStreamKParams { backward, stream_k }
    }
}
