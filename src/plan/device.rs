//! The device that a plan is made for, the families of kernels (volta, turing) that it runs, and each thread's last plan for it. Launchers
//! make [`DeviceLimits`]; the planner reads nothing else of a device.

use crate::error::{Error, Result};
use crate::kernels::{self, Code, Family, Kernels, Variant};
use crate::tuning::Tuning;
use std::cell::Cell;
use std::thread::LocalKey;

/// Name of the environment variable that restricts plans to one kernel family (volta or turing), for tests and comparisons.
pub const FAMILY_VARIABLE: &str = "VOLTA_FA_FAMILY";

/// Properties of a device that plans use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Compute capability (major, minor).
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Dynamic shared memory that a block may opt in to, bytes.
    pub shared_bytes_per_block: u32,
    /// The only allowed family (see [`FAMILY_VARIABLE`]); None: any.
    pub only: Option<&'static Family>,
    /// The GPU's tuning: choices to take, kernels to avoid.
    pub tuning: Option<&'static Tuning>,
}

impl DeviceLimits {
    /// Tesla V100, which the simulator models by default.
    pub const V100: DeviceLimits =
        DeviceLimits { capability: (7, 0), sms: 80, shared_bytes_per_block: kernels::VOLTA.shared_bytes, only: None, tuning: None };

    /// Returns the compute capability as an SM number: 70 for 7.0.
    pub fn sm(&self) -> u32 {
        (10 * self.capability.0 + self.capability.1).max(0) as u32
    }

    pub(super) fn untuned(&self) -> DeviceLimits {
        DeviceLimits { tuning: None, ..*self }
    }

    /// Returns true if the kernel fits the shared memory and did not fail `python -m volta_fa check` there. Plans have no other kernels.
    pub(super) fn runs(&self, v: &Variant) -> bool {
        v.shared_bytes <= self.shared_bytes_per_block && !self.tuning.is_some_and(|t| t.has_failed(v))
    }

    /// Returns the blocks of a kernel that the GPU holds at once.
    pub(super) fn resident_blocks(&self, v: &Variant) -> u64 {
        u64::from(self.sms * v.blocks_per_sm)
    }
}

/// Returns the families that the device runs, in the order of preference, each with the code that it loads: machine code, or PTX. Fails if
/// it runs families, but not the only allowed one.
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

/// Lists families for an error: `turing or volta`.
pub(super) fn names(families: &[(&'static Family, Code)]) -> String {
    families.iter().map(|(f, _)| f.name).collect::<Vec<_>>().join(" or ")
}

/// A thread's last plan, and before it what the plan was made from: a key, the device, and the tuning (measured choices of kernels).
/// Tunings live as long as the process, so their address identifies them.
pub(super) type PlanCache<Key, Plan> = Cell<Option<((Key, DeviceLimits, *const Tuning), Plan)>>;

/// Returns the thread's last plan if key, device and tuning are the same, else the result of `plan`. Layers of a model and steps of
/// decoding have the same key, and a search of the kernel tables is a seventh of the host time of a call.
pub(super) fn cached_plan<Key: Copy + PartialEq, Plan: Copy>(
    last: &'static LocalKey<PlanCache<Key, Plan>>,
    key: Key,
    d: &DeviceLimits,
    plan: impl FnOnce() -> Result<Plan>,
) -> Result<Plan> {
    let key = (key, d.untuned(), d.tuning.map_or(std::ptr::null(), std::ptr::from_ref));
    match last.get() {
        Some((same, plan)) if same == key => Ok(plan),
        _ => {
            let plan = plan()?;
            last.set(Some((key, plan)));
            Ok(plan)
        }
    }
}
