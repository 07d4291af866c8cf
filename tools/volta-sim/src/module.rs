//! A cubin (a file of machine code for one architecture), disassembled and decoded once for many launches (`launch`).

use crate::disasm::{self, Listing};
use crate::elf::{Cubin, KernelMeta, Param};
use crate::env::Program;
use crate::isa::{Inst, Memory, Op, Reg, Space, SrcKind, RZ};
use crate::machine::Machine;
use crate::ops;
use crate::Result;
use serde::Serialize;
use std::path::Path;

/// A cubin for sm_70 or sm_75: all its kernels, decoded. Loading runs nvdisasm, which takes up to a second for a large kernel: keep it for
/// all launches. Threads can share it.
pub struct Module {
    pub(crate) cubin: Cubin,
    kernels: Vec<Kernel>,
}

pub(crate) struct Kernel {
    /// what the cubin records
    pub meta: KernelMeta,
    /// the same and what the code shows, for callers
    pub info: KernelInfo,
    /// the decoded code
    pub prog: Program,
    /// nvdisasm's text
    sass: String,
}

/// What is known about a kernel without running it. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct KernelInfo {
    /// mangled name
    pub name: String,
    pub registers: u32,
    pub static_smem: u32,
    pub param_bytes: u32,
    pub params: Vec<Param>,
    /// maximum threads per CTA it was compiled for; 0 if the cubin does not say
    pub max_threads: u32,
    /// local-memory frame of a thread (spills, arrays, stack), in bytes
    pub frame_bytes: u32,
    /// instructions in the code that access local memory (LDL, STL)
    pub spill_insts: usize,
    pub code_bytes: usize,
    /// why some instructions could not be decoded: executing one of them is an error
    pub undecoded: Vec<String>,
}

impl Module {
    /// Load a cubin, with the nvdisasm named by `$VOLTA_SIM_NVDISASM` or found on `PATH`.
    ///
    /// # Errors
    /// See [`Module::load_with`].
    pub fn load(cubin: &[u8]) -> Result<Module> {
        Module::load_with(cubin, None) // None: find nvdisasm
    }

    /// Load a cubin, with the given nvdisasm if there is one.
    ///
    /// # Errors
    /// The bytes are no cubin for sm_70 or sm_75, nvdisasm is not found, or it fails. Instructions that the simulator
    /// does not know are no error until they are executed.
    pub fn load_with(cubin: &[u8], nvdisasm: Option<&Path>) -> Result<Module> {
        let parsed = Cubin::parse(cubin)?;
        let mut listings = disasm::disassemble(cubin, nvdisasm)?;
        let kernels = parsed
            .kernels
            .iter()
            .map(|meta| {
                let listing = listings.remove(&meta.name).ok_or_else(|| format!("nvdisasm printed no code for `{}`", meta.name))?;
                Kernel::decode(meta, listing)
            })
            .collect::<std::result::Result<_, String>>()?;
        Ok(Module { cubin: parsed, kernels })
    }

    /// The architecture it was compiled for, 70 for sm_70.
    pub fn sm(&self) -> u32 {
        self.cubin.sm
    }

    /// Returns the constants of the first GPU that runs it: the V100 for sm_70, the T4 for sm_75.
    pub(crate) fn machine(&self) -> Machine {
        Machine::of_sm(self.sm()).unwrap_or_default()
    }

    /// Mangled names of the kernels.
    pub fn kernel_names(&self) -> impl Iterator<Item = &str> {
        self.kernels.iter().map(|k| k.info.name.as_str())
    }

    /// Static facts about a kernel, given its name or a unique part of it.
    ///
    /// # Errors
    /// There is no such kernel, or more than one.
    pub fn kernel_info(&self, kernel: &str) -> Result<&KernelInfo> {
        Ok(&self.kernel(kernel)?.info)
    }

    /// The section of a kernel as nvdisasm prints it, without encodings.
    ///
    /// # Errors
    /// There is no such kernel, or more than one.
    pub fn sass_text(&self, kernel: &str) -> Result<&str> {
        Ok(&self.kernel(kernel)?.sass)
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<&Kernel> {
        if let Some(k) = self.kernels.iter().find(|k| k.info.name == name) {
            return Ok(k);
        }
        let mut partial = self.kernels.iter().filter(|k| k.info.name.contains(name));
        match (partial.next(), partial.next()) {
            (Some(k), None) => Ok(k),
            (first, _) => {
                let what = if first.is_some() { "is not unique" } else { "not found" };
                let names: Vec<&str> = self.kernel_names().collect();
                Err(format!("kernel `{name}` {what}; the cubin has: {}", names.join(", ")).into())
            }
        }
    }
}

impl Kernel {
    /// Decodes a kernel's listing. Fails if an instruction is not where the one before ends, 16 bytes on.
    fn decode(meta: &KernelMeta, listing: Listing) -> std::result::Result<Kernel, String> {
        let mut code = vec![];
        for r in &listing.insts {
            // an instruction that cannot be decoded is an error only when it executes (asserts have some)
            code.push(ops::decode(r, &listing.labels).unwrap_or_else(|why| ops::undecodable(r, why)));
        }
        if let Some(c) = code.iter().enumerate().find_map(|(i, c)| (c.pc as usize != i * 16).then_some(c)) {
            return Err(format!("kernel `{}`: unexpected pc 0x{:x} in the disassembly", meta.name, c.pc));
        }
        let local = |i: &&Inst| matches!(i.op, Op::Memory(Memory::Ld { space: Space::Local, .. } | Memory::St { space: Space::Local, .. }));
        let info = KernelInfo {
            name: meta.name.clone(),
            registers: meta.regs,
            static_smem: meta.static_smem,
            param_bytes: meta.param_size,
            params: meta.params.clone(),
            max_threads: meta.max_threads,
            frame_bytes: meta.frame,
            spill_insts: code.iter().filter(local).count(),
            code_bytes: code.len() * 16,
            undecoded: code.iter().filter(|c| c.op == Op::Undecodable).map(|c| c.text.clone()).collect(),
        };
        let reg_file = code.iter().flat_map(registers).fold(meta.regs as usize, |n, r| n.max(r as usize + 1)) + WIDEST;
        let prog = Program { name: meta.name.clone(), code, reg_file };
        Ok(Kernel { meta: meta.clone(), info, prog, sass: listing.text })
    }
}

/// Maximum consecutive registers of one operand, which names the first alone.
const WIDEST: usize = 4;

fn registers(inst: &Inst) -> impl Iterator<Item = Reg> + '_ {
    let sources = inst.src.iter().filter(|s| s.kind == SrcKind::Reg).map(|s| s.val as Reg);
    sources.chain([inst.dst, inst.mem.base, inst.mem.uniform]).filter(|&r| r != RZ)
}

/// Grid (CTAs along x, y, z), block (threads) and dynamic shared memory (bytes of a CTA) of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_smem: u32,
}

impl Shape {
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
