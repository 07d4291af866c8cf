//! The device that a plan is made for.

use crate::kernels::{self, Family};
use crate::tuning::Tuning;

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
}
