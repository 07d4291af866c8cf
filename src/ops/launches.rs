//! Launches planned kernels, and lists the memory that they access, which the simulator checks. All modules of src/ops/ launch through it.
//! Several decode blocks may share the tokens of a row tile (the rows of one block), and count themselves in its semaphore (arrivals).

use super::inputs::Inputs;
use crate::error::Result;
use crate::kernels::Pass;
use crate::launch::{KernelLaunch, Launcher, MemoryRange};
use crate::plan::{DecodePlan, PlannedKernel};
use crate::problem::Attention;
use crate::tensor::{read_range, written_range};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use tch::{Kind, Tensor};

/// A tensor with its name, for the simulator's errors; None: the call has no such tensor.
pub type Named<'t> = (&'static str, Option<&'t Tensor>);

/// Where the kernels of an operator run, and the memory that they may access.
pub struct Launches<'a> {
    pub launcher: &'a dyn Launcher,
    ranges: Vec<MemoryRange>,
}

impl<'a> Launches<'a> {
    /// Begins launches that read the inputs and write the `written` tensors.
    pub fn begin<'t>(inputs: &Inputs, a: &Attention, launcher: &'a dyn Launcher, written: impl IntoIterator<Item = Named<'t>>) -> Self {
        Launches::begin_with(launcher, memory_ranges(inputs, a, launcher, written))
    }

    /// Begins launches that may access these ranges. The writable ones hold nothing yet.
    pub fn begin_with(launcher: &'a dyn Launcher, ranges: Vec<MemoryRange>) -> Launches<'a> {
        launcher.begin(&ranges);
        Launches { launcher, ranges }
    }

    /// Returns launches that also read what they write: without [`Launcher::begin`], by which the simulator fills writable memory with NaN.
    pub fn in_place(launcher: &'a dyn Launcher, ranges: Vec<MemoryRange>) -> Launches<'a> {
        Launches { launcher, ranges }
    }

    /// Lets launches write memory that [`Launcher::begin`] must not have filled: ranges with these names, and one more tensor.
    pub fn also_write(&mut self, names: &[&str], tensor: Option<(&'static str, &Tensor)>) {
        for range in &mut self.ranges {
            range.writable |= names.contains(&range.name);
        }
        self.ranges.extend(tensor.map(|(name, t)| written_range(name, t)));
    }

    /// Launches a kernel for this many batch entries; 1 for grids that divide all entries themselves.
    pub fn run(&self, planned: &PlannedKernel, batches: i64, params: &[u8]) -> Result<()> {
        let ranges = &self.ranges;
        self.launcher.launch(&KernelLaunch { variant: planned.variant, grid: planned.grid(batches), params, ranges })
    }
}

/// Returns the memory of the inputs, which kernels read, and of the `written` tensors. Empty if the launcher does not use it.
pub fn memory_ranges<'t>(
    inputs: &Inputs,
    a: &Attention,
    launcher: &dyn Launcher,
    written: impl IntoIterator<Item = Named<'t>>,
) -> Vec<MemoryRange> {
    let [k, v] = a.key_names();
    if !launcher.looks_at_memory() {
        return Vec::new();
    }
    let operands = [("q", &inputs.q), (k, &inputs.k), (v, &inputs.v)].into_iter();
    let new = inputs.appended.iter().flat_map(|[k, v]| [("k", k), ("v", v)]);
    let read = operands.chain(new).chain(inputs.rng_state.as_ref().map(|t| ("rng_state", t))).chain(inputs.options.tensors());
    let written = written.into_iter().filter_map(|(name, t)| Some(written_range(name, t?)));
    read.map(|(name, t)| read_range(name, t)).chain(written).collect()
}

/// Returns 48 bits that no other call of this process has, and uninitialized memory is unlikely to hold. Blocks of a launch count each
/// other by semaphores in memory that is not zeroed: one whose upper bits differ from these counts as 0 (csrc/semaphore.cuh).
pub fn launch_id() -> u64 {
    static FIRST: OnceLock<u64> = OnceLock::new();
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let first = *FIRST.get_or_init(|| RandomState::new().build_hasher().finish());
    // 2^64 over the golden ratio spreads consecutive numbers: in 2^46 calls no two products have the same upper 48 bits
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    first.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)).wrapping_mul(SPREAD) >> 16
}

/// Prepares a simulator that times the blocks of one SM alone (of n SMs, SM i has blocks i, i + n, ...). In a full run, the block that
/// arrives last combines a row tile's results. So semaphores are set as if all other blocks had arrived, for the first block of each SM: it
/// combines, with made-up results (1.0). `scratch`: partial results, then semaphores.
pub fn fake_arrivals(plan: &DecodePlan, scratch: &Tensor, launch_id: u64) -> Result<()> {
    let DecodePlan { kernel, partials, semaphores, .. } = *plan;
    let _ = scratch.f_narrow(0, 0, partials)?.f_fill_(1.0)?;
    // above: the launch's id; low 16 bits (kSemaphoreCountBits in csrc/semaphore.cuh): a count above any tile's
    let counted = (launch_id << 16 | 0xffff) as i64;
    // a semaphore takes two floats
    let all = scratch.f_narrow(0, partials, 2 * semaphores)?.f_view_dtype(Kind::Int64)?;
    let blocks_per_sm = i64::from(kernel.variant.blocks_per_sm);
    let blocks = i64::from(kernel.blocks[0]);
    let arrived = |first: i64, end: i64| -> Result<()> {
        let _ = all.f_narrow(0, first.min(semaphores), (end.min(semaphores) - first).max(0))?.f_fill_(counted)?;
        Ok(())
    };
    // Blocks of batch-invariant kernels take equal ranges of all splits, which have a semaphore each; a row tile's is that of its first
    // split. An SM's blocks take `neighbors` ranges beside each other, if every block has a range. Over latents (DecodeMla) they do not:
    // those kernels lack registers for that (SplitScheduler in csrc/decode/split_scheduler.cuh).
    if kernel.variant.is_batch_invariant {
        let has_neighbors = semaphores >= blocks && kernel.variant.pass != Pass::DecodeMla;
        let neighbors = if has_neighbors { blocks_per_sm } else { 1 };
        let ranges = blocks.min(semaphores).max(1);
        for sm in 0..blocks / blocks_per_sm {
            arrived(sm * neighbors * semaphores / ranges, (sm * neighbors + 1) * semaphores / ranges)?;
        }
        return Ok(());
    }
    // Other kernels combine partial results in a tree. Each level has two semaphores for each block, in the order of blocks. So
    // the first blocks of all SMs have the first ones of a level (GlobalPartials in csrc/decode/partials.cuh).
    let of_level = 2 * blocks;
    for first in (0..semaphores).step_by(of_level as usize) {
        arrived(first, first + (of_level / blocks_per_sm).max(1))?;
    }
    Ok(())
}
