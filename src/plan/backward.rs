//! Plans the backward pass: how kernels compute dq, the key blocks of each launch, and the scratch memory.

use super::choose::{choose, Chosen};
use super::device::DeviceLimits;
use super::features::{features, BackwardMode};
use super::grid::{of_rows, planned, rounded, rows_and_heads, scratch};
use super::kernel::{PlannedKernel, Reason};
use super::size::{of_all_sizes, smaller};
use crate::error::Result;
use crate::kernels::{self, Kernels, Pass, Scratch, Variant, COMPILED};
use crate::problem::{Attention, Window};
use crate::tuning::Shape;
use std::sync::LazyLock;

/// The kernels of a backward pass, launched in this order, and the scratch memory that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlan {
    /// Computes row statistics from out, dout and softmax_lse, and zeroes dq's accumulators. None: `main` computes everything.
    pub prepare: Option<PlannedKernel>,
    /// Computes dk and dv, and adds to dq's accumulators if there are any, in `main_launches` launches of this grid.
    pub main: PlannedKernel,
    /// Computes dq, from its accumulators if there are any. None: `main` computes everything.
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
}

impl BackwardPlan {
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

/// Time of a tail of one wave of small blocks, relative to a wave of large blocks: 0.4 to 0.66 (docs/design/volta-backward.md).
const TAIL: f64 = 0.67;

/// Returns the key blocks of a head that fit one wave less than all blocks need, and a smaller variant that computes the rest in one wave.
///
/// None if there is no such variant, and under a causal mask, because its last blocks are short.
fn blocks_before_tail(kernels: Kernels, main: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(u64, &'static Variant)> {
    let (rows, heads) = rows_and_heads(main, a);
    let heads = (heads * a.batch) as u64;
    let blocks = (rows as u64).div_ceil(main.block_rows.into());
    let before = ((blocks * heads).div_ceil(resident_blocks(main, d)) - 1) * resident_blocks(main, d) / heads;
    let left = (rows as u64).saturating_sub(before * u64::from(main.block_rows));
    let fits = |v: &Variant| v.block_rows < main.block_rows && left.div_ceil(v.block_rows.into()) * heads <= resident_blocks(v, d);
    if before == 0 || a.window.right.is_some() {
        return None;
    }
    of_all_sizes(kernels, main, d).find(|v| fits(v)).map(|v| (before, v))
}

/// Returns the blocks that the GPU holds at once.
fn resident_blocks(v: &Variant, d: &DeviceLimits) -> u64 {
    u64::from(d.sms * v.blocks_per_sm)
}

/// Returns the key blocks of a head in each launch of a deterministic main kernel, and whether the estimate is faster than a separate dq
/// kernel. A head has `blocks` large blocks, and then `tail` small blocks in a tail.
///
/// Each block of a launch adds to its own accumulator, and launches run in order, so the order of every sum is fixed. More
/// accumulators fill the GPU, but zeroing and adding them takes time. The estimate counts in times of one block:
/// - An accumulator is written and read once, 8 bytes per element. A block computes 10 * block_rows flops for each element of its rows
///   of dq. On a V100 (docs/design/volta-backward.md) kernels compute 76 TFLOP/s, and memory transfers 0.83 TB/s.
/// - The separate dq kernel needs seven products instead of five, in one launch, without accumulators.
fn blocks_of_launch(main: &Variant, blocks: u64, tail: u64, a: &Attention, d: &DeviceLimits) -> Option<(u32, bool)> {
    const FLOPS_A_BYTE: f64 = 76.0 / 0.83;
    const OTHER_MODE: f64 = 7.0 / 5.0;
    // accumulators are fp32: 16 times the memory of q
    const MAX_SPLITS: u64 = 8;
    let (rows, heads) = rows_and_heads(main, a);
    let (heads, resident_blocks) = ((heads * a.batch) as u64, resident_blocks(main, d));
    let block_times = |blocks: u64| (blocks * heads).div_ceil(resident_blocks) as f64;
    let block_rows = f64::from(main.block_rows);
    let met = match a.window {
        Window { left: Some(left), right: Some(right) } => ((left + right) as f64 + block_rows).min(a.seqlen_q as f64),
        _ => a.seqlen_q as f64,
    };
    let per_accumulator = 0.8 * FLOPS_A_BYTE / block_rows * (a.seqlen_q as f64 / met) * (heads as f64 / resident_blocks as f64);
    let of_tail = if tail > 0 { TAIL } else { 0.0 };
    let cost =
        |sums: u64| (blocks / sums) as f64 * block_times(sums) + block_times(blocks % sums) + of_tail + sums as f64 * per_accumulator;
    // a tail begins where a launch ends, and needs an accumulator for each of its blocks
    let possible = (1..=blocks.min(MAX_SPLITS)).filter(|&sums| tail == 0 || (blocks % sums == 0 && tail <= sums));
    let best = possible.min_by(|&a, &b| cost(a).total_cmp(&cost(b)))?;
    let all = (rows as u64).div_ceil(main.block_rows.into());
    Some((best as u32, cost(best) < OTHER_MODE * block_times(all)))
}

/// Plans the backward pass of a non-empty problem.
///
/// By default the main kernel adds to dq by atomics, in any order. A deterministic pass takes the faster of two plans. It launches the main
/// kernel several times, so that one block at a time adds to an accumulator. Or a separate kernel computes S and dP again for dq.
///
/// The separate kernel also runs if the tuning chooses it, or if a kernel with atomics failed and no other replaces it. No tuning makes a
/// deterministic pass depend on the order of blocks.
pub fn backward(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    backward_among(*COMPILED, a, mode, d)
}

/// Plans the backward pass with these kernels to choose from.
pub fn backward_among(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let Some(main) = fused(kernels, a, mode, d) else { return in_parts(kernels, a, mode, d) };
    if d.tuning.is_some() && main.reason != Reason::Tuned {
        let parts = in_parts(kernels, a, mode, d)?;
        let of_tuning = |k: &PlannedKernel| matches!(k.reason, Reason::Tuned | Reason::TunedMode);
        if parts.kernels().any(|k| of_tuning(&k)) {
            return Ok(parts);
        }
    }
    Ok(BackwardPlan {
        prepare: None,
        main,
        finish: None,
        scratch: scratch(main.variant),
        scratch_rows: scratch_rows(main.variant, a),
        deterministic: true,
        main_launches: 1,
        tail: None,
        dq_accum_splits: 0,
        headdim_rounded: 0,
    })
}

/// Plans one fused kernel if one block has all keys of a head, so no other block adds to its dq.
///
/// This saves two launches, a few microseconds, and the accumulator's memory traffic. But the one block also computes the statistics of all
/// rows, at 0.01 us per row. So the plan takes it for few rows, or for enough blocks to fill the GPU with other work meanwhile.
fn fused(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Option<PlannedKernel> {
    const FEW_ROWS: i64 = 512;
    const MIN_WAVES: u64 = 2;
    // maximum keys of any fused kernel: most problems are larger, and need no search
    static MAX_KEYS: LazyLock<u32> = LazyLock::new(|| {
        let fused = COMPILED.variants().filter(|v| v.pass == Pass::BackwardFused);
        fused.map(|v| v.block_rows).max().unwrap_or(0)
    });
    if a.seqlen_k > i64::from(*MAX_KEYS) {
        return None;
    }
    let holds_all = |v: &Variant| a.seqlen_k <= i64::from(v.block_rows);
    let [large] = choose(kernels, kernels::FUSED_BACKWARD, &Shape::of(a), features(a, mode), d).ok()?;
    let is_tuned = large.1 == Reason::Tuned;
    // if the cheapest one failed or belongs to a later family, separate kernels are better
    if !is_tuned && large.1 != Reason::Cheapest {
        return None;
    }
    let kernel = if is_tuned { large } else { smaller(kernels, large.0, a, d).unwrap_or(large) };
    // separate kernels with less padding
    let is_narrower =
        |v: &Variant| v.features == kernel.0.features && v.headdim < kernel.0.headdim && v.headdim as i64 >= a.headdim.max(a.headdim_v);
    if !is_tuned && kernels.of(&kernel.0.family, Pass::Backward).any(is_narrower) {
        return None;
    }
    let rows = a.nheads / a.nheads_k * a.seqlen_q;
    let blocks = (a.nheads_k * a.batch) as u64;
    let pays = rows <= FEW_ROWS || blocks >= MIN_WAVES * resident_blocks(kernel.0, d);
    (holds_all(kernel.0) && (is_tuned || pays)).then(|| planned(kernel, a))
}

/// Plans separate kernels: preprocess, main, and postprocess or dq.
fn in_parts(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let (shape, requested) = (Shape::of(a), features(a, mode));
    let with_atomics = || choose(kernels, kernels::BACKWARD, &shape, requested, d);
    let without = || choose(kernels, kernels::DETERMINISTIC_BACKWARD, &shape, requested, d);
    let because = |chosen: Chosen<3>, why| chosen.map(|(v, reason)| (v, if reason == Reason::Tuned { reason } else { why }));
    let sized = |chosen: Chosen<3>| {
        chosen.map(|(large, reason)| {
            let small = if reason == Reason::Tuned { None } else { smaller(kernels, large, a, d) };
            // the reason for this set of kernels says more than the reason for small blocks
            let of_mode = matches!(reason, Reason::TunedMode | Reason::FailedAvoided);
            small.map_or((large, reason), |(v, why)| (v, if of_mode { reason } else { why }))
        })
    };
    enum Dq {
        /// All key blocks add to one accumulator.
        Atomics,
        /// In launches of this many key blocks per head, each block has its own accumulator.
        Launches(u32),
        /// A separate kernel computes dq.
        Separate,
    }
    // large blocks of a head, and the variant and number of small blocks after them
    let split = |(main, reason): (&'static Variant, Reason), with_tail: bool| {
        let (rows, _) = rows_and_heads(main, a);
        let found = if with_tail && reason != Reason::Tuned { blocks_before_tail(kernels, main, a, d) } else { None };
        match found {
            Some((before, v)) => {
                let rest = rows as u64 - before * u64::from(main.block_rows);
                (before, Some((v, rest.div_ceil(v.block_rows.into()))))
            }
            None => ((rows as u64).div_ceil(main.block_rows.into()), None),
        }
    };
    let tuned_mode = d.tuning.filter(|t| t.without_atomics(&shape, requested)).and_then(|_| without().ok());
    let has_key_block_offset = |is_faster: bool| {
        let chosen = with_atomics().ok().filter(|[_, (main, _), _]| main.family.has_key_block_offset).map(sized)?;
        let main = chosen[1];
        let (found, parts) = [true, false].into_iter().find_map(|with_tail| {
            let parts @ (blocks, tail) = split(main, with_tail);
            Some((blocks_of_launch(main.0, blocks, tail.map_or(0, |(_, n)| n), a, d)?, parts))
        })?;
        let (blocks, pays) = found;
        (pays || !is_faster).then_some((Dq::Launches(blocks), chosen, parts))
    };
    let without_tail = |dq, chosen: Chosen<3>| (dq, chosen, split(chosen[1], false));
    let (dq, chosen, (blocks, tail)) = match (tuned_mode, mode.deterministic) {
        (Some(chosen), _) => without_tail(Dq::Separate, sized(because(chosen, Reason::TunedMode))),
        (None, true) => {
            let own = without();
            let is_forced = |&(v, reason): &(&Variant, Reason)| v.pass != Pass::BackwardPreprocess && reason == Reason::Tuned;
            let forced = own.as_ref().is_ok_and(|chosen| chosen.iter().any(is_forced));
            match if forced { None } else { has_key_block_offset(own.is_ok()) } {
                Some(found) => found,
                None => without_tail(Dq::Separate, sized(own?)),
            }
        }
        (None, false) => match with_atomics() {
            Ok(chosen) => {
                let chosen = sized(chosen);
                (Dq::Atomics, chosen, split(chosen[1], chosen[1].0.family.has_key_block_offset))
            }
            Err(e) if d.tuning.is_some_and(|t| !t.failed().is_empty()) => {
                without_tail(Dq::Separate, sized(because(without().map_err(|_| e)?, Reason::FailedAvoided)))
            }
            Err(e) => return Err(e),
        },
    };
    let [prepare, main, finish] = chosen.map(|kernel| planned(kernel, a));
    let (of_launch, dq_accum_splits) = match dq {
        Dq::Atomics => (blocks as u32, 1),
        Dq::Launches(blocks) => (blocks, blocks),
        Dq::Separate => (blocks as u32, 0),
    };
    let (_, heads) = rows_and_heads(main.variant, a);
    let of_blocks = |kernel: (&'static Variant, Reason), blocks: u32| of_rows(kernel, i64::from(blocks * kernel.0.block_rows), heads, a);
    let main = of_blocks((main.variant, main.reason), of_launch);
    let tail = tail.map(|(v, n)| Tail {
        kernel: of_blocks((v, Reason::Tail), n as u32),
        first_block: (blocks * u64::from(main.variant.block_rows / v.block_rows)) as u32,
    });
    let main_launches = (blocks as u32).div_ceil(of_launch);
    Ok(BackwardPlan {
        prepare: Some(prepare),
        main,
        finish: Some(finish),
        scratch: scratch(main.variant),
        scratch_rows: scratch_rows(main.variant, a),
        deterministic: !matches!(dq, Dq::Atomics),
        main_launches,
        tail,
        dq_accum_splits,
        headdim_rounded: if dq_accum_splits == 0 { 0 } else { main.variant.headdim as i64 },
    })
}

/// Query rows of an entry in the scratch memory, or of all entries.
fn scratch_rows(v: &Variant, a: &Attention) -> i64 {
    let multiple = scratch(v).row_rounding;
    // A packed sequence begins at (its first row + its number * row_rounding), rounded down (csrc/backward/scratch.cuh): that leaves each
    // of them room for its own rounding.
    a.total_q().map_or(rounded(a.seqlen_q, multiple), |total| rounded(total + a.batch * i64::from(multiple), multiple))
}
