//! Decodes and executes the instructions, by classes. A new class is an enum in `isa/op.rs`, an `impl Class` in a file of its kind, and a
//! word in `classes!`.

use crate::cta::Cta;
use crate::decoder::{blank, Decoded, Decoder};
use crate::disasm::RawInst;
use crate::env::{Env, HostIsa};
use crate::isa::*;
use crate::step::{Access, SimResult, Step};
use crate::warp::Group;
use class::Class;
use std::collections::HashMap;

mod atomic;
mod bits;
mod branch;
mod class;
mod conversion;
mod float;
mod integer;
pub mod memory;
mod packed_half;
mod select;
mod special_register;
mod tensor;
mod uniform;
mod warp_wide;

/// Decodes one instruction. The error names the instruction and its pc.
pub fn decode(raw: &RawInst, labels: &HashMap<String, u32>) -> Result<Inst, String> {
    let mut d = Decoder::new(raw, labels)?;
    match operation(&mut d)? {
        Some(op) => Ok(Inst { op, ..d.inst }),
        None => Err(d.fail("unknown opcode")),
    }
}

/// Stands in for an instruction that [`decode`] refused: executing it stops with `why`.
pub fn undecodable(raw: &RawInst, why: String) -> Inst {
    Inst { op: Op::Undecodable, unit: Unit::Ctl, mnemonic: "UNDECODABLE".to_string(), text: why, ..blank(raw) }
}

impl Cta {
    /// Execute the next instruction of warp `wi`. The caller has checked that the warp is runnable.
    /// `now` feeds the clock registers. Returns the index of the executed instruction.
    pub fn step(&mut self, wi: usize, env: &Env, now: u64, acc: &mut Access) -> SimResult<usize> {
        let w = &mut self.warps[wi];
        let group = match w.select() {
            Some(g) => g,
            None => return Err(format!("kernel `{}`: warp {wi} stepped while blocked", env.prog.name)),
        };
        let Group { pc, mask: together, .. } = w.groups[group];
        let idx = (pc / 16) as usize;
        let Some(inst) = env.prog.code.get(idx) else {
            return Err(format!("kernel `{}`: pc 0x{pc:x} outside the code", env.prog.name));
        };
        let m = (together | inst.everywhere) & w.p(inst.guard);
        acc.mask = m;
        acc.taken = false;
        w.insts += 1;
        w.groups[group].pc = pc + 16;

        let mut s = Step { env, inst, w, group, together, m, shared: &mut self.shared, cta: &self.id, now, acc, arrival: None };
        execute(inst.op, &mut s)?;
        if let Some(arrival) = s.arrival {
            if !self.arrive(wi, arrival) {
                return Ok(idx);
            }
        } else if s.w.done() {
            self.warp_exited();
        }
        let w = &mut self.warps[wi];
        if w.groups.len() > 1 {
            // let the other side of a divergent spin loop make progress
            if w.insts % 4096 == 0 {
                w.cur = (w.cur + 1) % w.groups.len();
            }
            w.merge_current();
        }
        Ok(idx)
    }
}

/// Hints, and maintenance of caches that are not simulated (but for CCTL.PF2, a prefetch: `is_prefetch`).
const WITHOUT_EFFECT: [&str; 7] = ["NOP", "PREEXIT", "NANOSLEEP", "ERRBAR", "CCTL", "CCTLL", "CCTLT"];

/// An instruction's loops run over 32-lane arrays: AVX2 lets LLVM vectorise them, FMA makes
/// `f32::mul_add` an instruction instead of a libm call. Each class is a function of its own: in one
/// for all of them, LLVM vectorises less.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
fn run_avx2(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(never)]
fn run_baseline(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(always)]
fn run(op: impl Class, s: &mut Step) -> SimResult<()> {
    match s.env.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `HostIsa::detect` found these features on this CPU.
        HostIsa::Avx2 => unsafe { run_avx2(op, s) },
        HostIsa::Baseline => run_baseline(op, s),
    }
}

macro_rules! classes {
    ($($class:ident),* $(,)?) => {
        /// Returns the operation of an instruction, and reads its operands.
        fn operation(d: &mut Decoder) -> Decoded {
            if WITHOUT_EFFECT.contains(&d.base) && !memory::is_prefetch(d) {
                d.inst.unit = Unit::Ctl;
                return Ok(Some(Op::Nop));
            }
            let scalar = uniform::as_vector(d)?;
            $(if let Some(op) = $class::decode(d)? {
                if scalar {
                    d.inst.unit = Unit::Uniform;
                }
                return Ok(Some(op));
            })*
            Ok(None)
        }

        #[inline(always)]
        fn execute(op: Op, s: &mut Step) -> SimResult<()> {
            match op {
                Op::Nop => Ok(()),
                Op::Undecodable => Err(format!("kernel `{}`: {}", s.env.prog.name, s.inst.text)),
                $(Op::$class(op) => run(op, s)),*
            }
        }
    };
}

classes! {
    Integer, Bits, Predicate, Select, Float, SpecialFunction, Double, PackedHalf, Tensor, Conversion, WarpWide, Memory, Atomic,
    SpecialRegister, Barrier, Branch, Convergence, Uniform,
}
