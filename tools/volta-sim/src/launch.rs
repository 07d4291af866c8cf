//! Launches: makes an [`Env`] to simulate from a kernel, its parameters and memory, for [`Module::run`], [`Module::time`] and `job`.

use crate::elf::{Relocation, PARAM_BASE};
use crate::env::{Banks, Env, HostIsa};
use crate::machine::{Machine, Occupancy};
use crate::mem::GlobalMem;
use crate::module::{Kernel, KernelInfo, Module, Shape};
use crate::ops::memory::SHARED_WINDOW;
use crate::report::{self, Functional, LaunchInfo, Timing, TimingReport};
use crate::run;
use crate::timing::SmSim;
use crate::Result;
use std::collections::HashMap;
use std::time::Instant;

/// Host memory that a kernel may access, mapped at its own address: a pointer into it is a device pointer. Extents with a null pointer or
/// no bytes are ignored; extents may overlap. Device allocations are aligned to 256 bytes: align extents that are timed in the same way, or
/// accesses straddle cache lines that they do not straddle on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// name in error messages
    pub name: &'a str,
    pub ptr: *mut u8,
    pub len: usize,
    /// stores and atomics are errors; the memory is never written
    pub read_only: bool,
    /// other CTAs of the launch wrote what a CTA reads here, a moment before, so that timed reads hit L2
    pub exchanged: bool,
}

/// One launch of a kernel that takes a single struct by value.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// CTAs along x, y, z
    pub grid: [u32; 3],
    /// threads of a CTA along x, y, z
    pub block: [u32; 3],
    /// dynamic shared memory of a CTA, bytes
    pub dynamic_smem: u32,
    /// the parameter, as the bytes the kernel expects
    pub params: &'a [u8],
    /// all memory the kernel may access
    pub extents: &'a [Extent<'a>],
}

/// How the functional run interleaves warps and CTAs.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// instructions that a warp may execute before the next one gets its turn. Large: each warp runs up
    /// to its barrier, which exposes missing barriers; 1: warps advance together, as on the GPU.
    pub quantum: u32,
    /// host threads; each simulates a CTA at a time
    pub threads: usize,
}

impl Default for Schedule {
    /// Quantum 20000, all CPUs.
    fn default() -> Self {
        Schedule { quantum: 20_000, threads: std::thread::available_parallelism().map_or(1, |n| n.get()) }
    }
}

/// How CTAs are given to the SMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dispatch {
    /// a functional run measures the CTAs' work, and each goes to the first free place, as on the GPU
    #[default]
    Dynamic,
    /// of n SMs, SM s gets CTAs s, s + n, ...
    Static,
}

/// What to time, and on which machine.
#[derive(Clone, Debug, Default)]
pub struct TimingOptions {
    pub machine: Machine,
    /// maximum CTAs of the SM to simulate: the first ones, from which the time of the others is extrapolated; None: all
    pub ctas: Option<usize>,
    pub dispatch: Dispatch,
    /// the SM to time; None: the one with the most work, or SM 0 with static dispatch
    pub sm: Option<u32>,
    /// floating-point operations of the whole grid, for the TFLOP/s figure
    pub flops: Option<f64>,
    /// produce [`Timing::listing`], the code with executions and waits per instruction
    pub annotate: bool,
}

impl Module {
    /// Execute every CTA of a launch.
    ///
    /// # Errors
    /// The launch does not fit the kernel, or the kernel does something wrong: an access outside the
    /// extents, a store to a read-only one, a deadlock, an unknown instruction. Writable extents then
    /// hold what was stored before. Module-level `__device__` variables start from their initial value.
    ///
    /// # Safety
    /// Every extent must be valid for reads of its length until this returns, and for writes too unless it
    /// is read-only. No other thread may write what the kernel reads, or access what it writes.
    pub unsafe fn run(&self, kernel: &str, launch: &Launch, schedule: &Schedule) -> Result<Functional> {
        // SAFETY: promised by the caller.
        unsafe { self.prepare_launch(kernel, launch) }?.functional(schedule)
    }

    /// Time one SM's share of a launch and estimate the whole. The extents are only read: the kernel works on a copy of the writable ones.
    ///
    /// # Errors
    /// As [`Module::run`], or the options make no sense.
    ///
    /// # Safety
    /// Every extent must be valid for reads of its length until this returns, and no other thread may write it.
    pub unsafe fn time(&self, kernel: &str, launch: &Launch, options: &TimingOptions) -> Result<TimingReport> {
        // SAFETY: promised by the caller; only copies of writable extents are written.
        let prepared = unsafe { self.prepare_launch(kernel, launch) }?;
        let (timing, _) = prepared.timing(options)?;
        Ok(TimingReport { launch: prepared.info(&options.machine)?, timing })
    }

    /// # Safety
    /// The extents stay valid while the result is used.
    unsafe fn prepare_launch(&self, kernel: &str, l: &Launch) -> Result<Prepared<'_>> {
        let mut mem = GlobalMem::default();
        for e in l.extents {
            // SAFETY: promised by the caller.
            unsafe { mem.map(e.name, e.ptr, e.len, !e.read_only, e.exchanged) }?;
        }
        self.prepare(self.kernel(kernel)?, Shape { grid: l.grid, block: l.block, dynamic_smem: l.dynamic_smem }, &[l.params], mem)
    }

    /// Checks a launch against its kernel and fills the constant banks. `params`: the bytes of each parameter; `mem`: the launch's buffers.
    pub(crate) fn prepare<'m>(
        &'m self,
        kernel: &'m Kernel,
        shape: Shape,
        params: &[impl AsRef<[u8]>],
        mut mem: GlobalMem,
    ) -> Result<Prepared<'m>> {
        let Kernel { meta, info, .. } = kernel;
        shape.check(info)?;
        // what the cubin records (min_stack, frame) with a reserve, in bytes, a multiple of 16
        let local_bytes = LOCAL_MIN.max((meta.min_stack.max(meta.frame).saturating_add(1024 + 15)) & !15);
        if local_bytes > LOCAL_MAX {
            return Err(format!("kernel `{}` needs {local_bytes} bytes of local memory per thread", info.name).into());
        }
        let mut c0 = constant0(info, &shape, local_bytes, params)?;
        let c4 = self.globals(&mut mem)?;
        // c[0x0][0x40] is the generic address of bank 0 itself (parameters accessed by reference); false: kernels cannot write it
        let at = mem.alloc("constant bank 0", &c0, false);
        c0[0x40..0x48].copy_from_slice(&at.to_le_bytes());
        // banks 2 (per kernel), 3 (__constant__) and 4 (addresses of globals)
        let section = |n: &str| self.cubin.section(n).map(|s| s.data.clone()).unwrap_or_default();
        let banks = [c0, vec![], section(&format!(".nv.constant2.{}", info.name)), section(".nv.constant3"), c4];
        Ok(Prepared { module: self, kernel, mem, banks, shape, local_bytes })
    }

    /// Allocate the module's `__device__` variables and return bank 4, which holds their addresses.
    fn globals(&self, mem: &mut GlobalMem) -> Result<Vec<u8>> {
        let mut address = HashMap::new();
        for (i, s) in self.cubin.sections.iter().enumerate() {
            if s.name == ".nv.global" || s.name == ".nv.global.init" {
                let mut d = s.data.clone();
                d.resize(s.size as usize, 0);
                address.insert(i as u16, mem.alloc(&s.name, &d, true));
            }
        }
        let mut bank = self.cubin.section(".nv.constant4").map(|s| s.data.clone()).unwrap_or_default();
        for Relocation { offset, symbol, kind, addend } in self.cubin.relocations(".nv.constant4") {
            let s = self.cubin.symbols.get(symbol).ok_or_else(|| format!("relocation against symbol {symbol}, which does not exist"))?;
            let dst = usize::try_from(offset).ok().and_then(|o| bank.get_mut(o..o.checked_add(8)?));
            if let (Some(&a), Some(dst)) = (address.get(&s.section), dst) {
                if kind != R_CUDA_64 {
                    return Err(format!("relocation type {kind} in .nv.constant4").into());
                }
                dst.copy_from_slice(&a.wrapping_add(s.value).wrapping_add(addend as u64).to_le_bytes());
            }
        }
        Ok(bank)
    }
}

/// Minimum local memory per thread in bytes. It and 1 KB beyond the compiler's figure leave room for recursion.
const LOCAL_MIN: u32 = 2048;
/// The hardware's limit in bytes.
const LOCAL_MAX: u32 = 512 * 1024;
/// Relocation of a 64-bit absolute address.
const R_CUDA_64: u32 = 2;

/// Returns constant bank 0, at the offsets that compiled code reads: dimensions, stack pointer, parameters.
fn constant0(info: &KernelInfo, shape: &Shape, local_bytes: u32, params: &[impl AsRef<[u8]>]) -> Result<Vec<u8>> {
    if params.len() != info.params.len() {
        return Err(format!("kernel `{}` takes {} parameters, {} given", info.name, info.params.len(), params.len()).into());
    }
    let mut c0 = vec![0u8; PARAM_BASE as usize + info.param_bytes.max(4096) as usize];
    let mut put = |o: usize, v: u32| c0[o..o + 4].copy_from_slice(&v.to_le_bytes());
    for i in 0..3 {
        put(4 * i, shape.block[i]);
        put(0xc + 4 * i, shape.grid[i]);
    }
    put(0x28, local_bytes); // initial stack pointer
    put(0x1c, (SHARED_WINDOW >> 32) as u32); // base of shared memory's generic addresses, low word 0
    for (p, data) in info.params.iter().zip(params) {
        let data = data.as_ref();
        if data.len() != p.size as usize {
            return Err(format!("parameter {} of `{}` has {} bytes, {} given", p.ordinal, info.name, p.size, data.len()).into());
        }
        let at = (PARAM_BASE + p.offset) as usize;
        c0.get_mut(at..at + data.len()).ok_or("parameter outside the parameter space".to_string())?.copy_from_slice(data);
    }
    Ok(c0)
}

/// A launch with its program, memory and constants, ready to simulate.
pub(crate) struct Prepared<'m> {
    module: &'m Module,
    kernel: &'m Kernel,
    pub mem: GlobalMem,
    banks: Banks,
    shape: Shape,
    local_bytes: u32,
}

impl Prepared<'_> {
    fn smem(&self) -> u32 {
        self.shape.dynamic_smem.saturating_add(self.kernel.info.static_smem)
    }

    /// Returns an error if the machine's constants are wrong, or no CTA fits an SM.
    fn occupancy(&self, m: &Machine) -> Result<Occupancy> {
        m.check()?;
        let (smem, threads, regs) = (self.smem(), self.shape.threads(), self.kernel.info.registers);
        if smem > m.smem_per_sm {
            return Err(format!("{smem} bytes of shared memory per CTA, the SM has {}", m.smem_per_sm).into());
        }
        let occ = m.occupancy(regs, smem, threads);
        if occ.ctas == 0 {
            return Err(format!("no CTA fits an SM: {regs} registers x {threads} threads").into());
        }
        Ok(occ)
    }

    /// The part of a report that needs no simulation.
    pub fn info(&self, m: &Machine) -> Result<LaunchInfo> {
        Ok(LaunchInfo::new(&self.kernel.info, &self.shape, self.occupancy(m)?))
    }

    /// `threads`: of the host, which simulate CTAs at the same time.
    fn env<'a>(&'a self, mem: &'a GlobalMem, threads: usize) -> Env<'a> {
        Env {
            prog: &self.kernel.prog,
            mem,
            banks: &self.banks,
            grid: self.shape.grid,
            block: self.shape.block,
            smem_bytes: self.smem(),
            local_bytes: self.local_bytes,
            lock_atomics: threads > 1,
            isa: HostIsa::detect(),
        }
    }

    /// Execute the grid on the launch's memory.
    pub fn functional(&self, s: &Schedule) -> Result<Functional> {
        self.occupancy(&self.module.machine())?;
        let start = Instant::now();
        let insts = run::functional(&self.env(&self.mem, s.threads), s.threads, s.quantum.max(1))?;
        Ok(Functional::new(insts, start.elapsed()))
    }

    /// Time one SM's share on a copy of the launch's memory, which is returned too.
    pub fn timing(&self, o: &TimingOptions) -> Result<(Timing, GlobalMem)> {
        let m = &o.machine;
        if m.sm != self.module.sm() {
            return Err(format!("the cubin is for sm_{}, a {} runs sm_{}", self.module.sm(), m.name, m.sm).into());
        }
        let occ = self.occupancy(m)?;
        if let Some(sm) = o.sm.filter(|&sm| sm >= m.sms) {
            return Err(format!("SM {sm} of {}", m.sms).into());
        }
        let mut scratch = self.mem.scratch();
        // the CTAs of the SM to time, their costs, and how many SMs share the bandwidth (busy_sms)
        let share = match o.dispatch {
            Dispatch::Static => run::static_share(&self.env(&scratch, 1), m, o.sm.unwrap_or(0)),
            Dispatch::Dynamic => run::dynamic_share(&self.env(&scratch, 1), m, occ.ctas, o.sm)?,
        };
        scratch.restore(&self.mem);
        let n = o.ctas.unwrap_or(usize::MAX).min(share.ctas.len());
        let env = self.env(&scratch, 1);
        let mut sim = SmSim::new(&env, m, occ.ctas, self.smem(), share.busy_sms);
        let start = Instant::now();
        sim.run(&share.ctas[..n])?;
        let mut timing = Timing::new(&env, &sim, &share, n, m, o.flops, start.elapsed());
        timing.listing = o.annotate.then(|| report::annotate(&env, &sim));
        Ok((timing, scratch))
    }
}
