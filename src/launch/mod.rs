//! The interface between planning and execution. A [`KernelLaunch`] describes one kernel launch. A [`Launcher`] runs it on the CUDA driver,
//! or in the simulator, which executes the kernel's machine code on CPU tensors. The code in src/ops/ is the same for both.

pub mod driver;
mod memo;
#[cfg(feature = "sim")]
pub mod simulator;
pub mod tuning;

use crate::error::{Error, Result};
use crate::kernels::{Family, Variant, COMPILED};
use crate::plan::{DeviceLimits, FAMILY_VARIABLE}; // the latter is "VOLTA_FA_FAMILY"

/// Name of the memory through which blocks of a launch exchange partial results, and in which they count arrivals.
pub const SCRATCH: &str = "scratch";

/// Memory that a launch may access. The simulator maps these ranges and reports other accesses; a GPU has its own protection.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRange {
    /// Name of the tensor, for error messages.
    pub name: &'static str,
    /// First byte: a device address, under the simulator a host address.
    pub ptr: *mut u8,
    /// Size; 0 for a tensor without elements.
    pub bytes: usize,
    /// True if kernels write it: outputs, accumulators and scratch.
    pub writable: bool,
}

/// One launch of a kernel on a launcher's device.
pub struct KernelLaunch<'a> {
    /// The kernel, with the threads and shared memory of a block.
    pub variant: &'static Variant,
    /// Blocks: x and y as planned, z one per batch entry (1 for grids that divide all entries themselves).
    pub grid: [u32; 3],
    /// The kernel's single by-value argument: a parameter block (src/params/), as bytes.
    pub params: &'a [u8],
    /// Memory that the kernel may access through its pointers, for launchers that use ranges.
    pub ranges: &'a [MemoryRange],
}

/// Reads an environment variable that is 0 or 1; None: it is empty or not set.
pub(crate) fn flag(variable: &str) -> Result<Option<bool>> {
    let value = std::env::var_os(variable).unwrap_or_default();
    match value.to_str() {
        Some("") => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        _ => Err(Error::value(variable, format!("`{}`", value.to_string_lossy()), "0 or 1")),
    }
}

/// Returns the kernel family (volta, turing) that the environment restricts plans to; None for no restriction.
pub fn only_family() -> Result<Option<&'static Family>> {
    let Some(name) = std::env::var_os(FAMILY_VARIABLE).filter(|v| !v.is_empty()) else { return Ok(None) };
    match COMPILED.families().find(|f| name == f.name) {
        Some(family) => Ok(Some(family)),
        None => {
            let names: Vec<_> = COMPILED.families().map(|f| f.name).collect();
            Err(Error::value(FAMILY_VARIABLE, format!("`{}`", name.to_string_lossy()), format!("a kernel family: {}", names.join(" or "))))
        }
    }
}

/// Runs planned launches: on the CUDA driver, or in the simulator.
pub trait Launcher {
    /// Returns the device of outputs and scratch memory.
    fn device(&self) -> tch::Device;

    /// Returns the alignment of outputs and scratch memory that the launcher needs, bytes. ATen's allocators align to 16 in any case.
    fn output_alignment(&self) -> usize {
        1
    }

    /// Returns true if the launcher uses memory ranges. If false, callers do not compute them.
    fn looks_at_memory(&self) -> bool {
        false
    }

    /// Returns true if every block of a launch runs. If false, callers write what the missing blocks would have: the semaphores by which a
    /// block finds itself the last, and results that the next launch reads. So it is in simulations that only time one SM's blocks
    /// (`VOLTA_FA_SIMULATE=timing`) or record launches (`=launches`).
    fn runs_all_blocks(&self) -> bool {
        true
    }

    /// Returns the device's tuning: kernels to take or avoid, from a file of the user. Fails if the driver does, not for an unusable file.
    fn tuning(&self) -> Result<&'static tuning::DeviceTuning>;

    /// Prepares for the launches of one operator, before the first, with all their memory. The simulator fills writable ranges with NaN.
    fn begin(&self, _ranges: &[MemoryRange]) {}

    /// Returns the device's limits, which the planner relies on. Fails without a driver, or if the environment names an unknown family.
    fn limits(&self) -> Result<DeviceLimits>;

    /// Enqueues the launch on the current stream; the simulator runs it at once. After an error the kernel has not run.
    fn launch(&self, launch: &KernelLaunch) -> Result<()>;
}

/// Returns a parameter block as the bytes of [`KernelLaunch::params`].
pub fn bytes_of<T: Copy>(block: &T) -> &[u8] {
    // SAFETY: parameter blocks are `#[repr(C)]` values of `crate::params`; the kernel reads no padding.
    unsafe { std::slice::from_raw_parts((block as *const T).cast(), size_of::<T>()) }
}
