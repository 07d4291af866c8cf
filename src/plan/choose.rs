//! Chooses kernels: the tuning's choice, else the cheapest applicable kernels of the first family that has one for each pass ([`choose`]),
//! with smaller blocks where these are faster ([`sized`]). Used by the plans of all operators.
//! - family: the kernels of one architecture; pass: what a kernel computes; feature: an option that kernels need code for;
//! - tuning: a file of measured choices, and of kernels that failed on the device; `untuned()`: the device without it. Tests: tests/plan/.

use super::device::{families, names, DeviceLimits, FAMILY_VARIABLE}; // families: those the device runs, the preferred one first
use super::kernel::{usual_blocks, ChosenKernel, Reason};
use crate::error::{Error, Result};
use crate::kernels::{CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass, Variant};
use crate::problem::{Attention, Window};
use crate::tuning::Shape; // the properties of a problem that decide on kernels: headdims, lengths, mask, cache's format, dtype

/// The chosen kernels of a set of passes: one for each.
pub(super) type Chosen<const N: usize> = [ChosenKernel; N];

/// A pass, and those of the problem's features that concern it: its kernel must have them.
type Requested = (Pass, FeatureSet);

/// Chooses kernels of one family for these passes: the first family that has an applicable kernel for each pass.
///
/// Takes the tuning's choices if they are applicable, else the cheapest kernels that did not fail. Families with tuned kernels come first.
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
    // true once an earlier family has applicable kernels and at least one of them failed on this device
    let mut is_fallback = false;
    for (family, _) in &families {
        let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
        let found = requested.map(|wanted| search.kernel(family, wanted, usual, is_fallback));
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("each pass has a kernel")));
        }
        is_fallback |= requested.iter().all(|&wanted| !search.applicable(family, wanted, &d.untuned()).is_empty());
    }
    Err(search.missing(&families, &requested))
}

/// Looks for kernels of a shape on a device.
struct Search<'a> {
    kernels: Kernels, // of all families
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

    /// Returns the tuning's first choice that is of the family and applicable.
    fn tuned(&self, family: &Family, (pass, features): Requested) -> Option<&'static Variant> {
        let is_chosen = |v: &&Variant| v.family.name == family.name && is_applicable(v, self.shape, features, self.d);
        self.d.tuning?.kernels(pass, self.shape, features).find(is_chosen)
    }

    fn cheapest(&self, family: &'static Family, (pass, features): Requested, d: &DeviceLimits) -> Option<&'static Variant> {
        self.applicable(family, (pass, features), d).into_iter().min_by_key(|v| cost(v, features))
    }

    /// Returns the kernels that compute the shape with these features, and that the device runs.
    fn applicable(&self, family: &'static Family, (pass, features): Requested, d: &DeviceLimits) -> Vec<&'static Variant> {
        self.kernels.of(family, pass).filter(|v| is_applicable(v, self.shape, features, d)).collect()
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
        let is_invariant = self.shape.is_batch_invariant;
        let features = is_invariant.then_some("batch_invariant").into_iter().chain(all.iter().map(Feature::name));
        let features = features.collect::<Vec<_>>().join(", ");
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
            let of_family = move |&(family, _): &(&'static Family, Code)| self.applicable(family, wanted, &d.untuned());
            families.iter().flat_map(of_family).filter(|v| !d.runs(v)).map(|v| v.name)
        };
        let failed = requested.iter().flat_map(failed_in).collect::<Vec<_>>().join(", ");
        let failures = match failed.as_str() {
            "" => failed,
            names => format!("; excluded because they failed `python -m volta_fa check` on this GPU: {names}"),
        };
        // without the option, a family has a kernel of each pass
        let usual = Search { shape: &Shape { is_batch_invariant: false, ..*self.shape }, ..*self };
        let serves = |family| requested.iter().all(|&wanted| !usual.applicable(family, wanted, d).is_empty());
        let remedy = match is_invariant && families.iter().any(|&(family, _)| serves(family)) {
            true => ". Call without batch_invariant (and VOLTA_FA_BATCH_INVARIANT): other kernels compute it",
            false => "",
        };
        Error::unsupported(format!(
            "there is no {} {kind} ({passes}){with_features}{headdims} in this sm_{major}{minor} GPU's {} bytes of shared memory a \
             block{family_note}{failures}{remedy}",
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

/// Returns true if the heads of a block share a KV head, where `group` query heads do.
fn shares_kv_head(v: &Variant, group: i64) -> bool {
    group % i64::from(v.heads) == 0
}

/// Returns true if a kernel computes this shape with these features, and the device runs it.
pub(super) fn is_applicable(v: &Variant, shape: &Shape, features: FeatureSet, d: &DeviceLimits) -> bool {
    // chosen latents have no padding, which a wider kernel would read
    let is_wide_enough = if v.pass == Pass::SparseMla { v.headdim as i64 == shape.headdim } else { v.headdim as i64 >= shape.headdim };
    is_wide_enough
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && shares_kv_head(v, shape.group)
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
/// - So few keys precede the diagonal of a causal mask that a smaller block skips many of those after it (only where four share an SM).
/// - A mask makes blocks uneven, and all large blocks are resident: the longest decides. Small blocks with more warps per row end sooner.
///
/// Figures: `docs/design/volta-forward.md`, `docs/design/volta-backward.md`, `docs/design/turing-forward.md`.
pub(super) fn sized(kernels: Kernels, large: ChosenKernel, a: &Attention, d: &DeviceLimits) -> ChosenKernel {
    if large.reason == Reason::Tuned {
        return large;
    }
    of_all_sizes(kernels, large.variant, d).filter(|v| shares_kv_head(v, a.group())).fold(large, |best, variant| {
        let [smaller, best_so_far] = [variant, best.variant].map(|v| OnGrid { v, a, d });
        smaller.reason_over(&best_so_far).map_or(best, |reason| ChosenKernel { variant, reason })
    })
}

/// A kernel on the usual grid of a problem, for [`sized`]. Methods compare it with the best kernel so far. Percentages are limits from
/// which on smaller blocks do not pay.
struct OnGrid<'a> {
    v: &'static Variant, // the kernel
    a: &'a Attention,    // the problem
    d: &'a DeviceLimits,
}

impl OnGrid<'_> {
    fn blocks(&self) -> u64 {
        usual_blocks(self.v, self.a)
    }

    fn is_resident(&self) -> bool {
        self.blocks() <= self.d.resident_blocks(self.v)
    }

    /// Returns the rows of all blocks, padding included.
    fn rows(&self) -> u64 {
        self.blocks() * u64::from(self.v.block_rows * self.v.heads)
    }

    /// Returns the rows that the busiest SM computes in all waves.
    fn rows_of_sm(&self) -> u64 {
        let at_once = u64::from(self.v.blocks_per_sm).min(self.blocks().div_ceil(self.d.sms.into()));
        self.blocks().div_ceil(self.d.resident_blocks(self.v)) * at_once * u64::from(self.v.block_rows * self.v.heads)
    }

    /// Returns the keys that any row of a block sees under a window (backward: the queries that see any of its keys). 1: no window.
    fn seen(&self) -> u64 {
        let Window { left: Some(left), right: Some(right) } = self.a.window else { return 1 };
        let seen = left.saturating_add(right).saturating_add(1).saturating_add(self.v.block_rows.into());
        seen.min(self.a.seqlen_k.max(self.a.seqlen_q)) as u64
    }

    /// Returns true if four blocks share an SM where two larger ones would, for the same rows. A grid that is resident is then no faster.
    fn shares_sm(&self) -> bool {
        self.v.blocks_per_sm >= 4
    }

    /// Compares the rows of the busiest SM. Smaller blocks compute a row slower: with 32 rows a warp instead of 48 by 10%, with 16 rows by
    /// 25 to 30%.
    ///
    /// Where four share an SM (V100, forward, headdim 64), they hide one another's fixed parts and take 1.05 to 1.2 of the time for the
    /// same rows. There the rows of all blocks count too: long sequences, which have no fewer, are faster on a stream-K grid.
    fn has_fewer_rows(&self, best: &OnGrid) -> bool {
        if self.shares_sm() {
            self.rows_of_sm() * 100 <= best.rows_of_sm() * 80 && self.rows() * 100 <= best.rows() * 90
        } else {
            self.rows_of_sm() * 100 <= best.rows_of_sm() * 70
        }
    }

    /// Compares the work, rows times seen keys. At 75% (129 keys, blocks of 64 and 128 rows) smaller blocks take 0.65 to 0.86 of the time,
    /// simulated on a V100 and a T4. As many of them must be resident: with one block an SM in place of two (V100, forward, headdim 128),
    /// nothing hides a block's fixed part, and they take 1.03 to 1.11. Where four share an SM, they take 0.86 at 87%, 0.97 to 1.01 at 90%.
    fn skips_keys(&self, best: &OnGrid) -> bool {
        let percent = if self.shares_sm() { 88 } else { 80 };
        let has_less_work = self.rows_of_sm() * self.seen() * 100 <= best.rows_of_sm() * best.seen() * percent;
        self.seen() < best.seen() && has_less_work && self.v.blocks_per_sm >= best.v.blocks_per_sm
    }

    /// Compares the keys before the diagonal. V100, forward, headdim 64: with 512 keys (90%) or fewer, four blocks an SM take 0.81 to 0.97
    /// of the time. They take 1.04 to 1.07 with 577 keys, and up to 1.09 with 1024.
    fn skips_diagonal(&self, best: &OnGrid) -> bool {
        // twice the mean number of keys that a block sees
        let twice_seen = |grid: &OnGrid| grid.a.seqlen_k + i64::from(grid.v.block_rows);
        self.shares_sm() && is_uneven(self.a) && twice_seen(self) * 100 <= twice_seen(best) * 90
    }

    /// Returns why this kernel is faster than `best`. None: it is not, or has no smaller blocks.
    fn reason_over(&self, best: &OnGrid) -> Option<Reason> {
        let is_smaller = self.v.block_rows < best.v.block_rows;
        let has_more_warps = self.v.threads > best.v.threads;
        if !is_smaller && (self.v.block_rows > best.v.block_rows || !has_more_warps) {
            None
        } else if self.v.heads > 1 {
            self.skips_keys(best).then_some(Reason::ShortWindow)
        } else if self.is_resident() && !self.shares_sm() {
            Some(Reason::Resident)
        } else if is_smaller && self.blocks() <= best.blocks() {
            Some(Reason::NoMoreBlocks)
        } else if is_smaller && self.has_fewer_rows(best) {
            Some(Reason::FewerRows)
        } else if self.skips_keys(best) {
            Some(Reason::ShortWindow)
        } else if self.skips_diagonal(best) {
            Some(Reason::ShortDiagonal)
        } else if is_uneven(self.a) && has_more_warps && best.is_resident() {
            Some(Reason::ShorterLongest)
        } else {
            None
        }
    }
}

/// Returns true if rows see so different numbers of keys that blocks are uneven: the mean row sees at most three quarters of all keys. So
/// it is under causal masks with about as many keys as queries.
///
/// Row i sees seqlen_k - seqlen_q + i + right keys, the mean row seqlen_k - seqlen_q / 2 + right. Chunks of prompts and windows are even.
pub(super) fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}
