//! Chooses kernels: the tuning's choice, else the cheapest applicable kernels of the first family that has one for each pass.

use super::applicable::{cheapest, is_applicable};
use super::device::DeviceLimits;
use super::families::families;
use super::kernel::Reason;
use super::missing::Missing;
use crate::error::Result;
use crate::kernels::{Family, FeatureSet, Kernels, Pass, Variant};
use crate::tuning::{Shape, Tuning};

/// A kernel of each pass of a set.
pub(super) type Chosen<const N: usize> = [(&'static Variant, Reason); N];

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
    if let Some(t) = d.tuning {
        families.sort_by_cached_key(|(f, _)| requested.iter().all(|&of| search.tuned(t, f, of).is_none()));
    }
    let mut is_fallback = false;
    for (family, _) in &families {
        let usual = if Some(family.name) == first { Reason::Cheapest } else { Reason::LaterFamily };
        let found = requested.map(|of| search.kernel(family, of, usual, is_fallback));
        if found.iter().all(Option::is_some) {
            return Ok(found.map(|chosen| chosen.expect("each pass has a kernel")));
        }
        is_fallback |= requested.iter().all(|&of| search.applicable(family, of).next().is_some());
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
    fn kernel(&self, family: &'static Family, of: Requested, usual: Reason, is_fallback: bool) -> Option<(&'static Variant, Reason)> {
        let Some(t) = self.d.tuning else { return Some((self.cheapest(family, of, None)?, usual)) };
        if let Some(v) = self.tuned(t, family, of) {
            return Some((v, Reason::Tuned));
        }
        let v = self.cheapest(family, of, Some(t))?;
        let is_usual = !is_fallback && self.cheapest(family, of, None) == Some(v);
        Some((v, if is_usual { usual } else { Reason::FailedAvoided }))
    }

    fn tuned(&self, t: &'static Tuning, family: &Family, (pass, features): Requested) -> Option<&'static Variant> {
        let is_chosen = |v: &Variant| v.family.name == family.name && is_applicable(v, self.shape, features, self.d) && !t.has_failed(v);
        t.kernels(pass, self.shape, features).find(|v| is_chosen(v))
    }

    fn cheapest(&self, family: &'static Family, (pass, features): Requested, avoid: Option<&Tuning>) -> Option<&'static Variant> {
        cheapest(self.kernels.of(family, pass), self.shape, features, self.d, avoid)
    }

    fn applicable(&self, family: &'static Family, (pass, features): Requested) -> impl Iterator<Item = &'static Variant> + '_ {
        self.kernels.of(family, pass).filter(move |v| is_applicable(v, self.shape, features, self.d))
    }

    /// Returns the names of applicable kernels that failed in the tuning.
    fn failed(&self, family: &'static Family, of: Requested) -> impl Iterator<Item = &'static str> + '_ {
        self.applicable(family, of).filter(|v| self.d.tuning.is_some_and(|t| t.has_failed(v))).map(|v| v.name)
    }
}
