//! Atomic operations on global and shared memory. Lanes execute in order of their number. `d` decodes an instruction: its calls read the
//! printed operands from left to right. `s` executes it: `s.access.addr` has the lanes' addresses, which `addresses` computes, `s.active`
//! the lanes that execute, a bit each. `s.warp.hint` is the buffer of global memory that the warp accessed last, where the search for an
//! address begins. Tests: tests/functional.rs.

use super::memory::{addresses, global_fault, in_shared_window};
use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for Atomic {
    fn decode(d: &mut Decoder) -> Decoded {
        // RED returns no old value; ATOM takes generic addresses, of global or shared memory
        if !["RED", "ATOM", "ATOMG", "ATOMS"].contains(&d.base) {
            return Ok(None);
        }
        let ret = d.base != "RED";
        if ret {
            d.opt_pred_dsts(2).dst()?;
        }
        d.address()?;
        use {AtomOp::*, AtomTy::*};
        #[rustfmt::skip]
        let op = d.one_of(&[
            ("ADD", Add), ("MIN", Min), ("MAX", Max), ("AND", And), ("OR", Or), ("XOR", Xor), ("EXCH", Exch), ("CAS", Cas), ("CAST", Cas),
            ("INC", Inc), ("DEC", Dec),
        ]);
        let ty = d.one_of(&[("S32", S32), ("64", U64), ("U64", U64), ("S64", S64), ("F32", F32), ("F16x2", F16x2)]).unwrap_or(U32);
        if d.has("F64") {
            return Err(d.fail("F64 atomics"));
        }
        d.src(0)?;
        if d.src_follows() {
            d.src(1)?;
        }
        let space = if d.base == "ATOMS" { Space::Shared } else { Space::Global };
        let op = op.ok_or_else(|| d.fail("atomic operation"))?;
        d.inst.unit = Unit::Lsu;
        Ok(Some(Op::Atomic(Atomic { space, generic: d.base == "ATOM", op, ty, ret, spin: d.has("SPIN") })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        addresses(s);
        let wide = self.wide();
        let n = if wide { 8u64 } else { 4 }; // bytes
        let (s0, s1) = if wide {
            // CAS compares with src[0] and stores src[1]
            (s.int64(0)?, s.int64(1)?)
        } else {
            (s.bits(0)?.each(|x| x as u64), s.bits(1)?.each(|x| x as u64))
        };
        let env = s.env;
        // ATOM leaves out lanes with addresses in shared memory: its predicate, false there, has the code after it do their operation
        let elsewhere = if self.generic { s.active & in_shared_window(s) } else { 0 };
        let _guard = (env.lock_atomics && self.space == Space::Global).then(|| env.mem.lock_atomics());
        let mut old = [0u64; 32];
        for l in lanes_in(s.active & !elsewhere) {
            let a = s.access.addr[l];
            let p = if self.space == Space::Shared {
                if a + n > s.shared.len() as u64 {
                    return Err(s.fault(l, "shared atomic out of bounds", a, n, ""));
                }
                // SAFETY: the offset is inside the CTA's memory.
                unsafe { s.shared.as_mut_ptr().add(a as usize) }
            } else {
                let write = true; // a read-only buffer is a fault
                env.mem.find(a, n, write, &mut s.warp.hint).ok_or_else(|| global_fault(s, l, "atomic", a, n))?
            };
            if a & (n - 1) != 0 {
                return Err(s.fault(l, "misaligned atomic", a, n, ""));
            }
            // SAFETY: `n` bytes at `p` may be read and written.
            unsafe {
                let cur = if wide { (p as *const u64).read_unaligned() } else { (p as *const u32).read_unaligned() as u64 };
                let new = self.apply(cur, s0[l], s1[l]);
                if wide {
                    (p as *mut u64).write_unaligned(new);
                } else {
                    (p as *mut u32).write_unaligned(new as u32);
                }
                // CAS.SPIN returns whether it swapped, not the old value
                old[l] = if self.spin { (cur == s0[l]) as u64 } else { cur };
            }
        }
        if self.ret {
            if wide {
                s.write64(&old);
            } else {
                s.write(&old.each(|x| x as u32));
            }
            // the first predicate: the lane's operation is done
            s.set_predicate(0, !elsewhere);
        }
        Ok(())
    }
}

impl Atomic {
    /// Returns what memory that held `cur` holds afterwards. `a` is the operand; CAS stores `b` if it finds `a`.
    #[inline(always)]
    fn apply(self, cur: u64, a: u64, b: u64) -> u64 {
        match self.op {
            AtomOp::Exch => a,
            AtomOp::Cas if cur == a => b,
            AtomOp::Cas => cur,
            AtomOp::And => cur & a,
            AtomOp::Or => cur | a,
            AtomOp::Xor => cur ^ a,
            AtomOp::Inc if cur >= a => 0,
            AtomOp::Inc => cur + 1,
            AtomOp::Dec if cur == 0 || cur > a => a,
            AtomOp::Dec => cur - 1,
            AtomOp::Add => match self.ty {
                AtomTy::F32 => (f32::from_bits(cur as u32) + f32::from_bits(a as u32)).to_bits() as u64,
                AtomTy::F16x2 => {
                    let f = |s: u32| f2h(h2f((cur >> s) as u16) + h2f((a >> s) as u16)) as u64;
                    f(0) | f(16) << 16
                }
                AtomTy::U64 | AtomTy::S64 => cur.wrapping_add(a),
                _ => (cur as u32).wrapping_add(a as u32) as u64,
            },
            AtomOp::Min | AtomOp::Max => {
                let less = match self.ty {
                    AtomTy::S32 => (cur as i32) < (a as i32),
                    AtomTy::S64 => (cur as i64) < (a as i64),
                    _ => cur < a,
                };
                match less == (self.op == AtomOp::Min) {
                    true => cur,
                    false => a,
                }
            }
        }
    }
}
