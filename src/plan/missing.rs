//! The error for a problem without kernels.

use super::device::{DeviceLimits, FAMILY_VARIABLE};
use super::families::names;
use crate::error::Error;
use crate::kernels::{CacheFormat, Code, Family, Feature, FeatureSet, Kernels, Pass};
use crate::tuning::Shape;

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
        format!(
            "there is no {} {kind} ({passes}){}{} in this GPU's {} bytes of shared memory a block{family_note}{failed}",
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
