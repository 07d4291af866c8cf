//! Runs NVIDIA Volta (sm_70) and Turing (sm_75) machine code on a CPU: functionally, instruction by instruction, and
//! cycle by cycle on a model of one SM of a V100, T4 or another of [`Machine::names`]. The README describes the model and its accuracy.
//!
//! ```no_run
//! use volta_sim::{Extent, Launch, Module, Schedule, TimingOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let module = Module::load(&std::fs::read("saxpy.cubin")?)?;
//! let mut y = vec![1f32; 1024];
//! // `exchanged`: other CTAs of the launch wrote the memory just before, so that reads hit L2
//! let extents = [Extent { name: "y", ptr: y.as_mut_ptr().cast(), len: 4096, read_only: false, exchanged: false }];
//! let mut params = vec![]; // the kernel's parameters, as bytes in order
//! params.extend((y.as_ptr() as u64).to_le_bytes());
//! params.extend(1024u32.to_le_bytes());
//! let launch = Launch { grid: [8, 1, 1], block: [128, 1, 1], dynamic_smem: 0, params: &params, extents: &extents };
//! // SAFETY: `y` outlives both calls and nothing else uses it.
//! let report = unsafe {
//!     module.run("kernel", &launch, &Schedule::default())?;
//!     module.time("kernel", &launch, &TimingOptions::default())?
//! };
//! println!("{report}{:.1} us", report.timing.kernel_us);
//! # Ok(())
//! # }
//! ```

// loops over lanes index several arrays, and the bits of masks, by the same number
#![allow(clippy::needless_range_loop)]

mod cta;
mod decoder;
mod disasm;
mod elf;
mod env;
mod half;
mod isa;
mod job;
mod lanes;
mod launch;
mod machine;
mod mem;
mod module;
mod operand;
mod ops;
mod report;
mod run;
mod step;
mod timing;
mod warp;

pub use elf::Param;
pub use job::{run_job, JobOptions};
pub use launch::{Dispatch, Extent, Launch, Schedule, TimingOptions};
pub use machine::{Machine, Occupancy};
pub use module::{KernelInfo, Module};
pub use report::{Fractions, Functional, HotLoop, LaunchInfo, Report, Timing, TimingReport};
pub use timing::{Counters, Stalls};

use std::fmt;

/// What went wrong, as text. Faults of a kernel name the kernel, pc, instruction, CTA, warp, lane, address and the nearest buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(String);

/// Result of the public interface.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<String> for Error {
    fn from(text: String) -> Self {
        Error(text)
    }
}
