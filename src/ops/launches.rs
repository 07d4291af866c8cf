//! Launches of planned kernels.

use crate::error::Result;
use crate::launch::{KernelLaunch, Launcher, MemoryRange};
use crate::plan::PlannedKernel;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// Launches a kernel for this many batch entries.
pub fn run(launcher: &dyn Launcher, planned: &PlannedKernel, batches: i64, params: &[u8], ranges: &[MemoryRange]) -> Result<()> {
    launcher.launch(&KernelLaunch { variant: planned.variant, grid: planned.grid(batches), params, ranges })
}

/// Returns 48 bits that no other call of this process has and that uninitialized memory does not hold by chance. By them the blocks of a
/// call recognize what another of its blocks wrote into memory that is not zeroed (csrc/semaphore.cuh).
pub fn launch_id() -> u64 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let first = *FIRST.get_or_init(|| RandomState::new().build_hasher().finish());
    // an odd factor gives different calls different numbers, which differ in half of their bits
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    first.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)).wrapping_mul(SPREAD) >> 16
}
