//! Functional model: executes one warp instruction at a time. What each does: [`crate::ops`].

use crate::cta::Cta;
use crate::env::{Env, HostIsa};
use crate::ops::{Class, Op};
use crate::step::{Access, SimResult, Step};
use crate::warp::Group;

/// An instruction's loops run over 32-lane arrays: AVX2 lets LLVM vectorise them, FMA makes
/// `f32::mul_add` an instruction instead of a libm call. Each class is a function of its own: in one
/// for all of them, LLVM vectorises less.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
fn execute_avx2(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(never)]
fn execute_baseline(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(always)]
fn execute(op: impl Class, s: &mut Step) -> SimResult<()> {
    match s.env.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `HostIsa::detect` found these features on this CPU.
        HostIsa::Avx2 => unsafe { execute_avx2(op, s) },
        HostIsa::Baseline => execute_baseline(op, s),
    }
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
        let m = together & w.p(inst.guard);
        acc.mask = m;
        acc.taken = false;
        w.insts += 1;
        w.groups[group].pc = pc + 16;

        let mut s = Step { env, inst, w, group, together, m, shared: &mut self.shared, cta: &self.id, now, acc, arrival: None };
        match inst.op {
            Op::Integer(op) => execute(op, &mut s)?,
            Op::Bits(op) => execute(op, &mut s)?,
            Op::Predicate(op) => execute(op, &mut s)?,
            Op::Select(op) => execute(op, &mut s)?,
            Op::Float(op) => execute(op, &mut s)?,
            Op::SpecialFunction(op) => execute(op, &mut s)?,
            Op::Double(op) => execute(op, &mut s)?,
            Op::PackedHalf(op) => execute(op, &mut s)?,
            Op::Tensor(op) => execute(op, &mut s)?,
            Op::Conversion(op) => execute(op, &mut s)?,
            Op::WarpWide(op) => execute(op, &mut s)?,
            Op::Memory(op) => execute(op, &mut s)?,
            Op::Atomic(op) => execute(op, &mut s)?,
            Op::SpecialRegister(op) => execute(op, &mut s)?,
            Op::Convergence(op) => execute(op, &mut s)?,
            Op::Branch(op) => execute(op, &mut s)?,
            Op::Barrier(op) => execute(op, &mut s)?,
            Op::Nop => {}
            Op::Undecodable => return Err(format!("kernel `{}`: {}", env.prog.name, inst.text)),
        }
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
