//! The seam between planning and execution: a [`KernelLaunch`] says everything about one kernel launch, a
//! [`Launcher`] runs it, on the CUDA driver or in the simulator. All that comes before is the same code.

pub mod driver;
mod load_errors;
#[cfg(feature = "sim")]
pub mod simulator;
pub mod tuning;

use crate::error::{Error, Result};
use crate::kernels::{Family, Variant, COMPILED};
use crate::plan::{DeviceLimits, FAMILY_VARIABLE};

/// Memory that a launch may touch. The driver has its own protection; the simulator maps exactly these.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRange {
    /// the tensor's name, for error messages
    pub name: &'static str,
    /// first byte; a device address, under the simulator a host address
    pub ptr: *mut u8,
    /// 0 for a tensor without elements
    pub bytes: usize,
    /// whether kernels write it: outputs, accumulators and scratch
    pub writable: bool,
}

/// One kernel launch.
pub struct KernelLaunch<'a> {
    /// the kernel; threads and shared memory of a block are in it
    pub variant: &'static Variant,
    /// blocks: in x and y as planned, in z one for each batch entry
    pub grid: [u32; 3],
    /// the kernel's single by-value argument
    pub params: &'a [u8],
    /// all that the kernel may touch through its pointers, for launchers that look at it
    pub ranges: &'a [MemoryRange],
}

/// The only family that the environment allows a plan to take, where it names one.
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

/// What runs planned launches: the CUDA driver, or the simulator.
pub trait Launcher {
    /// What outputs and scratch must be aligned to, bytes, where ATen's allocator would not do.
    fn output_alignment(&self) -> usize {
        1
    }

    /// Whether it looks at the memory that it is told of. What nobody looks at need not be found out.
    fn looks_at_memory(&self) -> bool {
        false
    }

    /// Whether every block of a launch runs. If not, none finds that all others have been there.
    fn runs_all_blocks(&self) -> bool {
        true
    }

    /// Called once by an op, with all its memory, before its first launch.
    fn begin(&self, _ranges: &[MemoryRange]) {}

    /// What the plan may rely on.
    ///
    /// # Errors
    /// Where there is no driver, and for an unknown family in the environment.
    fn limits(&self) -> Result<DeviceLimits>;

    /// Enqueue the launch.
    ///
    /// # Errors
    /// Where the module cannot be loaded or the launch fails; nothing has run then.
    fn launch(&self, launch: &KernelLaunch) -> Result<()>;
}

/// View a parameter block as the bytes that travel to the kernel.
pub fn bytes_of<T: Copy>(block: &T) -> &[u8] {
    // SAFETY: parameter blocks are `#[repr(C)]` values of `crate::params`; the kernel reads no padding.
    unsafe { std::slice::from_raw_parts((block as *const T).cast(), size_of::<T>()) }
}
