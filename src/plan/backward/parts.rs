//! Plans the backward pass in several kernels: preprocess (row statistics), main (dk, dv, and dq by atomics), and postprocess (dq's
//! accumulator to fp16) or dq (dq in a kernel of its own). mod.rs calls it for most problems.
//!
//! - key block: the keys of one block of a main kernel; wave: as many blocks as the GPU holds at once; tail: a launch of smaller ones;
//! - tuning: choices of kernels that were measured on the GPU; family: the kernels for one kind of tensor core.

use super::plan::{BackwardPlan, Tail};
use super::stream_k::BackwardStreamKPlan;
use crate::error::Result;
use crate::kernels::{self, FeatureSet, Kernels, Pass, Variant}; // kernels::BACKWARD: the passes with atomics; DETERMINISTIC_...: with dq's
use crate::limits::MAX_GRID_YZ; // 65535
use crate::plan::choose::{choose, of_all_sizes, sized, Chosen}; // choose: tuned or cheapest kernels; sized: smaller blocks where faster
use crate::plan::device::{cached_plan, DeviceLimits, PlanCache}; // cached_plan: the thread's last plan, if key, device and tuning match
use crate::plan::features::{features, BackwardMode};
// planned: a kernel on its usual grid, a block for each row tile and head; of_rows: for this many rows; usual_blocks: the grid's blocks
use crate::plan::kernel::{of_rows, planned, rows_and_heads, usual_blocks, ChosenKernel, PlannedKernel, Reason};
use crate::plan::stream_k::pays; // true if the first time is at least 4% less than the second
use crate::problem::{Attention, Keys, Queries, Window};
use crate::tuning::Shape;
use std::cell::Cell;

/// How a pass computes dq.
enum Dq {
    /// All key blocks add to one accumulator, in any order.
    Atomics,
    /// Launches of this many key blocks per head, in order. Each block of a launch adds to its own accumulator: sums have a fixed order.
    Launches(u32),
    /// A separate kernel computes dq, in a fixed order.
    Separate,
}

/// Division of a head's keys into blocks of the main kernel.
#[derive(Clone, Copy)]
struct KeyBlocks {
    /// Number of blocks of the main kernel's size.
    large: u64,
    /// Variant and number of the smaller blocks after them, which are a launch of their own ([`Tail`]).
    tail: Option<(&'static Variant, u64)>,
}

/// The kernels of a pass, how they compute dq, and the main kernel's blocks.
struct Parts {
    dq: Dq,
    /// Preprocess, main, and postprocess or dq.
    chosen: Chosen<3>,
    blocks: KeyBlocks, // of the main kernel
    /// The main kernel on a stream-K grid, instead of `blocks`.
    stream_k: Option<PlannedKernel>,
}

/// Plans a backward pass of three kernels or more. A tuning that forbids atomics comes first, then the mode.
pub(super) fn in_parts(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let planner = Planner { kernels, a, d, shape: Shape::of(a), requested: features(a, mode) };
    let tuned_mode = d.tuning.filter(|t| t.without_atomics(&planner.shape, planner.requested)).and_then(|_| planner.without_atomics().ok());
    let parts = match (tuned_mode, mode.deterministic) {
        (Some(chosen), _) => planner.separate(because(chosen, Reason::TunedMode)),
        (None, true) => planner.deterministic()?,
        (None, false) => planner.fastest()?,
    };
    Ok(planner.on_grids(parts))
}

/// Returns the kernels with another reason, unless the tuning chose them.
fn because(chosen: Chosen<3>, why: Reason) -> Chosen<3> {
    chosen.map(|kernel| ChosenKernel { reason: if kernel.reason == Reason::Tuned { Reason::Tuned } else { why }, ..kernel })
}

/// What a plan depends on, and the methods that choose kernels for it and divide their work.
struct Planner<'a> {
    kernels: Kernels, // to choose from
    a: &'a Attention,
    d: &'a DeviceLimits,
    shape: Shape, // of `a`, as tunings and tables compare it
    /// Features of problem and mode.
    requested: FeatureSet,
}

impl Planner<'_> {
    /// Returns kernels with atomics: the third converts dq's accumulator.
    fn with_atomics(&self) -> Result<Chosen<3>> {
        choose(self.kernels, kernels::BACKWARD, &self.shape, self.requested, self.d)
    }

    /// Returns kernels with atomics. If the tuning chooses a stream-K kernel as main kernel, they are of its family, because they run
    /// before and after it. A main kernel that the tuning chooses comes first.
    fn around_stream_k(&self) -> Result<Chosen<3>> {
        let usual = self.with_atomics();
        if usual.as_ref().is_ok_and(|[_, main, _]| main.reason == Reason::Tuned) {
            return usual;
        }
        let tuned = self.d.tuning.and_then(|_| self.stream_k_kernel()).filter(|kernel| kernel.reason == Reason::Tuned);
        let family = tuned.and_then(|kernel| self.kernels.families().find(|family| family.name == kernel.variant.family.name));
        let Some(family) = family else { return usual };
        let of_family = DeviceLimits { only: Some(family), ..*self.d };
        choose(self.kernels, kernels::BACKWARD, &self.shape, self.requested, &of_family)
    }

    /// Returns the kernel for stream-K grids of this problem, if it can have one.
    fn stream_k_kernel(&self) -> Option<ChosenKernel> {
        if (self.a.queries, self.a.keys) != (Queries::Dense, Keys::Dense) || self.a.batch > MAX_GRID_YZ {
            return None;
        }
        choose(self.kernels, [Pass::BackwardStreamK], &self.shape, self.requested, self.d).ok().map(|[kernel]| kernel)
    }

    /// Returns kernels without atomics: the third computes dq.
    fn without_atomics(&self) -> Result<Chosen<3>> {
        choose(self.kernels, kernels::DETERMINISTIC_BACKWARD, &self.shape, self.requested, self.d)
    }

    /// Returns the kernels with smaller blocks where these are faster.
    fn sized(&self, chosen: Chosen<3>) -> Chosen<3> {
        chosen.map(|large| {
            let sized = sized(self.kernels, large, self.a, self.d);
            // the reason for this set of kernels says more than the reason for small blocks
            let is_kept = matches!(large.reason, Reason::TunedMode | Reason::FailedAvoided);
            ChosenKernel { reason: if is_kept { large.reason } else { sized.reason }, ..sized }
        })
    }

    /// Divides the main kernel's keys into blocks. `with_tail`: the last ones may be smaller.
    fn split(&self, ChosenKernel { variant: main, reason }: ChosenKernel, with_tail: bool) -> KeyBlocks {
        let (rows, _) = rows_and_heads(main, self.a);
        let found = if with_tail && reason != Reason::Tuned { blocks_before_tail(self.kernels, main, self.a, self.d) } else { None };
        match found {
            Some((large, v)) => {
                let rest = rows as u64 - large * u64::from(main.block_rows);
                KeyBlocks { large, tail: Some((v, rest.div_ceil(v.block_rows.into()))) }
            }
            None => KeyBlocks { large: (rows as u64).div_ceil(main.block_rows.into()), tail: None },
        }
    }

    /// Plans a pass whose third kernel computes dq.
    fn separate(&self, chosen: Chosen<3>) -> Parts {
        let chosen = self.sized(chosen);
        let with_tail = false;
        Parts { dq: Dq::Separate, chosen, blocks: self.split(chosen[1], with_tail), stream_k: None }
    }

    /// Plans launches of a main kernel that takes a part of the key blocks, with their time (see [`blocks_of_launch`]). None: there is no
    /// such kernel; kernels of block masks take all key blocks in one launch.
    fn by_launches(&self) -> Option<(f64, Parts)> {
        if self.a.features.block_mask {
            return None;
        }
        // has_key_block_offset: main kernels of the family can begin at any key block
        let chosen = self.with_atomics().ok().filter(|[_, main, _]| main.variant.family.has_key_block_offset)?;
        let chosen @ [_, main, _] = self.sized(chosen);
        [true, false].into_iter().find_map(|with_tail| {
            let blocks = self.split(main, with_tail);
            let (time, of_launch) = blocks_of_launch(main.variant, blocks, self.a, self.d)?;
            Some((time, Parts { dq: Dq::Launches(of_launch), chosen, blocks, stream_k: None }))
        })
    }

    /// Plans a stream-K grid, in which several blocks share a key block, instead of `usual`, if it is faster or tuned.
    fn stream_k(&self, ChosenKernel { variant: usual, reason }: ChosenKernel, blocks: KeyBlocks) -> Option<PlannedKernel> {
        let (a, d) = (self.a, self.d);
        if matches!(reason, Reason::Tuned | Reason::FailedAvoided) {
            return None;
        }
        let ChosenKernel { variant, reason } = self.stream_k_kernel()?;
        let headdims = |v: &Variant| (v.headdim, v.headdim_v);
        let is_tuned = reason == Reason::Tuned;
        // the other kernels of the pass have the family's layout of scratch memory, and the usual kernel's columns
        if variant.family.name != usual.family.name || headdims(variant) != headdims(usual) {
            return None;
        }
        let shape = ([a.batch, a.seqlen_q, a.seqlen_k, a.nheads, a.nheads_k], [a.window.left, a.window.right]);
        type Key = ([&'static str; 2], ([i64; 5], [Option<i64>; 2]), (u64, bool));
        thread_local!(static LAST: PlanCache<Key, Option<(BackwardStreamKPlan, bool)>> = const { Cell::new(None) });
        let (plan, pays) = cached_plan(&LAST, ([variant.name, usual.name], shape, (blocks.large, blocks.tail.is_some())), d, || {
            let found = BackwardStreamKPlan::of(a, variant, d);
            Ok(found.map(|(plan, time)| (plan, self.stream_k_pays(&plan, time, variant, usual, blocks))))
        })
        .ok()??;
        if !is_tuned && !pays {
            return None;
        }
        let reason = if is_tuned { reason } else { Reason::StreamK };
        let planned = PlannedKernel::new(ChosenKernel { variant, reason }, [plan.heads, plan.blocks_of_head()]);
        Some(PlannedKernel { backward_stream_k: Some(plan), ..planned })
    }

    /// Returns whether a stream-K grid of `variant`, which takes `time`, is faster than these blocks of the usual kernel.
    fn stream_k_pays(&self, plan: &BackwardStreamKPlan, time: u64, variant: &Variant, usual: &Variant, blocks: KeyBlocks) -> bool {
        let Some(undivided) = BackwardStreamKPlan::undivided_time(self.a, usual, self.d) else { return false };
        let undivided = match blocks.tail {
            // waves of equal blocks, and a shorter one
            Some(_) => {
                let waves = |blocks: u64| (blocks * u64::from(plan.heads)).div_ceil(self.d.resident_blocks(variant)) as f64;
                let (before, all) = (waves(blocks.large), waves(plan.key_blocks.into()));
                (undivided as f64 * (before + TAIL_TIME) / all) as u64
            }
            None => undivided,
        };
        pays(time, undivided)
    }

    /// Takes the faster of launches of a main kernel and a separate kernel for dq, unless the tuning chooses the latter.
    fn deterministic(&self) -> Result<Parts> {
        let without_atomics = self.without_atomics();
        // both plans have a preprocess kernel, so that choice favors neither
        let is_forced = |kernel: &ChosenKernel| kernel.variant.pass != Pass::BackwardPreprocess && kernel.reason == Reason::Tuned;
        let forced = without_atomics.as_ref().is_ok_and(|chosen| chosen.iter().any(is_forced));
        let launches = if forced { None } else { self.by_launches() };
        match launches {
            Some((time, parts)) if without_atomics.is_err() || time < separate_time(parts.chosen[1].variant, self.a, self.d) => Ok(parts),
            _ => Ok(self.separate(without_atomics?)),
        }
    }

    /// Takes kernels with atomics, on a stream-K grid if that pays. If block masks or failed kernels leave none, takes a dq kernel.
    fn fastest(&self) -> Result<Parts> {
        match self.around_stream_k() {
            Ok(chosen) => {
                let chosen @ [_, main, _] = self.sized(chosen);
                let blocks = self.split(main, main.variant.family.has_key_block_offset);
                Ok(Parts { dq: Dq::Atomics, chosen, blocks, stream_k: self.stream_k(main, blocks) })
            }
            // no kernel with atomics has a block mask and other features
            Err(e) if self.a.features.block_mask => Ok(self.separate(self.without_atomics().map_err(|_| e)?)),
            Err(e) if self.d.tuning.is_some_and(|t| !t.failed().is_empty()) => {
                Ok(self.separate(because(self.without_atomics().map_err(|_| e)?, Reason::FailedAvoided)))
            }
            Err(e) => Err(e),
        }
    }

    /// Turns kernels and key blocks into launches.
    fn on_grids(&self, Parts { dq, chosen, blocks: KeyBlocks { large: blocks, tail }, stream_k }: Parts) -> BackwardPlan {
        let [preprocess, main, postprocess] = chosen;
        let [preprocess, postprocess] = [preprocess, postprocess].map(|kernel| Some(planned(kernel, self.a)));
        // key blocks of a head in a launch; accumulators of dq
        let (of_launch, dq_accum_splits) = match dq {
            Dq::Atomics => (blocks as u32, 1),
            Dq::Launches(blocks) => (blocks, blocks),
            Dq::Separate => (blocks as u32, 0),
        };
        let Variant { block_rows, headdim, .. } = *main.variant;
        let tail = tail.filter(|_| stream_k.is_none()).map(|(v, n)| Tail {
            kernel: self.of_blocks(ChosenKernel { variant: v, reason: Reason::Tail }, n as u32),
            first_block: (blocks * u64::from(block_rows / v.block_rows)) as u32,
        });
        BackwardPlan {
            preprocess,
            postprocess,
            deterministic: !matches!(dq, Dq::Atomics),
            main_launches: (blocks as u32).div_ceil(of_launch),
            tail,
            dq_accum_splits,
            headdim_rounded: if dq_accum_splits == 0 { 0 } else { i64::from(headdim) },
            ..BackwardPlan::new(stream_k.unwrap_or_else(|| self.of_blocks(main, of_launch)), self.a)
        }
    }

    /// Plans a main kernel on a grid of this many key blocks.
    fn of_blocks(&self, kernel: ChosenKernel, blocks: u32) -> PlannedKernel {
        let (_, heads) = rows_and_heads(kernel.variant, self.a);
        of_rows(kernel, i64::from(blocks * kernel.variant.block_rows), heads, self.a)
    }
}

// ---- estimates, by which key blocks are divided among launches: a tail of smaller blocks, and those of a deterministic main kernel ----

/// Time of a tail, a wave of small blocks, relative to a wave of large blocks. Commit 6f61a497 found 0.4 to 0.66, but does not say how;
/// this is just above.
const TAIL_TIME: f64 = 0.67;

/// Returns the key blocks of a head that fit one wave less than all blocks need, and a variant of smaller blocks for the rest.
///
/// None if there is no such variant, and under a causal mask, because its last blocks are short.
fn blocks_before_tail(kernels: Kernels, main: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(u64, &'static Variant)> {
    let (rows, heads) = rows_and_heads(main, a);
    let (heads, resident_blocks) = ((heads * a.batch) as u64, d.resident_blocks(main));
    let before = (usual_blocks(main, a).div_ceil(resident_blocks) - 1) * resident_blocks / heads;
    let left = (rows as u64).saturating_sub(before * u64::from(main.block_rows));
    let fits = |v: &Variant| v.block_rows < main.block_rows && left.div_ceil(v.block_rows.into()) * heads <= d.resident_blocks(v);
    if before == 0 || a.window.right.is_some() {
        return None;
    }
    of_all_sizes(kernels, main, d).find(|v| fits(v)).map(|v| (before, v))
}

/// Returns the least time of the launches of a deterministic main kernel, and the key blocks of a head in each of them; None if no number
/// of them fits the tail. The unit of time is that of a large block.
///
/// Each block of a launch adds to its own accumulator, and launches run in order, so the order of every sum is fixed. More accumulators
/// fill the GPU, but zeroing and adding them takes time. An accumulator is written and read once, 8 bytes per element. A block computes
/// `10 * block_rows` flops (five products) for each element of dq in its rows. On a V100 (docs/design/volta-backward.md) kernels compute
/// 76 TFLOP/s, and memory transfers 0.83 TB/s.
fn blocks_of_launch(main: &Variant, KeyBlocks { large: blocks, tail }: KeyBlocks, a: &Attention, d: &DeviceLimits) -> Option<(f64, u32)> {
    const FLOPS_PER_BYTE: f64 = 76.0 / 0.83;
    // eight accumulators in fp32 are 16 times the memory of q
    const MAX_ACCUMULATORS: u64 = 8;
    let (_, heads) = rows_and_heads(main, a);
    let (heads, resident_blocks) = ((heads * a.batch) as u64, d.resident_blocks(main));
    let block_times = |blocks: u64| (blocks * heads).div_ceil(resident_blocks) as f64;
    let block_rows = f64::from(main.block_rows);
    // queries that see a key block
    let met = match a.window {
        Window { left: Some(left), right: Some(right) } => ((left + right) as f64 + block_rows).min(a.seqlen_q as f64),
        _ => a.seqlen_q as f64,
    };
    // Time of an accumulator: 8 bytes for each element of dq, of all heads, over 10 * block_rows flops for each of the elements that a
    // wave's blocks meet. 0.8 is 8 / 10.
    let per_accumulator = 0.8 * FLOPS_PER_BYTE / block_rows * (a.seqlen_q as f64 / met) * (heads as f64 / resident_blocks as f64);
    let tail = tail.map_or(0, |(_, small_blocks)| small_blocks);
    let of_tail = if tail > 0 { TAIL_TIME } else { 0.0 };
    // `n`: accumulators, and key blocks of a head in a launch
    let cost = |n: u64| (blocks / n) as f64 * block_times(n) + block_times(blocks % n) + of_tail + n as f64 * per_accumulator;
    // a tail begins where a launch ends, and needs an accumulator for each of its blocks
    let possible = (1..=blocks.min(MAX_ACCUMULATORS)).filter(|&n| tail == 0 || (blocks % n == 0 && tail <= n));
    let best = possible.min_by(|&a, &b| cost(a).total_cmp(&cost(b)))?;
    Some((cost(best), best as u32))
}

/// Returns the time of the kernels that compute dq separately, in the same unit: seven products instead of five, because dq kernels compute
/// scores and dP again, in one launch, without accumulators.
fn separate_time(main: &Variant, a: &Attention, d: &DeviceLimits) -> f64 {
    const PRODUCTS: f64 = 7.0 / 5.0;
    PRODUCTS * usual_blocks(main, a).div_ceil(d.resident_blocks(main)) as f64
}
