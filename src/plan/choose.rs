//! Chooses kernels: the tuning's choice, else the cheapest applicable kernels of the first family that has one for each pass.

use super::device::{DeviceLimits, FAMILY_VARIABLE};
use super::kernel::Reason;
use crate::error::{Error, Result};
use crate::kernels::{CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass, Variant};
use crate::tuning::{Shape, Tuning};

/// Returns the cost of a kernel for a problem with these features. Compares in this order:
/// - features that the problem does not use, because each takes registers and instructions in every step;
/// - columns, because kernels compute padding too.
///
/// Kernels of equal cost keep the order of the table, with larger blocks first.
pub(super) fn cost(v: &Variant, features: FeatureSet) -> (u32, u32) {
    (v.features.without(features).count(), v.headdim + v.headdim_v)
}

/// Returns the families that the device runs, in the order of preference.
///
/// # Errors
/// The device runs families, but not the only allowed one.
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

pub(super) fn names(families: &[(&'static Family, Code)]) -> String {
    families.iter().map(|(f, _)| f.name).collect::<Vec<_>>().join(" or ")
}

/// Maximum positions between a row and the first key, for kernels of ALiBi alone. Other kernels compute rows further away.
///
/// Kernels of ALiBi alone start their sums of products with -slope * distance, so a large distance takes bits from the products. Rows near
/// a visible key give it almost all weight, and there the distance is small. At this limit and a slope of 1 the start is 739 in log2 units,
/// with a last bit of 2^-14. About 32 steps each lose a third of it (RMS), in total 1e-4. Rounding a probability to fp16 costs 2e-4.
///
/// The host does not know the lengths of packed sequences. For them the maximum lengths count.
pub(super) const FAR: i64 = 512;

/// Returns true if a kernel computes this shape with these features, and fits the device's shared memory.
pub(super) fn is_applicable(v: &Variant, shape: &Shape, features: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.is_bf16 == shape.is_bf16
        && v.features.contains(features)
        && features.contains(v.required_features)
        && (shape.rows_before_keys <= FAR || !v.required_features.contains(FeatureSet::of(&[Feature::Alibi])))
        && v.shared_bytes <= d.shared_bytes_per_block
}

/// Returns the cheapest applicable kernel that did not fail in `avoid`.
pub(super) fn cheapest(
    of: impl Iterator<Item = &'static Variant>,
    shape: &Shape,
    features: FeatureSet,
    d: &DeviceLimits,
    avoid: Option<&Tuning>,
) -> Option<&'static Variant> {
    of.filter(|v| is_applicable(v, shape, features, d) && !avoid.is_some_and(|t| t.has_failed(v))).min_by_key(|v| cost(v, features))
}

/// A kernel of each pass of a set.
pub(super) type Chosen<const N: usize> = [(&'static Variant, Reason); N];

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
    let is_applicable = |v: &Variant, features| is_applicable(v, shape, features, d);
    let failed = |v: &Variant| d.tuning.is_some_and(|t| t.has_failed(v));
    let cheapest = |family, (pass, features), avoid| cheapest(kernels.of(family, pass), shape, features, d, avoid);
    // the preferred family without a tuning
    let first = families.first().map(|(f, _)| f.name);
    let tuned = |t: &'static Tuning, family: &Family, (pass, features): (Pass, FeatureSet)| {
        t.kernels(pass, shape, features).find(|v| v.family.name == family.name && is_applicable(v, features) && !failed(v))
    };
    if let Some(t) = d.tuning {
        families.sort_by_cached_key(|(f, _)| requested.iter().all(|&of| tuned(t, f, of).is_none()));
    }
    let mut is_fallback = false;
    for (family, _) in &families {
        let found = requested.map(|of| {
            let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
            let Some(t) = d.tuning else { return Some((cheapest(family, of, None)?, usual)) };
            if let Some(v) = tuned(t, family, of) {
                return Some((v, Reason::Tuned));
            }
            let v = cheapest(family, of, d.tuning)?;
            let is_usual = !is_fallback && cheapest(family, of, None) == Some(v);
            Some((v, if is_usual { usual } else { Reason::FailedAvoided }))
        });
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("each pass has a kernel")));
        }
        is_fallback |= requested.iter().all(|&(pass, features)| kernels.of(family, pass).any(|v| is_applicable(v, features)));
    }
    let excluded = |&(pass, features): &(Pass, FeatureSet)| {
        let of_pass = families.iter().flat_map(move |(family, _)| kernels.of(family, pass));
        of_pass.filter(|v| failed(v) && is_applicable(v, features)).map(|v| v.name).collect::<Vec<_>>()
    };
    let failed = requested.iter().flat_map(excluded).collect::<Vec<_>>();
    Err(Error::unsupported(match kernels.families().map(|f| f.sm).min() {
        Some(oldest) if families.is_empty() => format!(
            "this GPU has compute capability {}.{}; volta_fa's kernels need {}.{} or newer",
            d.capability.0,
            d.capability.1,
            oldest / 10,
            oldest % 10
        ),
        _ => {
            let requested: Vec<_> =
                passes.iter().fold(FeatureSet::NONE, |set, p| set.union(p.info().features)).intersection(features).iter().collect();
            let with = if requested.is_empty() { "" } else { " with " };
            let requested: Vec<_> = requested.into_iter().map(Feature::name).collect();
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
                names => format!("; excluded because they failed `python -m volta_fa check` on this GPU: {}", names.join(", ")),
            };
            format!(
                "there is no {} {} ({}){with}{}{headdims} in this GPU's {} bytes of shared memory a block{only}{failed}",
                names(&families),
                if N == 1 { "kernel" } else { "set of kernels" },
                passes.map(|pass| format!("{pass:?}")).join(", "),
                requested.join(", "),
                d.shared_bytes_per_block
            )
        }
    }))
}
