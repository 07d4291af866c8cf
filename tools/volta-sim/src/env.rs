//! What the CTAs (thread blocks) of one launch share: the program, memory, constants and shape. `launch` makes an [`Env`].

use crate::isa::Inst;
use crate::mem::GlobalMem;

/// Decoded code of one kernel.
pub struct Program {
    pub name: String,
    pub code: Vec<Inst>,
    /// registers to keep per thread, uniform ones too: what the kernel declares, and enough for every operand
    pub reg_file: usize,
}

/// Constant banks: 0 launch and parameters, 2 the kernel's own, 3 `__constant__` variables, 4 addresses of globals; 1 is empty.
pub type Banks = [Vec<u8>; 5];

/// All that a CTA needs besides its own state. Sizes are in bytes, `grid` (in CTAs) and `block` (in threads) are (x, y, z).
pub struct Env<'a> {
    pub prog: &'a Program,
    pub mem: &'a GlobalMem,
    pub banks: &'a Banks,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// shared memory of a CTA
    pub smem_bytes: u32,
    /// local memory of a thread
    pub local_bytes: u32,
    /// whether global atomics take a lock, because several host threads simulate CTAs
    pub lock_atomics: bool,
    pub isa: HostIsa,
}

/// The vector instructions of this host. The interpreter is compiled for each of these variants (`ops::run`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostIsa {
    /// AVX2, FMA, F16C, BMI1/2, POPCNT, LZCNT
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

impl HostIsa {
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("lzcnt")
        {
            return HostIsa::Avx2;
        }
        HostIsa::Baseline
    }
}
