//! One warp instruction while it executes: the operands it reads, the results it writes, the faults it stops with; and the interface
//! of a class of instructions. Every function is inlined into the instructions that call it, so that it is compiled with the same
//! vector instructions of the host ([`crate::ops`]).

use crate::cta::Arrival;
use crate::decoder::{Decoded, Decoder};
use crate::env::Env;
use crate::half::{f2h_rz, h2f};
use crate::isa::*;
use crate::lanes::*;
use crate::warp::Warp;

/// What the timing model needs of an instruction's execution.
#[derive(Default)]
pub struct Access {
    /// lanes that the instruction executed: `Step::active`
    pub mask: u32,
    /// addresses of the active lanes, for memory instructions
    pub addr: [u64; 32],
    /// whether a branch or call moved threads
    pub taken: bool,
}

/// A result of simulated code. The error text names the kernel and pc, and mostly the instruction too.
pub type SimResult<T> = Result<T, String>;

/// A class of instructions; a value is one operation with its modifiers. The files of [`crate::ops`] implement it for enums of `isa/op.rs`.
pub trait Class: Copy {
    /// Returns None for mnemonics of other classes. Reads operands and unit into `d.inst`.
    fn decode(d: &mut Decoder) -> Decoded;

    /// Executes it for the lanes of `s.active`. To be inlined: it is compiled for each instruction set of the host.
    fn execute(self, s: &mut Step) -> SimResult<()>;
}

/// A warp instruction in execution, and all that it may read or write.
pub struct Step<'a> {
    pub env: &'a Env<'a>,
    pub inst: &'a Inst,
    pub warp: &'a mut Warp,
    /// index of the group of threads that executes
    pub group: usize,
    /// lanes of the group, whose threads share a pc
    pub group_mask: u32,
    /// lanes that it executes: threads of the group whose guard holds, or for a uniform destination all lanes whose guard holds
    pub active: u32,
    /// the CTA's shared memory and index
    pub shared: &'a mut [u8],
    pub cta: &'a [u32; 3],
    /// value of the clock registers: cycles in a timing run, else instructions of the CTA so far
    pub now: u64,
    pub access: &'a mut Access,
    /// set by a BAR, for the CTA
    pub arrival: Option<Arrival>,
}

impl Step<'_> {
    // ---- source i of all lanes with its modifiers (sign, absolute value, inversion): as u32, f32, u64, f64, two halves; 64 bits are a
    // register and the next one ----

    /// The bits of a source, modifiers ignored.
    #[inline(always)]
    pub fn bits(&self, i: usize) -> SimResult<V> {
        let s = &self.inst.src[i];
        Ok(match s.kind {
            SrcKind::Reg => self.warp.reg(s.val as Reg),
            SrcKind::Imm => [s.val; 32],
            SrcKind::Const => [self.constant(s.bank, s.val)?; 32],
        })
    }
    #[inline(always)]
    pub fn int(&self, i: usize) -> SimResult<V> {
        let mut v = self.bits(i)?;
        let s = &self.inst.src[i];
        if s.inv {
            v = v.each(|x| !x);
        }
        if s.abs {
            v = v.each(|x| (x as i32).wrapping_abs() as u32);
        }
        if s.neg {
            v = v.each(|x| x.wrapping_neg());
        }
        Ok(v)
    }
    #[inline(always)]
    pub fn f32(&self, i: usize) -> SimResult<[f32; 32]> {
        let v = self.bits(i)?;
        let s = &self.inst.src[i];
        let (and, xor) = (if s.abs { 0x7fff_ffff } else { !0u32 }, if s.neg { 0x8000_0000u32 } else { 0 });
        Ok(v.each(|x| f32::from_bits((x & and) ^ xor)))
    }
    /// 64 bits of a register pair or constant; `imm` widens an immediate.
    #[inline(always)]
    fn bits64(&self, s: &Src, imm: impl Fn(u32) -> u64) -> SimResult<[u64; 32]> {
        Ok(match s.kind {
            SrcKind::Reg if s.val == RZ as u32 => [0; 32],
            SrcKind::Reg => pair(&self.warp.reg(s.val as Reg), &self.warp.reg(s.val as Reg + 1)),
            SrcKind::Imm => [imm(s.val); 32],
            SrcKind::Const => [(self.constant(s.bank, s.val)? as u64) | (self.constant(s.bank, s.val + 4)? as u64) << 32; 32],
        })
    }
    #[inline(always)]
    pub fn int64(&self, i: usize) -> SimResult<[u64; 32]> {
        let s = &self.inst.src[i];
        let mut v = self.bits64(s, |imm| imm as i32 as i64 as u64)?;
        if s.inv {
            v = v.each(|x| !x);
        }
        if s.neg {
            v = v.each(|x| x.wrapping_neg());
        }
        Ok(v)
    }
    #[inline(always)]
    pub fn f64(&self, i: usize) -> SimResult<[f64; 32]> {
        let s = &self.inst.src[i];
        // an immediate holds the high word
        let v = self.bits64(s, |imm| (imm as u64) << 32)?;
        let (and, xor) = (if s.abs { !0 >> 1 } else { !0u64 }, if s.neg { 1u64 << 63 } else { 0 });
        Ok(v.each(|x| f64::from_bits((x & and) ^ xor)))
    }
    /// (low halves, high halves) as f32
    #[inline(always)]
    pub fn halves(&self, i: usize) -> SimResult<([f32; 32], [f32; 32])> {
        let v = self.bits(i)?;
        let s = &self.inst.src[i];
        let (and, xor) = (if s.abs { 0x7fff_7fff } else { !0u32 }, if s.neg { 0x8000_8000u32 } else { 0 });
        // An F32 source of a half instruction rounds toward zero. ptxas emits one for cvt.rz.f16.f32, and for constants kept in fp32.
        let pair = |x: u32| if s.sel == Sel::F32 { f2h_rz(f32::from_bits(x)) as u32 * 0x1_0001 } else { x };
        let v = v.each(|x| (pair(x) & and) ^ xor);
        let lo = v.each(|x| h2f(x as u16));
        let hi = v.each(|x| h2f((x >> 16) as u16));
        Ok(match s.sel {
            Sel::H0H0 => (lo, lo),
            Sel::H1H1 => (hi, hi),
            _ => (lo, hi),
        })
    }
    /// Source predicate `i`, a bit per lane.
    #[inline(always)]
    pub fn predicate(&self, i: usize) -> u32 {
        self.warp.predicate(self.inst.pred_src[i])
    }

    #[inline(always)]
    fn constant(&self, bank: u8, off: u32) -> SimResult<u32> {
        let b = self.env.banks.get(bank as usize).map(|b| b.as_slice()).unwrap_or(&[]);
        let word = b.get(off as usize..).and_then(|b| b.first_chunk());
        word.map(|&word| u32::from_le_bytes(word)).ok_or_else(|| self.constant_fault(bank, off, b.len()))
    }

    // ---- results, of the active lanes -----------------------------------------------------

    #[inline(always)]
    pub fn write(&mut self, v: &V) {
        self.warp.write(self.inst.dst, v, self.active);
    }
    #[inline(always)]
    pub fn write64(&mut self, v: &[u64; 32]) {
        self.warp.write64(self.inst.dst, v, self.active);
    }
    /// Destination predicate `i`, a bit per lane.
    #[inline(always)]
    pub fn set_predicate(&mut self, i: usize, val: u32) {
        self.warp.set_predicate(self.inst.pred_dst[i], val, self.active);
    }
    /// First predicate: `r op p`; second: `!r op p`.
    #[inline(always)]
    pub fn set_predicates(&mut self, r: u32, bop: BoolOp) {
        let p = self.predicate(0);
        self.set_predicate(0, combine(r, p, bop));
        self.set_predicate(1, combine(!r, p, bop));
    }

    /// Returns true if all lanes execute, false if none does. Matrix instructions need the whole warp, so otherwise it is an error.
    #[inline(always)]
    pub fn has_whole_warp(&self, name: &str) -> SimResult<bool> {
        match self.active {
            0 => Ok(false),
            u32::MAX => Ok(true),
            mask => Err(self.refuse(&format!("{name} with a partial warp (mask {mask:#x})"))),
        }
    }

    // ---- faults ------------------------------------------------------------------------------

    /// Returns the error of an instruction that does something the simulator lacks.
    #[cold]
    pub fn refuse(&self, what: &str) -> String {
        format!("kernel `{}`: {what} at pc 0x{:x} `{}`", self.env.prog.name, self.inst.pc, self.inst.text)
    }
    #[cold]
    fn constant_fault(&self, bank: u8, off: u32, len: usize) -> String {
        format!(
            "kernel `{}`: constant c[{bank:#x}][{off:#x}] at pc 0x{:x} is outside the bank ({len} bytes)",
            self.env.prog.name, self.inst.pc
        )
    }
    /// Returns the error of a wrong access by a lane.
    #[cold]
    pub fn fault(&self, lane: usize, what: &str, addr: u64, bytes: u64, extra: &str) -> String {
        let [x, y, z] = self.cta;
        format!(
            "{}: CTA ({x},{y},{z}) warp {} lane {lane} address {addr:#x} ({bytes} bytes){}{extra}",
            self.refuse(what),
            self.warp.index,
            if extra.is_empty() { "" } else { ": " },
        )
    }
}
