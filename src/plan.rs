//! Planning: which kernels run a problem, on which grid, with which parameter block.
//!
//! Pure functions of the problem, the kernels and the device's limits, to which the card's tuning belongs.

mod backward;
mod decode;
mod stream_k;

pub use backward::{backward, backward_among, BackwardMode, BackwardPlan, Tail};
pub use decode::{decode, decode_among, rows as decode_rows, DecodePlan, MAX_ROWS as MAX_DECODE_ROWS};
pub use stream_k::{StreamKPlan, StreamKSchedule, MAX_PIECES};

use crate::error::{Error, Result};
use crate::kernels::{self, CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass, RowKind, Scratch, Variant, COMPILED};
use crate::params;
use crate::problem::{Attention, MergedStates};
use crate::tuning::{Shape, Tuning};
use std::cell::Cell;
use std::fmt;
use std::thread::LocalKey;

/// Restricts plans to one family, for tests and comparisons.
pub const FAMILY_VARIABLE: &str = "VOLTA_FA_FAMILY";

/// What a plan may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// compute capability (major, minor)
    pub capability: (i32, i32),
    /// streaming multiprocessors
    pub sms: u32,
    /// dynamic shared memory that a block may opt in to
    pub shared_bytes_per_block: u32,
    /// the one family that may be taken (see [`FAMILY_VARIABLE`]); None: any
    pub only: Option<&'static Family>,
    /// what was found out about this card: choices to take, kernels to avoid
    pub tuning: Option<&'static Tuning>,
}

impl DeviceLimits {
    /// Tesla V100: what the simulator stands for unless it is told otherwise.
    pub const V100: DeviceLimits =
        DeviceLimits { capability: (7, 0), sms: 80, shared_bytes_per_block: kernels::VOLTA.shared_bytes, only: None, tuning: None };

    /// The capability as families count it: 70 for 7.0.
    pub fn sm(&self) -> u32 {
        (10 * self.capability.0 + self.capability.1).max(0) as u32
    }
}

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

/// The largest grid in y and z that CUDA allows.
const MAX_GRID_Z: i64 = 65535;

/// What the problem asks of kernels in all; what a pass can be asked at all, its table says.
pub fn needs(a: &Attention, mode: BackwardMode) -> FeatureSet {
    let f = &a.features;
    FeatureSet::all_where(|need| match need {
        Feature::Lengths => a.is_ragged(),
        Feature::Sinks => f.sinks,
        Feature::Bf16Gradients => mode.bf16_gradients,
        Feature::Softcap => f.softcap > 0.0,
        Feature::Alibi => f.alibi,
        Feature::Bias => f.attn_bias,
        Feature::Dropout => f.dropout_p > 0.0,
        // no attention's own: `prefill` asks for them
        Feature::Pages => false,
        Feature::Fp32Bias => f.fp32_bias,
    })
}

/// What a kernel that covers `needs` costs; the first difference decides, and where there is none the order of the table, which
/// has larger blocks first.
/// - What it is prepared for in vain: each takes registers and instructions of every step.
/// - Its columns, since padding is computed on.
fn cost(v: &Variant, needs: FeatureSet) -> (u32, u32) {
    (v.needs.without(needs).count(), v.headdim + v.headdim_v)
}

/// The families that the device runs, in the order of preference.
///
/// # Errors
/// Where it runs families, but not the only one that is allowed.
pub fn families(kernels: Kernels, d: &DeviceLimits) -> Result<Vec<(&'static Family, Code)>> {
    let mut found = kernels.families_for(d.sm());
    if let (Some(only), false) = (d.only, found.is_empty()) {
        let all = names(&found);
        found.retain(|(f, _)| f.name == only.name);
        if found.is_empty() {
            let (major, minor) = d.capability;
            let expected = format!("a kernel family that a GPU of compute capability {major}.{minor} runs: {all}");
            return Err(Error::value(FAMILY_VARIABLE, format!("`{}`", only.name), expected));
        }
    }
    Ok(found)
}

fn names(families: &[(&'static Family, Code)]) -> String {
    families.iter().map(|(f, _)| f.name).collect::<Vec<_>>().join(" or ")
}

/// Kernels of ALiBi alone begin their sums with -slope * distance, so a sum of products loses what that number has no bits for. Rows
/// near a key that they see give it almost all weight: there the number is small. Rows that lie before the first key by more than this get
/// other kernels, which add it once: at a slope of 1 it is 739 in units of log2, whose last bit, 2^-14, some 32 steps of a sum
/// get wrong by a third each in the root mean square, 1e-4 in all; rounding a probability to fp16 costs 2e-4.
/// (The lengths of packed sequences are the device's to know: of theirs the longest count.)
const FAR: i64 = 512;

/// Whether a kernel computes this shape, with what is needed, and fits the device.
fn holds(v: &Variant, shape: &Shape, needs: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.needs.covers(needs)
        && needs.covers(v.requires)
        && (shape.rows_before_keys <= FAR || !v.requires.covers(FeatureSet::of(&[Feature::Alibi])))
        && v.shared_bytes <= d.shared_bytes_per_block
}

/// The cheapest of those that hold the shape and did not fail.
fn cheapest(
    of: impl Iterator<Item = &'static Variant>,
    shape: &Shape,
    needs: FeatureSet,
    d: &DeviceLimits,
    avoid: Option<&Tuning>,
) -> Option<&'static Variant> {
    of.filter(|v| holds(v, shape, needs, d) && !avoid.is_some_and(|t| t.has_failed(v))).min_by_key(|v| cost(v, needs))
}

/// A kernel of each pass of a set.
type Chosen<const N: usize> = [(&'static Variant, Reason); N];

/// Kernels for these passes, all of one family: the first that has one for each that holds the problem. The card's tuning has the first
/// word about them, where what it says is possible; else it is the cheapest. A kernel that failed there is none.
fn choose<const N: usize>(kernels: Kernels, passes: [Pass; N], shape: &Shape, needs: FeatureSet, d: &DeviceLimits) -> Result<Chosen<N>> {
    let mut families = families(kernels, d)?;
    let asked = passes.map(|pass| (pass, needs.intersection(pass.facts().needs)));
    let holds = |v: &Variant, needs| holds(v, shape, needs, d);
    let failed = |v: &Variant| d.tuning.is_some_and(|t| t.has_failed(v));
    let cheapest = |family, (pass, needs), avoid| cheapest(kernels.of(family, pass), shape, needs, d, avoid);
    // what the device would prefer without a tuning
    let first = families.first().map(|(f, _)| f.name);
    let tuned = |t: &'static Tuning, family: &Family, (pass, needs): (Pass, FeatureSet)| {
        t.kernels(pass, shape, needs).find(|v| v.family.name == family.name && holds(v, needs) && !failed(v))
    };
    if let Some(t) = d.tuning {
        families.sort_by_cached_key(|(f, _)| asked.iter().all(|&of| tuned(t, f, of).is_none()));
    }
    let mut stands_in = false;
    for (family, _) in &families {
        let found = asked.map(|of| {
            let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
            let Some(t) = d.tuning else { return Some((cheapest(family, of, None)?, usual)) };
            if let Some(v) = tuned(t, family, of) {
                return Some((v, Reason::Tuned));
            }
            let v = cheapest(family, of, d.tuning)?;
            let is_usual = !stands_in && cheapest(family, of, None) == Some(v);
            Some((v, if is_usual { usual } else { Reason::FailedAvoided }))
        });
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("all of them are there")));
        }
        stands_in |= asked.iter().all(|&(pass, needs)| kernels.of(family, pass).any(|v| holds(v, needs)));
    }
    let would_do = |&(pass, needs): &(Pass, FeatureSet)| {
        let of_pass = families.iter().flat_map(move |(family, _)| kernels.of(family, pass));
        of_pass.filter(|v| failed(v) && holds(v, needs)).map(|v| v.name).collect::<Vec<_>>()
    };
    let failed = asked.iter().flat_map(would_do).collect::<Vec<_>>();
    Err(Error::unsupported(match kernels.families().map(|f| f.sm).min() {
        Some(oldest) if families.is_empty() => format!(
            "this GPU has compute capability {}.{}; volta_fa's kernels need {}.{} or newer",
            d.capability.0,
            d.capability.1,
            oldest / 10,
            oldest % 10
        ),
        _ => {
            let asked: Vec<_> =
                passes.iter().fold(FeatureSet::NONE, |set, p| set.union(p.facts().needs)).intersection(needs).iter().collect();
            let with = if asked.is_empty() { "" } else { " with " };
            let asked: Vec<_> = asked.into_iter().map(Feature::name).collect();
            let headdims = match shape.headdim {
                0 => String::new(), // any
                _ => format!(
                    " for headdim {} and headdim_v {}{}",
                    shape.headdim,
                    shape.headdim_v,
                    match shape.cache {
                        CacheFormat::Unquantized => String::new(),
                        quantized => format!(", {} cache", quantized.name()),
                    }
                ),
            };
            let only = if d.only.is_some() { format!(" ({FAMILY_VARIABLE} allows no other family)") } else { String::new() };
            let failed = match failed.as_slice() {
                [] => String::new(),
                names => format!("; what would do failed on this GPU (`python -m volta_fa check`): {}", names.join(", ")),
            };
            format!(
                "there is no {} {} ({}){with}{}{headdims} in this GPU's {} bytes of shared memory a block{only}{failed}",
                names(&families),
                if N == 1 { "kernel" } else { "set of kernels" },
                passes.map(|pass| format!("{pass:?}")).join(", "),
                asked.join(", "),
                d.shared_bytes_per_block
            )
        }
    }))
}

fn rounded(rows: i64, multiple: u32) -> i64 {
    (rows as u64).next_multiple_of(u64::from(multiple)) as i64
}

/// What a kernel has blocks of, and for how many heads.
fn rows_and_heads(variant: &Variant, a: &Attention) -> (i64, i64) {
    match variant.pass.facts().rows {
        RowKind::Queries => (a.seqlen_q, a.nheads),
        RowKind::ScratchQueries => (rounded(a.seqlen_q, scratch(variant).row_rounding), a.nheads),
        RowKind::Keys => (a.seqlen_k, a.nheads_k),
        RowKind::PackedQueries => unreachable!("decode kernels have a planner of their own"),
    }
}

/// The grid of a kernel: what its rows are, the pass says.
fn planned(kernel: (&'static Variant, Reason), a: &Attention) -> PlannedKernel {
    let (rows, heads) = rows_and_heads(kernel.0, a);
    of_rows(kernel, rows, heads, a)
}

/// The same of some of its rows.
fn of_rows((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64, a: &Attention) -> PlannedKernel {
    let mut planned = on_grid((variant, reason), rows, heads);
    // Blocks start in the order of the grid, and a long one that starts late is a tail. So, where the last rows see the most keys, and the
    // first keys the most rows, these come first of all heads. (All heads' K and V are then read at once, which costs 5% where they exceed
    // an H200's cache.)
    let fits = planned.blocks.iter().all(|&n| i64::from(n) <= MAX_GRID_Z);
    if variant.family.either_order.contains(&variant.pass) && a.window.right.is_some() && fits {
        planned.blocks.reverse();
    }
    planned
}

fn on_grid((variant, reason): (&'static Variant, Reason), rows: i64, heads: i64) -> PlannedKernel {
    PlannedKernel { variant, blocks: [(rows as u64).div_ceil(variant.block_rows as u64) as u32, heads as u32], reason, shares: None }
}

fn scratch(variant: &Variant) -> Scratch {
    variant.family.scratch.expect("a family with backward kernels says how their scratch memory lies")
}

/// Variants that differ in the size of blocks alone.
fn of_all_sizes(kernels: Kernels, large: &'static Variant, d: &DeviceLimits) -> impl Iterator<Item = &'static Variant> {
    let d = *d;
    kernels
        .of(&large.family, large.pass)
        .filter(|v| (v.needs, v.headdim, v.headdim_v) == (large.needs, large.headdim, large.headdim_v))
        .filter(move |v| v.shared_bytes <= d.shared_bytes_per_block && !d.tuning.is_some_and(|t| t.has_failed(v)))
}

/// The variant of the same headdims with smaller blocks, where its grid
/// - is resident on the GPU all at once: then it takes one block's time, and a smaller block takes less. One
///   block too many and it takes two, which is what the large block takes for the same rows;
/// - or has no more blocks than the large one's (all rows fit one block): half of those rows were padding;
/// - or runs in rounds of so many fewer rows at once that it pays for what smaller blocks lose: a family with three sizes;
/// - or would, under a mask that makes blocks uneven, be resident in large blocks, of which the longest then decides, while more warps share a row of the
///   small ones: these end sooner.
///
/// Figures: `docs/forward-kernel.md`, `docs/backward-kernel.md`, `docs/turing-kernels.md`.
fn smaller(kernels: Kernels, large: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(&'static Variant, Reason)> {
    let blocks = |v: &Variant| {
        let (rows, heads) = rows_and_heads(v, a);
        (rows as u64).div_ceil(v.block_rows as u64) * (heads * a.batch) as u64
    };
    // rows that an SM has worked on when it is done, side by side and one after the other
    let rows = |v: &Variant| {
        let at_once = u64::from(v.blocks_per_sm).min(blocks(v).div_ceil(d.sms.into()));
        blocks(v).div_ceil(u64::from(d.sms * v.blocks_per_sm)) * at_once * u64::from(v.block_rows)
    };
    // 32 rows a warp instead of 48 are 10% slower, 16 are 25 to 30%
    const WORTH_IT: (u64, u64) = (7, 10);
    of_all_sizes(kernels, large, d).fold(None, |best: Option<(&'static Variant, Reason)>, v| {
        let now = best.map_or(large, |(now, _)| now);
        let reason = if v.block_rows >= now.block_rows {
            None
        } else if blocks(v) <= (d.sms * v.blocks_per_sm) as u64 {
            Some(Reason::Resident)
        } else if blocks(v) <= blocks(now) {
            Some(Reason::NoMoreBlocks)
        } else if rows(v) * WORTH_IT.1 <= rows(now) * WORTH_IT.0 {
            Some(Reason::FewerRows)
        } else if is_uneven(a) && v.threads > now.threads && blocks(now) <= u64::from(d.sms * now.blocks_per_sm) {
            Some(Reason::ShorterLongest)
        } else {
            None
        };
        reason.map(|reason| (v, reason)).or(best)
    })
}

/// Whether the mean row sees at most three quarters of the keys that the last one sees, which is all of them: causal masks of about as many
/// keys as queries. (Row i sees seqlen_k - seqlen_q + i + right keys, on the mean seqlen_k - seqlen_q / 2 + right.) A chunk of a prompt
/// behind many tokens is even, and so is a window.
fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}

/// Plan the forward pass of a non-empty problem.
pub fn forward(a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    forward_among(COMPILED, a, d)
}

/// The same with other kernels to choose from.
pub fn forward_among(kernels: Kernels, a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    forward_pass(kernels, kernels::FORWARD, a, needs(a, BackwardMode::default()), d)
}

fn forward_pass(kernels: Kernels, pass: [Pass; 1], a: &Attention, needs: FeatureSet, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [large] = choose(kernels, pass, &Shape::of(a), needs, d)?;
    let small = if large.1 == Reason::Tuned { None } else { smaller(kernels, large.0, a, d) };
    let shares = if pass == kernels::FORWARD { equal_shares(kernels, large, a, d) } else { None };
    Ok(match (small, shares) {
        (Some(small), None | Some(PlannedKernel { reason: Reason::StreamKPlan, .. })) => planned(small, a),
        (_, shares) => shares.unwrap_or_else(|| planned(large, a)),
    })
}

/// The same tiles on a grid of equal shares, where all blocks of rows take as long and it is expected to pay, or where the card's tuning says so.
fn equal_shares(kernels: Kernels, usual: (&Variant, Reason), a: &Attention, d: &DeviceLimits) -> Option<PlannedKernel> {
    let shape = Shape::of(a);
    // so many batch entries take several launches
    if a.packed.is_some() || a.batch > MAX_GRID_Z || usual.1 == Reason::Tuned {
        return None;
    }
    let [(variant, reason)] = choose(kernels, kernels::FORWARD_STREAM_K, &shape, needs(a, BackwardMode::default()), d).ok()?;
    let of = |v: &Variant| (v.family.name, v.needs, v.headdim, v.headdim_v, v.block_rows);
    let is_tuned = reason == Reason::Tuned;
    if !is_tuned && (shape.is_causal != Some(false) || of(variant) != of(usual.0)) {
        return None;
    }
    let (rows, heads) = rows_and_heads(variant, a);
    let row_blocks = (rows as u64).div_ceil(u64::from(variant.block_rows)) * (heads * a.batch) as u64;
    let asked = (row_blocks, a.seqlen_k as u32, variant.step, d.sms, variant.blocks_per_sm);
    type Asked = (u64, u32, u32, u32, u32);
    thread_local!(static LAST: PlanCache<Asked, Option<(StreamKPlan, bool)>> = const { Cell::new(None) });
    let (row_blocks, keys, step, sms, places_per_sm) = asked;
    let (shares, pays) = cached_plan(&LAST, asked, d, || Ok(StreamKPlan::of(row_blocks, keys, step, sms, places_per_sm))).ok()??;
    if !is_tuned && !pays {
        return None;
    }
    let reason = if is_tuned { reason } else { Reason::StreamKPlan };
    Some(PlannedKernel { variant, blocks: [shares.blocks(), 1], reason, shares: Some(shares) })
}

/// Plan the merge of non-empty states. Its kernel takes any headdim.
pub fn merge(m: &MergedStates, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(COMPILED, [Pass::Merge], &Shape::of_states(m), FeatureSet::NONE, d)?;
    Ok(on_grid(kernel, m.seqlen_q, m.nheads))
}

/// Plan the forward kernel of a KV cache, for a call that is not empty. `a`: the same call as an attention, with headdims in whole groups
/// of 8.
pub fn prefill(a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    forward_pass(COMPILED, [Pass::Prefill], a, needs(a, BackwardMode::default()).union(FeatureSet::PAGED), d)
}

/// Plan the kernel that appends to a KV cache of this kind, rows tokens to each of nheads_k heads. It takes any headdim.
pub fn append(rows: i64, nheads_k: i64, cache: CacheFormat, d: &DeviceLimits) -> Result<PlannedKernel> {
    thread_local!(static LAST: PlanCache<(i64, i64, CacheFormat), PlannedKernel> = const { Cell::new(None) });
    cached_plan(&LAST, (rows, nheads_k, cache), d, || {
        let [kernel] = choose(COMPILED, [Pass::Append], &Shape { cache, ..of_tokens(rows, nheads_k) }, FeatureSet::NONE, d)?;
        Ok(on_grid(kernel, rows, nheads_k))
    })
}

/// Plan the kernel that makes numbers of a quantized KV cache, rows tokens of each of nheads_k heads. It takes any headdim.
pub fn convert(rows: i64, nheads_k: i64, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(COMPILED, [Pass::Dequantize], &of_tokens(rows, nheads_k), FeatureSet::NONE, d)?;
    Ok(on_grid(kernel, rows, nheads_k))
}

/// A pass over tokens of a KV cache, whatever their headdim and format.
fn of_tokens(rows: i64, nheads_k: i64) -> Shape {
    let (headdim, headdim_v, cache) = (0, 0, CacheFormat::Unquantized);
    Shape {
        headdim,
        headdim_v,
        seqlen_q: rows,
        seqlen_k: rows,
        rows: rows.saturating_mul(nheads_k),
        is_causal: None,
        cache,
        rows_before_keys: 0,
    }
}

/// What was asked last, of which device and tuning (which live as long as the process), and the plan.
type PlanCache<Asked, Plan> = Cell<Option<((Asked, DeviceLimits, *const Tuning), Plan)>>;

/// A thread's last plan, where it is the one that is asked for. A model's layers, and its steps of decoding, all ask for the same, and
/// looking through the tables of kernels takes a seventh of what such a call costs the host.
fn cached_plan<Asked: Copy + PartialEq, Plan: Copy>(
    last: &'static LocalKey<PlanCache<Asked, Plan>>,
    asked: Asked,
    d: &DeviceLimits,
    plan: impl FnOnce() -> Result<Plan>,
) -> Result<Plan> {
    let asked = (asked, DeviceLimits { tuning: None, ..*d }, d.tuning.map_or(std::ptr::null(), std::ptr::from_ref));
    match last.get() {
        Some((same, plan)) if same == asked => Ok(plan),
        _ => {
            let plan = plan()?;
            last.set(Some((asked, plan)));
            Ok(plan)
        }
    }
}

/// (first batch, batches) of each launch: the batch lies on the grid's z axis.
pub fn batch_chunks(batch: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..batch).step_by(MAX_GRID_Z as usize).map(move |first| (first, MAX_GRID_Z.min(batch - first)))
}

/// The part of the parameter block that the passes share.
pub fn problem_block(a: &Attention, batches: i64) -> params::Problem {
    let unbounded = a.seqlen_q + a.seqlen_k;
    let side = |w: Option<i64>| w.map_or(unbounded, |w| w.min(unbounded)) as i32;
    // A zero scale makes every visible key equal; so does a tiny one, and the kernels may divide by it.
    const TINY: f32 = 1e-30;
    let scale = (a.softmax_scale as f32).abs().max(TINY);
    params::Problem {
        batch: batches as i32,
        nheads: a.nheads as i32,
        nheads_k: a.nheads_k as i32,
        seqlen_q: a.seqlen_q as i32,
        seqlen_k: a.seqlen_k as i32,
        headdim: a.headdim as i32,
        headdim_v: a.headdim_v as i32,
        window_left: side(a.window.left),
        window_right: side(a.window.right),
        scale,
        scale_log2: scale * std::f32::consts::LOG2_E,
        sign_flip: if a.softmax_scale < 0.0 { 0x8000_8000 } else { 0 },
    }
}
