//! Plans the backward pass in several kernels: preprocess, main, and postprocess or dq.

use super::blocks::{blocks_before_tail, blocks_of_launch, separate_time, TAIL};
use super::plan::{scratch_rows, BackwardPlan, Tail};
use super::stream_k::BackwardStreamKPlan;
use crate::error::Result;
use crate::kernels::{self, FeatureSet, Kernels, Pass, Variant};
use crate::limits::MAX_GRID_YZ;
use crate::plan::cached::{cached_plan, PlanCache};
use crate::plan::choose::{choose, sized, Chosen};
use crate::plan::device::DeviceLimits;
use crate::plan::features::{features, BackwardMode};
use crate::plan::kernel::{of_rows, planned, rows_and_heads, scratch, ChosenKernel, PlannedKernel, Reason};
use crate::plan::stream_k::pays;
use crate::problem::{Attention, Keys, Queries};
use crate::tuning::Shape;
use std::cell::Cell;

/// How dq is computed.
enum Dq {
    /// All key blocks add to one accumulator.
    Atomics,
    /// In launches of this many key blocks per head, each block has its own accumulator.
    Launches(u32),
    /// A separate kernel computes dq.
    Separate,
}

/// Large blocks of a head, and the variant and number of small blocks after them, which are a launch of their own ([`Tail`]).
type KeyBlocks = (u64, Option<(&'static Variant, u64)>);

/// The kernels of a pass (preprocess, main, and postprocess or dq), how they compute dq, and the main kernel's blocks.
struct Parts {
    dq: Dq,
    chosen: Chosen<3>,
    blocks: KeyBlocks,
    /// The main kernel on a stream-K grid, instead of `blocks`.
    stream_k: Option<PlannedKernel>,
}

/// Plans separate kernels.
pub(super) fn in_parts(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let planner = Planner { kernels, a, d, shape: Shape::of(a), requested: features(a, mode) };
    let tuned_mode = d.tuning.filter(|t| t.without_atomics(&planner.shape, planner.requested)).and_then(|_| planner.without().ok());
    let parts = match (tuned_mode, mode.deterministic) {
        (Some(chosen), _) => planner.separate(because(chosen, Reason::TunedMode)),
        (None, true) => planner.deterministic()?,
        (None, false) => planner.fastest()?,
    };
    Ok(planner.on_grids(parts))
}

/// Returns the kernels with another reason, unless the tuning chose them.
fn because(chosen: Chosen<3>, why: Reason) -> Chosen<3> {
    chosen.map(|(v, reason)| (v, if reason == Reason::Tuned { reason } else { why }))
}

struct Planner<'a> {
    kernels: Kernels,
    a: &'a Attention,
    d: &'a DeviceLimits,
    shape: Shape,
    requested: FeatureSet,
}

impl Planner<'_> {
    fn with_atomics(&self) -> Result<Chosen<3>> {
        choose(self.kernels, kernels::BACKWARD, &self.shape, self.requested, self.d)
    }

    /// Returns kernels with atomics, of the family of a stream-K kernel that the tuning chooses: they run with it.
    fn around_stream_k(&self) -> Result<Chosen<3>> {
        let usual = self.with_atomics();
        if usual.as_ref().is_ok_and(|[_, (_, reason), _]| *reason == Reason::Tuned) {
            return usual;
        }
        let tuned = self.d.tuning.and_then(|_| self.stream_k_kernel()).filter(|&(_, reason)| reason == Reason::Tuned);
        let family = tuned.and_then(|(v, _)| self.kernels.families().find(|family| family.name == v.family.name));
        let Some(family) = family else { return usual };
        let of_family = DeviceLimits { only: Some(family), ..*self.d };
        choose(self.kernels, kernels::BACKWARD, &self.shape, self.requested, &of_family)
    }

    /// Returns the kernel for stream-K grids of this problem, if it can have one.
    fn stream_k_kernel(&self) -> Option<ChosenKernel> {
        if (self.a.queries, self.a.keys) != (Queries::Dense, Keys::Dense) || self.a.batch > MAX_GRID_YZ {
            return None;
        }
        choose(self.kernels, kernels::BACKWARD_STREAM_K, &self.shape, self.requested, self.d).ok().map(|[kernel]| kernel)
    }

    fn without(&self) -> Result<Chosen<3>> {
        choose(self.kernels, kernels::DETERMINISTIC_BACKWARD, &self.shape, self.requested, self.d)
    }

    /// Returns the kernels with smaller blocks where these are faster.
    fn sized(&self, chosen: Chosen<3>) -> Chosen<3> {
        chosen.map(|large| {
            let (v, why) = sized(self.kernels, large, self.a, self.d);
            // the reason for this set of kernels says more than the reason for small blocks
            (v, if matches!(large.1, Reason::TunedMode | Reason::FailedAvoided) { large.1 } else { why })
        })
    }

    /// Divides the main kernel's keys into blocks.
    fn split(&self, (main, reason): ChosenKernel, with_tail: bool) -> KeyBlocks {
        let (rows, _) = rows_and_heads(main, self.a);
        let found = if with_tail && reason != Reason::Tuned { blocks_before_tail(self.kernels, main, self.a, self.d) } else { None };
        match found {
            Some((before, v)) => {
                let rest = rows as u64 - before * u64::from(main.block_rows);
                (before, Some((v, rest.div_ceil(v.block_rows.into()))))
            }
            None => ((rows as u64).div_ceil(main.block_rows.into()), None),
        }
    }

    /// Plans a separate kernel for dq.
    fn separate(&self, chosen: Chosen<3>) -> Parts {
        let chosen = self.sized(chosen);
        Parts { dq: Dq::Separate, chosen, blocks: self.split(chosen[1], false), stream_k: None }
    }

    /// Plans launches of a main kernel that takes a part of the key blocks, and estimates their time. None: there is no such kernel.
    /// Kernels of block masks take all key blocks of a list in one launch.
    fn by_launches(&self) -> Option<(f64, Parts)> {
        if self.a.features.block_mask {
            return None;
        }
        let chosen = self.with_atomics().ok().filter(|[_, (main, _), _]| main.family.has_key_block_offset)?;
        let chosen = self.sized(chosen);
        let main = chosen[1];
        [true, false].into_iter().find_map(|with_tail| {
            let blocks @ (large, tail) = self.split(main, with_tail);
            let (time, of_launch) = blocks_of_launch(main.0, large, tail.map_or(0, |(_, n)| n), self.a, self.d)?;
            Some((time, Parts { dq: Dq::Launches(of_launch), chosen, blocks, stream_k: None }))
        })
    }

    /// Plans a stream-K grid of the same key blocks if the estimate is faster, or if the tuning chooses it.
    fn stream_k(&self, usual: ChosenKernel, (before_tail, tail): KeyBlocks) -> Option<PlannedKernel> {
        let (a, d) = (self.a, self.d);
        if matches!(usual.1, Reason::Tuned | Reason::FailedAvoided) {
            return None;
        }
        let (variant, reason) = self.stream_k_kernel()?;
        let of = |v: &Variant| (v.headdim, v.headdim_v);
        let is_tuned = reason == Reason::Tuned;
        // both share the layout of the scratch memory with the other kernels of the pass
        if variant.family.name != usual.0.family.name || (!is_tuned && of(variant) != of(usual.0)) {
            return None;
        }
        let shape = ([a.batch, a.seqlen_q, a.seqlen_k, a.nheads, a.nheads_k], [a.window.left, a.window.right]);
        type Key = ([&'static str; 2], ([i64; 5], [Option<i64>; 2]), (u64, bool));
        thread_local!(static LAST: PlanCache<Key, Option<(BackwardStreamKPlan, bool)>> = const { Cell::new(None) });
        let (plan, pays) = cached_plan(&LAST, ([variant.name, usual.0.name], shape, (before_tail, tail.is_some())), d, || {
            let found = BackwardStreamKPlan::of(a, variant, d);
            Ok(found.map(|(plan, time)| (plan, self.pays((plan, time), variant, usual.0, (before_tail, tail)))))
        })
        .ok()??;
        if !is_tuned && !pays {
            return None;
        }
        let reason = if is_tuned { reason } else { Reason::StreamK };
        Some(PlannedKernel { variant, blocks: [plan.heads, plan.blocks_of_head()], reason, stream_k: None, backward_stream_k: Some(plan) })
    }

    /// Returns whether a stream-K grid of `variant`, which takes `time`, is faster than the key blocks of the usual kernel.
    fn pays(&self, (plan, time): (BackwardStreamKPlan, u64), variant: &Variant, usual: &Variant, (before_tail, tail): KeyBlocks) -> bool {
        let Some(undivided) = BackwardStreamKPlan::undivided_time(self.a, usual, self.d) else { return false };
        let undivided = match tail {
            // waves of equal blocks, and a shorter one of TAIL waves
            Some(_) => {
                let waves = |blocks: u64| (blocks * u64::from(plan.heads)).div_ceil(self.d.resident_blocks(variant)) as f64;
                let (before, all) = (waves(before_tail), waves(plan.key_blocks.into()));
                (undivided as f64 * (before + TAIL) / all) as u64
            }
            None => undivided,
        };
        pays(time, undivided)
    }

    /// Takes the faster of launches of a main kernel and a separate kernel for dq, unless the tuning chooses the latter.
    fn deterministic(&self) -> Result<Parts> {
        let own = self.without();
        let is_forced = |&(v, reason): &ChosenKernel| v.pass != Pass::BackwardPreprocess && reason == Reason::Tuned;
        let forced = own.as_ref().is_ok_and(|chosen| chosen.iter().any(is_forced));
        let launches = if forced { None } else { self.by_launches() };
        let is_faster = |(time, parts): &(f64, Parts)| *time < separate_time(parts.chosen[1].0, self.a, self.d);
        match (launches, own) {
            (Some(found), own) if own.is_err() || is_faster(&found) => Ok(found.1),
            (_, own) => Ok(self.separate(own?)),
        }
    }

    fn fastest(&self) -> Result<Parts> {
        match self.around_stream_k() {
            Ok(chosen) => {
                let chosen = self.sized(chosen);
                let blocks = self.split(chosen[1], chosen[1].0.family.has_key_block_offset);
                Ok(Parts { dq: Dq::Atomics, chosen, blocks, stream_k: self.stream_k(chosen[1], blocks) })
            }
            // no kernel with atomics has a block mask and other features
            Err(e) if self.a.features.block_mask => Ok(self.separate(self.without().map_err(|_| e)?)),
            Err(e) if self.d.tuning.is_some_and(|t| !t.failed().is_empty()) => {
                Ok(self.separate(because(self.without().map_err(|_| e)?, Reason::FailedAvoided)))
            }
            Err(e) => Err(e),
        }
    }

    fn on_grids(&self, Parts { dq, chosen, blocks: (blocks, tail), stream_k }: Parts) -> BackwardPlan {
        let [prepare, main, finish] = chosen.map(|kernel| planned(kernel, self.a));
        let (of_launch, dq_accum_splits) = match dq {
            Dq::Atomics => (blocks as u32, 1),
            Dq::Launches(blocks) => (blocks, blocks),
            Dq::Separate => (blocks as u32, 0),
        };
        let Variant { block_rows, headdim, .. } = *main.variant;
        let tail = tail.filter(|_| stream_k.is_none()).map(|(v, n)| Tail {
            kernel: self.of_blocks((v, Reason::Tail), n as u32),
            first_block: (blocks * u64::from(block_rows / v.block_rows)) as u32,
        });
        BackwardPlan {
            prepare: Some(prepare),
            main: stream_k.unwrap_or_else(|| self.of_blocks((main.variant, main.reason), of_launch)),
            finish: Some(finish),
            scratch: scratch(main.variant),
            scratch_rows: scratch_rows(main.variant, self.a),
            deterministic: !matches!(dq, Dq::Atomics),
            main_launches: (blocks as u32).div_ceil(of_launch),
            tail,
            dq_accum_splits,
            headdim_rounded: if dq_accum_splits == 0 { 0 } else { i64::from(headdim) },
            stored: None,
        }
    }

    /// Plans a main kernel on a grid of this many key blocks.
    fn of_blocks(&self, kernel: ChosenKernel, blocks: u32) -> PlannedKernel {
        let (_, heads) = rows_and_heads(kernel.0, self.a);
        of_rows(kernel, i64::from(blocks * kernel.0.block_rows), heads, self.a)
    }
}
