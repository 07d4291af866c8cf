//! The families of kernels that a device runs.

use super::device::{DeviceLimits, FAMILY_VARIABLE};
use crate::error::{Error, Result};
use crate::kernels::{Code, Family, Kernels};

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

/// Lists families for an error.
pub(super) fn names(families: &[(&'static Family, Code)]) -> String {
    families.iter().map(|(f, _)| f.name).collect::<Vec<_>>().join(" or ")
}
