//! Planning the backward pass: what becomes of dq, which blocks of keys a launch has, and what lies in scratch memory.

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
    /// row statistics from out, dout and softmax_lse; zeros in dq's accumulators, where there are any. None: `main` does all
    pub prepare: Option<PlannedKernel>,
    /// dk and dv, and dq into its accumulators; `rounds` launches of this grid
    pub main: PlannedKernel,
    /// dq from its accumulators, or computed without one. None: `main` does all
    pub finish: Option<PlannedKernel>,
    /// whether each sum has a fixed order: asked for, or better on this card
    pub deterministic: bool,
    /// launches of `main`, each for the next blocks of keys of every head
    pub rounds: u32,
    /// the last keys of every head, where they would be a round of their own of large blocks
    pub tail: Option<Tail>,
    /// accumulators of dq. 0: it has a kernel of its own, or `main` does all
    pub dq_accum_splits: u32,
    /// how these three lay out the row statistics
    pub scratch: Scratch,
    /// rows of an entry in dq's accumulator and in the row statistics; of all entries together where packed
    pub scratch_rows: i64,
    /// columns of dq's accumulators; 0: there are none
    pub headdim_rounded: i64,
}

impl BackwardPlan {
    /// All kernels, in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = PlannedKernel> {
        [self.prepare, Some(self.main), self.tail.map(|tail| tail.kernel), self.finish].into_iter().flatten()
    }
}

/// A last launch with smaller blocks than those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// for all blocks from the first on
    pub kernel: PlannedKernel,
    /// number of its first block of keys
    pub first_block: u32,
}

/// What a tail of one round of small blocks takes, in times of a round of large ones: 0.4 to 0.66 (docs/design/volta-backward.md).
const TAIL: f64 = 0.67;

/// Blocks of keys of a head that a GPU is done with in one round less than with all, and the smaller variant, where that takes the rest in
/// one round. Not under a causal mask, whose last blocks are short.
fn blocks_before_tail(kernels: Kernels, main: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(u64, &'static Variant)> {
    let (rows, heads) = rows_and_heads(main, a);
    let heads = (heads * a.batch) as u64;
    let blocks = (rows as u64).div_ceil(main.block_rows.into());
    let before = ((blocks * heads).div_ceil(places(main, d)) - 1) * places(main, d) / heads;
    let left = (rows as u64).saturating_sub(before * u64::from(main.block_rows));
    let fits = |v: &Variant| v.block_rows < main.block_rows && left.div_ceil(v.block_rows.into()) * heads <= places(v, d);
    if before == 0 || a.window.right.is_some() {
        return None;
    }
    of_all_sizes(kernels, main, d).find(|v| fits(v)).map(|v| (before, v))
}

/// Blocks that run at once.
fn places(v: &Variant, d: &DeviceLimits) -> u64 {
    u64::from(d.sms * v.blocks_per_sm)
}

/// Blocks of keys of a head in each of the main kernel's launches, where a deterministic pass goes by these; and whether that is expected to
/// be faster than a kernel of its own for dq. `blocks` are a head's, behind which a tail has `tail` more.
///
/// Blocks of one launch add to an accumulator each, and launches follow one another, so the order of every sum is fixed. More
/// accumulators fill the GPU, and take their time to be zeroed and added up. All of that in times of one block:
/// - an accumulator is written and read once, 8 bytes an element, while a block computes 10 * block_rows flops for each element of the
///   rows of dq that it meets. On a V100 (docs/design/volta-backward.md) the kernels compute 76 TFLOP/s, and memory gives 0.83 TB/s;
/// - the other mode has seven products for five, in one launch, and no accumulator.
fn blocks_of_a_round(main: &Variant, blocks: u64, tail: u64, a: &Attention, d: &DeviceLimits) -> Option<(u32, bool)> {
    const FLOPS_A_BYTE: f64 = 76.0 / 0.83;
    const OTHER_MODE: f64 = 7.0 / 5.0;
    // fp32, so twice as many times the memory of q
    const MOST: u64 = 8;
    let (rows, heads) = rows_and_heads(main, a);
    let (heads, places) = ((heads * a.batch) as u64, places(main, d));
    let block_times = |blocks: u64| (blocks * heads).div_ceil(places) as f64;
    let block_rows = f64::from(main.block_rows);
    let met = match a.window {
        Window { left: Some(left), right: Some(right) } => ((left + right) as f64 + block_rows).min(a.seqlen_q as f64),
        _ => a.seqlen_q as f64,
    };
    let of_a_sum = 0.8 * FLOPS_A_BYTE / block_rows * (a.seqlen_q as f64 / met) * (heads as f64 / places as f64);
    let of_tail = if tail > 0 { TAIL } else { 0.0 };
    let cost = |sums: u64| (blocks / sums) as f64 * block_times(sums) + block_times(blocks % sums) + of_tail + sums as f64 * of_a_sum;
    // a tail begins where a launch ends, and has sums for its blocks
    let possible = (1..=blocks.min(MOST)).filter(|&sums| tail == 0 || (blocks % sums == 0 && tail <= sums));
    let best = possible.min_by(|&a, &b| cost(a).total_cmp(&cost(b)))?;
    let all = (rows as u64).div_ceil(main.block_rows.into());
    Some((best as u32, cost(best) < OTHER_MODE * block_times(all)))
}

/// Plan the backward pass of a non-empty problem. The main kernel adds to dq by atomics, in any order. Where that has to be
/// deterministic, it is launched several times, so that one block at a time adds to an accumulator, or a kernel of its own computes S
/// and dP again for dq, whichever is faster. The kernel of its own it is too where the card's tuning says that this is faster, or that a
/// kernel with atomics failed which no other can replace; the other way round it never goes.
pub fn backward(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    backward_among(*COMPILED, a, mode, d)
}

/// The same with other kernels to choose from.
pub fn backward_among(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let Some(main) = whole(kernels, a, mode, d) else { return in_parts(kernels, a, mode, d) };
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
        rounds: 1,
        tail: None,
        dq_accum_splits: 0,
        headdim_rounded: 0,
    })
}

/// One kernel for all of it, where all keys of a head are one block, which then has its dq to itself.
///
/// That saves two launches, and dq's accumulator the way to memory and back. But rows then have their statistics from the one block,
/// 0.01 us a row, where a few microseconds of launches are saved: so not of many rows, unless there are blocks enough to
/// fill the GPU with other work meanwhile.
fn whole(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Option<PlannedKernel> {
    const FEW_ROWS: i64 = 512;
    const ENOUGH_ROUNDS: u64 = 2;
    // before anything is looked up: most problems are larger
    static MAX_KEYS: LazyLock<u32> = LazyLock::new(|| {
        let whole = COMPILED.variants().filter(|v| v.pass == Pass::BackwardFused);
        whole.map(|v| v.block_rows).max().unwrap_or(0)
    });
    if a.seqlen_k > i64::from(*MAX_KEYS) {
        return None;
    }
    let holds_all = |v: &Variant| a.seqlen_k <= i64::from(v.block_rows);
    let [large] = choose(kernels, kernels::FUSED_BACKWARD, &Shape::of(a), features(a, mode), d).ok()?;
    let is_tuned = large.1 == Reason::Tuned;
    // instead of one that failed, or of another family's, rather the parts of a pass
    if !is_tuned && large.1 != Reason::Cheapest {
        return None;
    }
    let kernel = if is_tuned { large } else { smaller(kernels, large.0, a, d).unwrap_or(large) };
    // tiles that waste less on padding
    let is_narrower =
        |v: &Variant| v.features == kernel.0.features && v.headdim < kernel.0.headdim && v.headdim as i64 >= a.headdim.max(a.headdim_v);
    if !is_tuned && kernels.of(&kernel.0.family, Pass::Backward).any(is_narrower) {
        return None;
    }
    let rows = a.nheads / a.nheads_k * a.seqlen_q;
    let blocks = (a.nheads_k * a.batch) as u64;
    let pays = rows <= FEW_ROWS || blocks >= ENOUGH_ROUNDS * places(kernel.0, d);
    (holds_all(kernel.0) && (is_tuned || pays)).then(|| planned(kernel, a))
}

/// In kernels for what comes before the products, for these, and for dq.
fn in_parts(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    let (shape, needs) = (Shape::of(a), features(a, mode));
    let with_atomics = || choose(kernels, kernels::BACKWARD, &shape, needs, d);
    let without = || choose(kernels, kernels::DETERMINISTIC_BACKWARD, &shape, needs, d);
    let because = |chosen: Chosen<3>, why| chosen.map(|(v, reason)| (v, if reason == Reason::Tuned { reason } else { why }));
    let sized = |chosen: Chosen<3>| {
        chosen.map(|(large, reason)| {
            let small = if reason == Reason::Tuned { None } else { smaller(kernels, large, a, d) };
            // why it is this set of kernels at all says more than why the blocks are small
            let of_mode = matches!(reason, Reason::TunedMode | Reason::FailedAvoided);
            small.map_or((large, reason), |(v, why)| (v, if of_mode { reason } else { why }))
        })
    };
    // What becomes of dq: all blocks of keys add to one accumulator; in launches of so many blocks each has its own; a kernel computes it.
    enum Dq {
        Atomics,
        Rounds(u32),
        Own,
    }
    // large blocks of a head, and a variant with as many small blocks behind them
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
    let tuned_mode = d.tuning.filter(|t| t.without_atomics(&shape, needs)).and_then(|_| without().ok());
    let has_key_block_offset = |is_faster: bool| {
        let chosen = with_atomics().ok().filter(|[_, (main, _), _]| main.family.has_key_block_offset).map(sized)?;
        let main = chosen[1];
        let (found, parts) = [true, false].into_iter().find_map(|with_tail| {
            let parts @ (blocks, tail) = split(main, with_tail);
            Some((blocks_of_a_round(main.0, blocks, tail.map_or(0, |(_, n)| n), a, d)?, parts))
        })?;
        let (blocks, pays) = found;
        (pays || !is_faster).then_some((Dq::Rounds(blocks), chosen, parts))
    };
    let whole = |dq, chosen: Chosen<3>| (dq, chosen, split(chosen[1], false));
    let (dq, chosen, (blocks, tail)) = match (tuned_mode, mode.deterministic) {
        (Some(chosen), _) => whole(Dq::Own, sized(because(chosen, Reason::TunedMode))),
        (None, true) => {
            let own = without();
            let is_forced = |&(v, reason): &(&Variant, Reason)| v.pass != Pass::BackwardPreprocess && reason == Reason::Tuned;
            let forced = own.as_ref().is_ok_and(|chosen| chosen.iter().any(is_forced));
            match if forced { None } else { has_key_block_offset(own.is_ok()) } {
                Some(found) => found,
                None => whole(Dq::Own, sized(own?)),
            }
        }
        (None, false) => match with_atomics() {
            Ok(chosen) => {
                let chosen = sized(chosen);
                (Dq::Atomics, chosen, split(chosen[1], chosen[1].0.family.has_key_block_offset))
            }
            Err(e) if d.tuning.is_some_and(|t| !t.failed().is_empty()) => {
                whole(Dq::Own, sized(because(without().map_err(|_| e)?, Reason::FailedAvoided)))
            }
            Err(e) => return Err(e),
        },
    };
    let [prepare, main, finish] = chosen.map(|kernel| planned(kernel, a));
    let (of_a_round, dq_accum_splits) = match dq {
        Dq::Atomics => (blocks as u32, 1),
        Dq::Rounds(blocks) => (blocks, blocks),
        Dq::Own => (blocks as u32, 0),
    };
    let (_, heads) = rows_and_heads(main.variant, a);
    let of_blocks = |kernel: (&'static Variant, Reason), blocks: u32| of_rows(kernel, i64::from(blocks * kernel.0.block_rows), heads, a);
    let main = of_blocks((main.variant, main.reason), of_a_round);
    let tail = tail.map(|(v, n)| Tail {
        kernel: of_blocks((v, Reason::Tail), n as u32),
        first_block: (blocks * u64::from(main.variant.block_rows / v.block_rows)) as u32,
    });
    let rounds = (blocks as u32).div_ceil(of_a_round);
    Ok(BackwardPlan {
        prepare: Some(prepare),
        main,
        finish: Some(finish),
        scratch: scratch(main.variant),
        scratch_rows: scratch_rows(main.variant, a),
        deterministic: !matches!(dq, Dq::Atomics),
        rounds,
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
