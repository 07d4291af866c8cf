//! The device that a plan is made for.

use crate::kernels::{self, Family};
use crate::tuning::Tuning;

/// Restricts plans to one family, for tests and comparisons.
pub const FAMILY_VARIABLE: &str = "VOLTA_FA_FAMILY";

/// What a plan may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// compute capability (major, minor)
    pub capability: (i32, i32),
    /// streaming multiprocessors
    pub sms: u32,
    /// dynamic shared memory that a block may opt in to
    pub shared_bytes_per_block: u32,
    /// the one family that may be taken (see [`FAMILY_VARIABLE`]); None: any
    pub only: Option<&'static Family>,
    /// what was found out about this card: choices to take, kernels to avoid
    pub tuning: Option<&'static Tuning>,
}

impl DeviceLimits {
    /// Tesla V100: what the simulator stands for unless it is told otherwise.
    pub const V100: DeviceLimits =
        DeviceLimits { capability: (7, 0), sms: 80, shared_bytes_per_block: kernels::VOLTA.shared_bytes, only: None, tuning: None };

    /// The capability as families count it: 70 for 7.0.
    pub fn sm(&self) -> u32 {
        (10 * self.capability.0 + self.capability.1).max(0) as u32
    }
}
