//! The last plan of each thread.

use super::device::DeviceLimits;
use crate::error::Result;
use crate::tuning::Tuning;
use std::cell::Cell;
use std::thread::LocalKey;

/// What was asked last, of which device and tuning (which live as long as the process), and the plan.
pub(super) type PlanCache<Asked, Plan> = Cell<Option<((Asked, DeviceLimits, *const Tuning), Plan)>>;

/// A thread's last plan, where it is the one that is asked for. A model's layers, and its steps of decoding, all ask for the same, and
/// looking through the tables of kernels takes a seventh of what such a call costs the host.
pub(super) fn cached_plan<Asked: Copy + PartialEq, Plan: Copy>(
    last: &'static LocalKey<PlanCache<Asked, Plan>>,
    asked: Asked,
    d: &DeviceLimits,
    plan: impl FnOnce() -> Result<Plan>,
) -> Result<Plan> {
    let asked = (asked, DeviceLimits { tuning: None, ..*d }, d.tuning.map_or(std::ptr::null(), std::ptr::from_ref));
    match last.get() {
        Some((same, plan)) if same == asked => Ok(plan),
        _ => {
            let plan = plan()?;
            last.set(Some((asked, plan)));
            Ok(plan)
        }
    }
}
