//! The dimensions of a launch.

use crate::error::Result;
use crate::module::KernelInfo;

/// Grid, block and shared memory of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_smem: u32,
}

impl Shape {
    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Returns an error if the kernel cannot run with this grid and block. Does not check shared memory.
    pub fn check(&self, kernel: &KernelInfo) -> Result<()> {
        let product = |v: &[u32; 3]| v.iter().try_fold(1u32, |a, &b| a.checked_mul(b)).filter(|&n| n > 0);
        if product(&self.grid).is_none() {
            return Err(format!("grid {:?} is empty or too large", self.grid).into());
        }
        let most = if kernel.max_threads > 0 { kernel.max_threads.min(1024) } else { 1024 };
        match product(&self.block) {
            Some(n) if n <= most => Ok(()),
            _ => Err(format!("block {:?}: kernel `{}` takes 1 to {most} threads", self.block, kernel.name).into()),
        }
    }
}
