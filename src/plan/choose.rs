//! Chooses kernels: the tuning's choice, else the cheapest applicable kernels of the first family that has one for each pass ([`choose`]),
//! with smaller blocks where these are faster ([`sized`]). Used by the plans of all operators. A family is the kernels of one architecture,
//! a tuning a file of measured choices and of kernels that failed on the device; `untuned()` is the device without it. A pass is what a
//! kernel computes, and a feature an option that kernels need code for.

use super::device::{families, names, DeviceLimits, FAMILY_VARIABLE};
use super::kernel::{rows_and_heads, ChosenKernel, Reason};
use crate::error::{Error, Result};
use crate::kernels::{CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass, Variant};
use crate::problem::Attention;
use crate::tuning::Shape;

/// A kernel of each pass of a set.
pub(super) type Chosen<const N: usize> = [ChosenKernel; N];

/// A pass and the features that it must have of those that the problem requests.
type Requested = (Pass, FeatureSet);

/// Chooses kernels of one family for these passes: the first family that has an applicable kernel for each pass.
///
/// Takes the tuning's choices if they are applicable, else the cheapest kernels. Families with tuned kernels come first. Leaves out failed
/// ones.
pub(super) fn choose<const N: usize>(
    kernels: Kernels,
    passes: [Pass; N],
    shape: &Shape,
    features: FeatureSet,
    d: &DeviceLimits,
) -> Result<Chosen<N>> {
    let mut families = families(kernels, d)?;
    let requested = passes.map(|pass| (pass, features.intersection(pass.info().features)));
    let search = Search { kernels, shape, d };
    // the family that is preferred without a tuning
    let first = families.first().map(|(f, _)| f.name);
    if d.tuning.is_some() {
        families.sort_by_cached_key(|(f, _)| requested.iter().all(|&wanted| search.tuned(f, wanted).is_none()));
    }
    let mut is_fallback = false;
    for (family, _) in &families {
        let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
        let found = requested.map(|wanted| search.kernel(family, wanted, usual, is_fallback));
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("each pass has a kernel")));
        }
        is_fallback |= requested.iter().all(|&wanted| search.applicable(family, wanted, &d.untuned()).next().is_some());
    }
    Err(search.missing(&families, &requested))
}

/// Looks for kernels of a shape on a device.
struct Search<'a> {
    kernels: Kernels,
    shape: &'a Shape,
    d: &'a DeviceLimits,
}

impl Search<'_> {
    /// Returns the kernel of a pass from a family, and why. `usual`: the reason if no tuning changes the choice. `is_fallback`: a family
    /// before this one has kernels, but some failed.
    fn kernel(&self, family: &'static Family, wanted: Requested, usual: Reason, is_fallback: bool) -> Option<ChosenKernel> {
        if let Some(variant) = self.tuned(family, wanted) {
            return Some(ChosenKernel { variant, reason: Reason::Tuned });
        }
        let variant = self.cheapest(family, wanted, self.d)?;
        let is_usual = self.d.tuning.is_none() || !is_fallback && self.cheapest(family, wanted, &self.d.untuned()) == Some(variant);
        Some(ChosenKernel { variant, reason: if is_usual { usual } else { Reason::FailedAvoided } })
    }

    fn tuned(&self, family: &Family, (pass, features): Requested) -> Option<&'static Variant> {
        let is_chosen = |v: &&Variant| v.family.name == family.name && is_applicable(v, self.shape, features, self.d);
        self.d.tuning?.kernels(pass, self.shape, features).find(is_chosen)
    }

    fn cheapest(&self, family: &'static Family, (pass, features): Requested, d: &DeviceLimits) -> Option<&'static Variant> {
        self.applicable(family, (pass, features), d).min_by_key(|v| cost(v, features))
    }

    fn applicable<'a>(
        &'a self,
        family: &'static Family,
        (pass, features): Requested,
        d: &'a DeviceLimits,
    ) -> impl Iterator<Item = &'static Variant> + 'a {
        self.kernels.of(family, pass).filter(move |v| is_applicable(v, self.shape, features, d))
    }

    /// Returns the error that says which kernels none of the families has, and which failed. No families: the device is too old.
    fn missing(&self, families: &[(&'static Family, Code)], requested: &[Requested]) -> Error {
        let (d, (major, minor)) = (self.d, self.d.capability);
        if let (Some(oldest), true) = (self.kernels.families().map(|f| f.sm).min(), families.is_empty()) {
            let needed = format!("{}.{}", oldest / 10, oldest % 10);
            return Error::unsupported(format!(
                "this GPU has compute capability {major}.{minor}; volta_fa's kernels need {needed} or newer"
            ));
        }
        let kind = if requested.len() == 1 { "kernel" } else { "set of kernels" };
        let passes = requested.iter().map(|(pass, _)| format!("{pass:?}")).collect::<Vec<_>>().join(", ");
        let all = requested.iter().fold(FeatureSet::NONE, |set, (_, features)| set.union(*features));
        let features = all.iter().map(Feature::name).collect::<Vec<_>>().join(", ");
        let with_features = if features.is_empty() { features } else { format!(" with {features}") };
        let headdims = match *self.shape {
            Shape { headdim: 0, .. } => String::new(), // any
            Shape { headdim, headdim_v, cache: CacheFormat::Unquantized, .. } => {
                format!(" for headdim {headdim} and headdim_v {headdim_v}")
            }
            Shape { headdim, headdim_v, cache, .. } => {
                format!(" for headdim {headdim} and headdim_v {headdim_v}, {} cache", cache.name())
            }
        };
        let family_note = if d.only.is_some() { format!(" ({FAMILY_VARIABLE} allows no other family)") } else { String::new() };
        // applicable kernels, but for a failure
        let failed_in = |&wanted: &Requested| {
            let of_family = move |&(family, _): &(&'static Family, Code)| self.applicable(family, wanted, &d.untuned()).collect::<Vec<_>>();
            families.iter().flat_map(of_family).filter(|v| !d.runs(v)).map(|v| v.name)
        };
        let failed = requested.iter().flat_map(failed_in).collect::<Vec<_>>().join(", ");
        let failures = match failed.as_str() {
            "" => failed,
            names => format!("; excluded because they failed `python -m volta_fa check` on this GPU: {names}"),
        };
        Error::unsupported(format!(
            "there is no {} {kind} ({passes}){with_features}{headdims} in this sm_{major}{minor} GPU's {} bytes of shared memory a \
             block{family_note}{failures}",
            names(families),
            d.shared_bytes_per_block
        ))
    }
}

/// Returns the cost of a kernel for a problem with these features. Compares in this order:
/// - features of scores that the problem does not use, because each takes registers and instructions in every step;
/// - columns, because kernels compute padding too;
/// - other features that the problem does not use: they cost a few percent, outside the loop.
///
/// Kernels of equal cost keep the order of the table, with larger blocks first.
fn cost(v: &Variant, features: FeatureSet) -> (u32, u32, u32) {
    let unused = v.features.without(features);
    (unused.without(FeatureSet::FP32_OUTPUT).count(), v.headdim + v.headdim_v, unused.count())
}

/// Maximum of [`Shape::rows_before_keys`], the positions that a row may lie before the first key it sees, for kernels that require ALiBi.
/// Other kernels compute rows further before.
///
/// Kernels that require ALiBi start their sums of products with -slope * distance, so a large distance takes bits from the products. Rows
/// near a visible key give it almost all weight, and there the distance is small. Here, with slope 1, the start is 739 (512 * log2(e)),
/// with a last bit of 2^-14. About 32 steps each lose a third of it (RMS), in total 1e-4. Rounding a probability to fp16 costs 2e-4.
///
/// The host does not know the lengths of packed sequences. For them the maximum lengths count.
const MAX_ALIBI_DISTANCE: i64 = 512;

/// Returns true if a kernel computes this shape with these features, and the device runs it.
pub(super) fn is_applicable(v: &Variant, shape: &Shape, features: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.is_bf16 == shape.is_bf16
        && v.is_batch_invariant == shape.is_batch_invariant
        && v.features.contains(features)
        && features.contains(v.required_features)
        && (shape.rows_before_keys <= MAX_ALIBI_DISTANCE || !v.required_features.has(Feature::Alibi))
        && d.runs(v)
}

/// Returns the variants that differ from `large` in rows or threads of a block alone and run on the device.
pub(super) fn of_all_sizes(kernels: Kernels, large: &'static Variant, d: &DeviceLimits) -> impl Iterator<Item = &'static Variant> {
    let d = *d;
    let tile = |v: &Variant| (v.features, v.headdim, v.headdim_v, v.is_batch_invariant);
    let is_same = move |v: &&Variant| tile(v) == tile(large);
    kernels.of(&large.family, large.pass).filter(is_same).filter(move |v| d.runs(v))
}

/// Returns the kernel with the blocks that are fastest for the problem's grid: `large`, or one that differs in rows or threads of a block
/// alone. A tuned kernel keeps its own; others get smaller ones in one of these cases:
/// - All its blocks are resident at once (unless four share an SM). The grid takes one block's time, and a smaller block takes less.
///   One more block doubles the time, to that of a large block for the same rows.
/// - Its grid has no more blocks than that of large blocks. They compute fewer rows of padding.
/// - Its waves compute enough fewer rows to pay for the lower speed of smaller blocks.
/// - A window is so short that a smaller block skips many of the keys that none of its rows sees.
/// - So few keys are before the diagonal of a causal mask that a smaller block skips many of those after it (only
///   where four share an SM).
/// - A mask makes blocks uneven and all large blocks are resident at once, so the longest block decides. Small blocks
///   with more warps per row end sooner.
///
/// Figures: `docs/design/volta-forward.md`, `docs/design/volta-backward.md`, `docs/design/turing-forward.md`.
pub(super) fn sized(kernels: Kernels, large: ChosenKernel, a: &Attention, d: &DeviceLimits) -> ChosenKernel {
    if large.reason == Reason::Tuned {
        return large;
    }
    let blocks = |v: &Variant| {
        let (rows, heads) = rows_and_heads(v, a);
        (rows as u64).div_ceil(v.block_rows as u64) * (heads * a.batch) as u64
    };
    // rows that the busiest SM computes in all waves
    let rows = |v: &Variant| {
        let at_once = u64::from(v.blocks_per_sm).min(blocks(v).div_ceil(d.sms.into()));
        blocks(v).div_ceil(d.resident_blocks(v)) * at_once * u64::from(v.block_rows)
    };
    // keys that any of a block's rows sees under a window; in a backward pass, queries that see any of a block's keys
    let width = a.window.left.and_then(|left| Some(left.saturating_add(a.window.right?).saturating_add(1)));
    let seen = |v: &Variant| width.map_or(1, |width| width.saturating_add(v.block_rows.into()).min(a.seqlen_k.max(a.seqlen_q)) as u64);
    // Four such blocks share an SM where two larger ones would, for the same rows: a grid that is resident at once is then no faster.
    let shares_sm = |v: &Variant| v.blocks_per_sm >= 4;
    // Percentage of the work, rows times seen keys, up to which smaller blocks pay under a window. At 75 (129 keys, blocks of 64 and 128
    // rows) they take 0.65 to 0.86 of the time, simulated on a V100 and a T4. As many of them must be resident: with one block
    // an SM in place of two (V100, forward, headdim 128), nothing hides a block's fixed part, and they take 1.03 to 1.11.
    // Where four share an SM, they take 0.86 at 87, and 0.97 to 1.01 at 90.
    let skips_keys = |v: &Variant, now: &Variant| {
        let most = if shares_sm(v) { 88 } else { 80 };
        let less = seen(v) < seen(now) && rows(v) * seen(v) * 100 <= rows(now) * seen(now) * most;
        less && v.blocks_per_sm >= now.blocks_per_sm
    };
    // Whether a block sees at most 90% of the keys before the diagonal that a larger one sees. V100, forward, headdim 64: with 512 keys
    // (90%) or fewer, four blocks an SM take 0.81 to 0.97 of the time. They take 1.04 to 1.07 with 577 keys, and up to 1.09 with 1024.
    let skips_diagonal = |v: &Variant, now: &Variant| {
        // twice the mean number of keys that a block sees
        let twice_seen = |v: &Variant| a.seqlen_k + i64::from(v.block_rows);
        is_uneven(a) && twice_seen(v) * 10 <= twice_seen(now) * 9
    };
    // Assumed speed of smaller blocks relative to larger ones. With 32 rows per warp instead of 48 they are 10% slower, with 16 rows
    // 25 to 30%.
    // Where four share an SM (V100, forward, headdim 64), they hide one another's fixed parts and take 1.05 to 1.2 of the time for the same
    // rows. There the rows of all blocks count too: long sequences, which have no fewer, are faster on a stream-K grid.
    let has_fewer_rows = |v: &Variant, now: &Variant| {
        let all_rows = |v: &Variant| blocks(v) * u64::from(v.block_rows);
        match shares_sm(v) {
            true => rows(v) * 10 <= rows(now) * 8 && all_rows(v) * 10 <= all_rows(now) * 9,
            false => rows(v) * 10 <= rows(now) * 7,
        }
    };
    of_all_sizes(kernels, large.variant, d).fold(large, |best, v| {
        let now = best.variant;
        let is_smaller = v.block_rows < now.block_rows;
        let has_more_warps = v.block_rows == now.block_rows && v.threads > now.threads;
        let reason = if !is_smaller && !has_more_warps {
            None
        } else if blocks(v) <= d.resident_blocks(v) && !shares_sm(v) {
            Some(Reason::Resident)
        } else if is_smaller && blocks(v) <= blocks(now) {
            Some(Reason::NoMoreBlocks)
        } else if is_smaller && has_fewer_rows(v, now) {
            Some(Reason::FewerRows)
        } else if skips_keys(v, now) {
            Some(Reason::ShortWindow)
        } else if shares_sm(v) && skips_diagonal(v, now) {
            Some(Reason::ShortDiagonal)
        } else if is_uneven(a) && v.threads > now.threads && blocks(now) <= d.resident_blocks(now) {
            Some(Reason::ShorterLongest)
        } else {
            None
        };
        reason.map_or(best, |reason| ChosenKernel { variant: v, reason })
    })
}

/// Returns true if rows see so different numbers of keys that blocks are uneven: the mean row sees at most three quarters of all keys. So
/// it is under causal masks with about as many keys as queries.
///
/// Row i sees seqlen_k - seqlen_q + i + right keys, the mean row seqlen_k - seqlen_q / 2 + right. Chunks of long prompts, and windows, are
/// even.
pub(super) fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}
