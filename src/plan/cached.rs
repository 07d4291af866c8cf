//! The last plan of each thread.

use super::device::DeviceLimits;
use crate::error::Result;
use crate::tuning::Tuning;
use std::cell::Cell;
use std::thread::LocalKey;

/// The key of the last plan, its device and tuning (which live as long as the process), and the plan.
pub(super) type PlanCache<Key, Plan> = Cell<Option<((Key, DeviceLimits, *const Tuning), Plan)>>;

/// Returns the thread's last plan if the key is the same, else plans. Layers of a model and steps of decoding have the same key, and a search
/// of the kernel tables is a seventh of the host time of a call.
pub(super) fn cached_plan<Key: Copy + PartialEq, Plan: Copy>(
    last: &'static LocalKey<PlanCache<Key, Plan>>,
    key: Key,
    d: &DeviceLimits,
    plan: impl FnOnce() -> Result<Plan>,
) -> Result<Plan> {
    let key = (key, DeviceLimits { tuning: None, ..*d }, d.tuning.map_or(std::ptr::null(), std::ptr::from_ref));
    match last.get() {
        Some((same, plan)) if same == key => Ok(plan),
        _ => {
            let plan = plan()?;
            last.set(Some((key, plan)));
            Ok(plan)
        }
    }
}
