//! Choosing kernels: the cheapest of the first family that has one for each pass, unless the card's tuning says otherwise.

use super::device::{DeviceLimits, FAMILY_VARIABLE};
use super::kernel::Reason;
use crate::error::{Error, Result};
use crate::kernels::{CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass, Variant};
use crate::tuning::{Shape, Tuning};

/// What a kernel that covers `needs` costs; the first difference decides, and where there is none the order of the table, which
/// has larger blocks first.
/// - What it is prepared for in vain: each takes registers and instructions of every step.
/// - Its columns, since padding is computed on.
pub(super) fn cost(v: &Variant, needs: FeatureSet) -> (u32, u32) {
    (v.features.without(needs).count(), v.headdim + v.headdim_v)
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

pub(super) fn names(families: &[(&'static Family, Code)]) -> String {
    families.iter().map(|(f, _)| f.name).collect::<Vec<_>>().join(" or ")
}

/// Kernels of ALiBi alone begin their sums with -slope * distance, so a sum of products loses what that number has no bits for. Rows
/// near a key that they see give it almost all weight: there the number is small. Rows that lie before the first key by more than this get
/// other kernels, which add it once: at a slope of 1 it is 739 in units of log2, whose last bit, 2^-14, some 32 steps of a sum
/// get wrong by a third each in the root mean square, 1e-4 in all; rounding a probability to fp16 costs 2e-4.
/// (The lengths of packed sequences are the device's to know: of theirs the longest count.)
pub(super) const FAR: i64 = 512;

/// Whether a kernel computes this shape, with what is needed, and fits the device.
pub(super) fn holds(v: &Variant, shape: &Shape, needs: FeatureSet, d: &DeviceLimits) -> bool {
    v.headdim as i64 >= shape.headdim
        && v.headdim_v as i64 >= shape.headdim_v
        && v.cache == shape.cache
        && v.features.contains(needs)
        && needs.contains(v.required_features)
        && (shape.rows_before_keys <= FAR || !v.required_features.contains(FeatureSet::of(&[Feature::Alibi])))
        && v.shared_bytes <= d.shared_bytes_per_block
}

/// The cheapest of those that hold the shape and did not fail.
pub(super) fn cheapest(
    of: impl Iterator<Item = &'static Variant>,
    shape: &Shape,
    needs: FeatureSet,
    d: &DeviceLimits,
    avoid: Option<&Tuning>,
) -> Option<&'static Variant> {
    of.filter(|v| holds(v, shape, needs, d) && !avoid.is_some_and(|t| t.has_failed(v))).min_by_key(|v| cost(v, needs))
}

/// A kernel of each pass of a set.
pub(super) type Chosen<const N: usize> = [(&'static Variant, Reason); N];

/// Kernels for these passes, all of one family: the first that has one for each that holds the problem. The card's tuning has the first
/// word about them, where what it says is possible; else it is the cheapest. A kernel that failed there is none.
pub(super) fn choose<const N: usize>(
    kernels: Kernels,
    passes: [Pass; N],
    shape: &Shape,
    needs: FeatureSet,
    d: &DeviceLimits,
) -> Result<Chosen<N>> {
    let mut families = families(kernels, d)?;
    let asked = passes.map(|pass| (pass, needs.intersection(pass.info().features)));
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
                passes.iter().fold(FeatureSet::NONE, |set, p| set.union(p.info().features)).intersection(needs).iter().collect();
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
