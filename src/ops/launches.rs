//! Launches planned kernels and lists the memory they access.

use super::inputs::Inputs;
use crate::error::Result;
use crate::launch::{KernelLaunch, Launcher, MemoryRange};
use crate::plan::PlannedKernel;
use crate::problem::Attention;
use crate::tensor::memory_range;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use tch::Tensor;

/// Where the kernels of an operator run, and the memory that they may access.
pub struct Launches<'a> {
    launcher: &'a dyn Launcher,
    ranges: Vec<MemoryRange>,
}

impl<'a> Launches<'a> {
    /// Begins launches that read the inputs and write the `written` tensors, by name.
    pub fn begin<'t>(
        inputs: &Inputs,
        a: &Attention,
        launcher: &'a dyn Launcher,
        written: impl IntoIterator<Item = (&'static str, Option<&'t Tensor>)>,
    ) -> Launches<'a> {
        let ranges = memory_ranges(inputs, a, launcher, written);
        Launches::begin_with(launcher, ranges)
    }

    /// Begins launches that access these ranges.
    pub fn begin_with(launcher: &'a dyn Launcher, ranges: Vec<MemoryRange>) -> Launches<'a> {
        launcher.begin(&ranges);
        Launches { launcher, ranges }
    }

    /// Returns launches that also read what they write, which [`Launcher::begin`] would fill.
    pub fn in_place(launcher: &'a dyn Launcher, ranges: Vec<MemoryRange>) -> Launches<'a> {
        Launches { launcher, ranges }
    }

    /// Lets launches write what [`Launcher::begin`] did not fill: `names` of ranges, and one more tensor.
    pub fn also_write(&mut self, names: &[&str], tensor: Option<(&'static str, &Tensor)>) {
        for range in &mut self.ranges {
            range.writable |= names.contains(&range.name);
        }
        self.ranges.extend(tensor.map(|(name, t)| memory_range(name, t, true)));
    }

    /// Launches a kernel for this many batch entries.
    pub fn run(&self, planned: &PlannedKernel, batches: i64, params: &[u8]) -> Result<()> {
        let ranges = &self.ranges;
        self.launcher.launch(&KernelLaunch { variant: planned.variant, grid: planned.grid(batches), params, ranges })
    }
}

/// Returns inputs, which kernels read, and `written` tensors by name. Empty if the launcher does not use it.
pub fn memory_ranges<'t>(
    inputs: &Inputs,
    a: &Attention,
    launcher: &dyn Launcher,
    written: impl IntoIterator<Item = (&'static str, Option<&'t Tensor>)>,
) -> Vec<MemoryRange> {
    let [k, v] = a.key_names();
    if !launcher.looks_at_memory() {
        return Vec::new();
    }
    let operands = [("q", &inputs.q), (k, &inputs.k), (v, &inputs.v)].into_iter();
    let new = inputs.appended.iter().flat_map(|[k, v]| [("k", k), ("v", v)]);
    let read = operands.chain(new).chain(inputs.rng_state.as_ref().map(|t| ("rng_state", t))).chain(inputs.options.tensors());
    let written = written.into_iter().filter_map(|(name, t)| Some(memory_range(name, t?, true)));
    read.map(|(name, t)| memory_range(name, t, false)).chain(written).collect()
}

/// Returns 48 bits that no other call of this process has. Uninitialized memory is unlikely to hold them. They mark semaphores of a call's
/// blocks in memory that is not zeroed (csrc/semaphore.cuh).
pub fn launch_id() -> u64 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let first = *FIRST.get_or_init(|| RandomState::new().build_hasher().finish());
    // an odd factor gives different calls different numbers, which differ in half of their bits
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    first.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)).wrapping_mul(SPREAD) >> 16
}
