//! Chooses kernels: the tuning's choice, else the cheapest applicable kernels of the first family that has one for each pass, with smaller
//! blocks where these are faster. Used by the plans of all operators. A family is the kernels of one architecture, a tuning a file of
//! measured choices.

use super::device::{families, names};
use super::device::{DeviceLimits, FAMILY_VARIABLE};
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
/// Takes the tuning's choices if they are applicable, else the cheapest kernels. Families with a tuned kernel come first. Never takes a
/// kernel that failed in the tuning.
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
    // the preferred family without a tuning
    let first = families.first().map(|(f, _)| f.name);
    if d.tuning.is_some() {
        families.sort_by_cached_key(|(f, _)| requested.iter().all(|&of| search.tuned(f, of).is_none()));
    }
    let mut is_fallback = false;
    for (family, _) in &families {
        let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
        let found = requested.map(|of| search.kernel(family, of, usual, is_fallback));
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("each pass has a kernel")));
        }
        is_fallback |= requested.iter().all(|&of| search.applicable(family, of, &d.untuned()).next().is_some());
    }
    let of_families = |of: &Requested| families.iter().flat_map(|(family, _)| search.failed(family, *of)).collect::<Vec<_>>();
    let failed = requested.iter().flat_map(of_families).collect();
    Err(Missing { kernels, families, passes: &passes, shape, features, failed, d }.error())
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
    fn kernel(&self, family: &'static Family, of: Requested, usual: Reason, is_fallback: bool) -> Option<ChosenKernel> {
        if let Some(v) = self.tuned(family, of) {
            return Some((v, Reason::Tuned));
        }
        let v = self.cheapest(family, of, self.d)?;
        let is_usual = self.d.tuning.is_none() || !is_fallback && self.cheapest(family, of, &self.d.untuned()) == Some(v);
        Some((v, if is_usual { usual } else { Reason::FailedAvoided }))
    }

    fn tuned(&self, family: &Family, (pass, features): Requested) -> Option<&'static Variant> {
        let is_chosen = |v: &&Variant| v.family.name == family.name && is_applicable(v, self.shape, features, self.d);
        self.d.tuning?.kernels(pass, self.shape, features).find(is_chosen)
    }

    /// Returns the cheapest applicable kernel.
    fn cheapest(&self, family: &'static Family, of: Requested, d: &DeviceLimits) -> Option<&'static Variant> {
        self.applicable(family, of, d).min_by_key(|v| cost(v, of.1))
    }

    fn applicable<'a>(
        &'a self,
        family: &'static Family,
        (pass, features): Requested,
        d: &'a DeviceLimits,
    ) -> impl Iterator<Item = &'static Variant> + 'a {
        self.kernels.of(family, pass).filter(move |v| is_applicable(v, self.shape, features, d))
    }

    /// Returns the names of kernels that would be applicable, but failed.
    fn failed(&self, family: &'static Family, of: Requested) -> Vec<&'static str> {
        self.applicable(family, of, &self.d.untuned()).filter(|v| !self.d.runs(v)).map(|v| v.name).collect()
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
    (unused.without(FeatureSet::VARLEN).count(), v.headdim + v.headdim_v, unused.count())
}

/// Maximum of [`Shape::rows_before_keys`] for kernels that require ALiBi. Other kernels compute rows further before the first key.
///
/// Kernels that require ALiBi start their sums of products with -slope * distance, so a large distance takes bits from the products. Rows
/// near a visible key give it almost all weight, and there the distance is small. At this limit and a slope of 1 the start is 739 in log2
/// units, with a last bit of 2^-14. About 32 steps each lose a third of it (RMS), in total 1e-4. Rounding a probability to fp16 costs 2e-4.
///
/// The host does not know the lengths of packed sequences. For them the maximum lengths count.
const FAR: i64 = 512;

/// Returns true if a kernel computes this shape with these features, and the device runs it.
pub(super) fn is_applicable(v: &Variant, shape: &Shape, features: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.is_bf16 == shape.is_bf16
        && v.is_batch_invariant == shape.is_batch_invariant
        && v.features.contains(features)
        && features.contains(v.required_features)
        && (shape.rows_before_keys <= FAR || !v.required_features.contains(FeatureSet::of(&[Feature::Alibi])))
        && d.runs(v)
}

/// Returns the variants that differ from `large` in block size alone and run on the device.
pub(super) fn of_all_sizes(kernels: Kernels, large: &'static Variant, d: &DeviceLimits) -> impl Iterator<Item = &'static Variant> {
    let d = *d;
    let of = |v: &Variant| (v.features, v.headdim, v.headdim_v, v.is_batch_invariant);
    let is_same = move |v: &&Variant| of(v) == of(large);
    kernels.of(&large.family, large.pass).filter(is_same).filter(move |v| d.runs(v))
}

/// Returns the kernel with the blocks that are fastest for the grid. A tuned kernel keeps its own; others get smaller ones in one of these
/// cases:
/// - All its blocks are resident at once. The grid takes one block's time, and a smaller block takes less. One more block
///   doubles the time, to that of a large block for the same rows.
/// - Its grid has no more blocks than that of large blocks. All rows fit one block, and half of the large block's rows were padding.
/// - Its waves compute enough fewer rows to pay for the lower speed of smaller blocks.
/// - A mask makes blocks uneven and all large blocks are resident at once, so the longest block decides. Small blocks
///   with more warps per row end sooner.
///
/// Figures: `docs/design/volta-forward.md`, `docs/design/volta-backward.md`, `docs/design/turing-forward.md`.
pub(super) fn sized(kernels: Kernels, large: ChosenKernel, a: &Attention, d: &DeviceLimits) -> ChosenKernel {
    if large.1 == Reason::Tuned {
        return large;
    }
    let blocks = |v: &Variant| {
        let (rows, heads) = rows_and_heads(v, a);
        (rows as u64).div_ceil(v.block_rows as u64) * (heads * a.batch) as u64
    };
    // rows that an SM computes in all waves
    let rows = |v: &Variant| {
        let at_once = u64::from(v.blocks_per_sm).min(blocks(v).div_ceil(d.sms.into()));
        blocks(v).div_ceil(d.resident_blocks(v)) * at_once * u64::from(v.block_rows)
    };
    // Speed of smaller blocks relative to larger ones: with 32 rows per warp instead of 48, 10% slower, with 16, 25 to 30% slower.
    const SMALL_SPEED: (u64, u64) = (7, 10);
    of_all_sizes(kernels, large.0, d).fold(large, |best, v| {
        let now = best.0;
        let reason = if v.block_rows >= now.block_rows {
            None
        } else if blocks(v) <= d.resident_blocks(v) {
            Some(Reason::Resident)
        } else if blocks(v) <= blocks(now) {
            Some(Reason::NoMoreBlocks)
        } else if rows(v) * SMALL_SPEED.1 <= rows(now) * SMALL_SPEED.0 {
            Some(Reason::FewerRows)
        } else if is_uneven(a) && v.threads > now.threads && blocks(now) <= d.resident_blocks(now) {
            Some(Reason::ShorterLongest)
        } else {
            None
        };
        reason.map_or(best, |reason| (v, reason))
    })
}

/// Returns true if the mean row sees at most three quarters of all keys: causal masks with about as many keys as queries.
///
/// Row i sees seqlen_k - seqlen_q + i + right keys, the mean row seqlen_k - seqlen_q / 2 + right. A chunk of a prompt after many tokens is
/// even, and so is a window.
pub(super) fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}

/// The kernels that the planner looked for and did not find.
pub(super) struct Missing<'a> {
    pub kernels: Kernels,
    /// Families that the device runs, limited to [`DeviceLimits::only`]. Empty: the device is too old.
    pub families: Vec<(&'static Family, Code)>,
    pub passes: &'a [Pass],
    pub shape: &'a Shape,
    pub features: FeatureSet,
    /// Names of applicable kernels that failed in the tuning.
    pub failed: Vec<&'static str>,
    pub d: &'a DeviceLimits,
}

impl Missing<'_> {
    /// Returns the error.
    pub fn error(&self) -> Error {
        Error::unsupported(match self.kernels.families().map(|f| f.sm).min() {
            Some(oldest) if self.families.is_empty() => self.old_device(oldest),
            _ => self.no_kernel(),
        })
    }

    fn old_device(&self, oldest: u32) -> String {
        let (major, minor) = self.d.capability;
        let needed = format!("{}.{}", oldest / 10, oldest % 10);
        format!("this GPU has compute capability {major}.{minor}; volta_fa's kernels need {needed} or newer")
    }

    fn no_kernel(&self) -> String {
        let kind = if self.passes.len() == 1 { "kernel" } else { "set of kernels" };
        let passes = self.passes.iter().map(|pass| format!("{pass:?}")).collect::<Vec<_>>().join(", ");
        let family_note = if self.d.only.is_some() { format!(" ({FAMILY_VARIABLE} allows no other family)") } else { String::new() };
        let failed = match self.failed.as_slice() {
            [] => String::new(),
            names => format!("; excluded because they failed `python -m volta_fa check` on this GPU: {}", names.join(", ")),
        };
        let (major, minor) = self.d.capability;
        format!(
            "there is no {} {kind} ({passes}){}{} in this sm_{major}{minor} GPU's {} bytes of shared memory a block{family_note}{failed}",
            names(&self.families),
            self.requested(),
            self.headdims(),
            self.d.shared_bytes_per_block
        )
    }

    /// Lists the features that the passes can have and the problem requests.
    fn requested(&self) -> String {
        let possible = self.passes.iter().fold(FeatureSet::NONE, |set, pass| set.union(pass.info().features));
        let requested: Vec<_> = possible.intersection(self.features).iter().map(Feature::name).collect();
        if requested.is_empty() {
            String::new()
        } else {
            format!(" with {}", requested.join(", "))
        }
    }

    fn headdims(&self) -> String {
        let Shape { headdim, headdim_v, cache, .. } = self.shape;
        let cache = match cache {
            CacheFormat::Unquantized => String::new(),
            quantized => format!(", {} cache", quantized.name()),
        };
        match headdim {
            0 => String::new(), // any
            _ => format!(" for headdim {headdim} and headdim_v {headdim_v}{cache}"),
        }
    }
}
