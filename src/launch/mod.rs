//! The interface between planning and execution. A [`KernelLaunch`] describes one kernel launch. A [`Launcher`] runs it on
//! the CUDA driver or in the simulator. All code before it is the same for both.

pub mod driver;
mod load_errors;
#[cfg(feature = "sim")]
pub mod simulator;
pub mod tuning;

use crate::error::{Error, Result};
use crate::kernels::{Family, Variant, COMPILED};
use crate::plan::{DeviceLimits, FAMILY_VARIABLE};

/// Memory that a launch may access. The simulator maps these ranges and no others; a GPU has its own protection.
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

/// One kernel launch.
pub struct KernelLaunch<'a> {
    /// The kernel, with the threads and shared memory of a block.
    pub variant: &'static Variant,
    /// Blocks: x and y as planned, z one per batch entry.
    pub grid: [u32; 3],
    /// The kernel's single by-value argument.
    pub params: &'a [u8],
    /// Memory that the kernel may access through its pointers, for launchers that use ranges.
    pub ranges: &'a [MemoryRange],
}

/// Returns the family that the environment restricts plans to; None for no restriction.
///
/// # Errors
/// An unknown name.
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

    /// Alignment of outputs and scratch that the launcher needs beyond ATen's, bytes.
    fn output_alignment(&self) -> usize {
        1
    }

    /// Returns true if the launcher uses memory ranges. If false, callers do not compute them.
    fn looks_at_memory(&self) -> bool {
        false
    }

    /// Returns true if every block of a launch runs. If false, no block is the last to arrive at a semaphore.
    fn runs_all_blocks(&self) -> bool {
        true
    }

    /// Prepares for the launches of one op, before the first, with all of its memory.
    fn begin(&self, _ranges: &[MemoryRange]) {}

    /// Returns the limits of the device, which the planner relies on.
    ///
    /// # Errors
    /// There is no driver, or the environment names an unknown family.
    fn limits(&self) -> Result<DeviceLimits>;

    /// Enqueues the launch.
    ///
    /// # Errors
    /// The module cannot be loaded or the launch fails. The kernel has not run then.
    fn launch(&self, launch: &KernelLaunch) -> Result<()>;
}

/// Returns a parameter block as the bytes that the kernel receives.
pub fn bytes_of<T: Copy>(block: &T) -> &[u8] {
    // SAFETY: parameter blocks are `#[repr(C)]` values of `crate::params`; the kernel reads no padding.
    unsafe { std::slice::from_raw_parts((block as *const T).cast(), size_of::<T>()) }
}
