//! Decodes and executes the instructions, by classes. A new class is an enum in `isa/op.rs`, an `impl Class` here, a word in `classes!`.

use crate::cta::Cta;
use crate::decoder::{blank, Decoded, Decoder};
use crate::disasm::RawInst;
use crate::env::{Env, HostIsa};
use crate::isa::*;
use crate::step::{Access, Class, SimResult, Step};
use crate::warp::Group;
use std::collections::HashMap;

mod atomic;
mod bits;
mod branch;
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

/// Returns an instruction for one that [`decode`] refused: executing it stops with `why`.
pub fn undecodable(raw: &RawInst, why: String) -> Inst {
    Inst { op: Op::Undecodable, unit: Unit::Ctl, mnemonic: "UNDECODABLE".to_string(), text: why, ..blank(raw) }
}

impl Cta {
    /// Executes the next instruction of warp `warp_index`, which must be runnable. Returns the instruction's index in the code. `now`
    /// feeds the clock registers. `access` receives the lanes, addresses and branch for the timing model.
    pub fn step(&mut self, warp_index: usize, env: &Env, now: u64, access: &mut Access) -> SimResult<usize> {
        let w = &mut self.warps[warp_index];
        let group = match w.select() {
            Some(g) => g,
            None => return Err(format!("kernel `{}`: warp {warp_index} stepped while blocked", env.prog.name)),
        };
        let Group { pc, mask: group_mask, .. } = w.groups[group];
        let idx = (pc / 16) as usize;
        let Some(inst) = env.prog.code.get(idx) else {
            return Err(format!("kernel `{}`: pc 0x{pc:x} outside the code", env.prog.name));
        };
        let active = (group_mask | inst.everywhere) & w.predicate(inst.guard);
        access.mask = active;
        access.taken = false;
        w.insts += 1;
        w.groups[group].pc = pc + 16; // a branch overwrites it

        let mut s =
            Step { env, inst, warp: w, group, group_mask, active, shared: &mut self.shared, cta: &self.id, now, access, arrival: None };
        execute(inst.op, &mut s)?;
        if let Some(arrival) = s.arrival {
            if !self.arrive(warp_index, arrival) {
                return Ok(idx);
            }
        } else if s.warp.done() {
            self.warp_exited();
        }
        let w = &mut self.warps[warp_index];
        if w.groups.len() > 1 {
            // switch groups now and then, so that a group that spins lets the one that it waits for make progress
            if w.insts % 4096 == 0 {
                w.current = (w.current + 1) % w.groups.len();
            }
            w.merge_current();
        }
        Ok(idx)
    }
}

/// Mnemonics that decode as [`Op::Nop`]: hints, and control of caches. CCTL.PF2 is an exception, a prefetch.
const WITHOUT_EFFECT: [&str; 7] = ["NOP", "PREEXIT", "NANOSLEEP", "ERRBAR", "CCTL", "CCTLL", "CCTLT"];

/// Executes an operation, compiled for these features of the host. Loops run over 32-lane arrays: AVX2 lets LLVM vectorize them, FMA makes
/// `f32::mul_add` an instruction instead of a libm call. Each class is a function of its own: in one for all, LLVM vectorizes less.
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
            // a uniform instruction, as UIADD3, is decoded as its vector twin, IADD3; `scalar`: it runs on the uniform datapath
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Program;
    use crate::mem::GlobalMem;
    use crate::warp::Warp;

    /// Returns the instruction, or the reason why it cannot be decoded.
    fn decoded(text: &str) -> Result<Inst, String> {
        decode(&RawInst { pc: 0, text: text.to_string(), enc: 0 }, &Default::default())
    }

    /// Returns a warp of block 5 after these instructions. Lane l has 10 + l in R3. Constant bank 0 has 0x8000_0003 at 0x160 and
    /// 0x1_9000_0000 at 0x168.
    fn run(code: &[&str]) -> Warp {
        let mut bank = vec![0; 0x170];
        bank[0x160..0x164].copy_from_slice(&0x8000_0003u32.to_le_bytes());
        bank[0x168..0x170].copy_from_slice(&0x1_9000_0000u64.to_le_bytes());
        let code: Vec<Inst> = (0..).zip(code).map(|(i, text)| Inst { pc: 16 * i, ..decoded(text).unwrap() }).collect();
        let prog = Program { name: "test".into(), code, reg_file: (UR0 + URZ) as usize + 4 };
        let banks = [bank, vec![], vec![], vec![], vec![]];
        let mem = GlobalMem::default();
        let env = Env {
            prog: &prog,
            mem: &mem,
            banks: &banks,
            grid: [8, 1, 1],
            block: [32, 1, 1],
            smem_bytes: 256,
            local_bytes: 0,
            lock_atomics: false,
            isa: HostIsa::detect(),
        };
        let mut cta = Cta::new(&env, [5, 0, 0]);
        for l in 0..32 {
            cta.warps[0].regs[3][l] = 10 + l as u32;
        }
        let mut access = Access::default();
        while cta.warps[0].groups.iter().any(|g| (g.pc as usize) < 16 * prog.code.len()) {
            cta.step(0, &env, 0, &mut access).unwrap();
        }
        cta.warps.remove(0)
    }

    fn ur(w: &Warp, n: Reg) -> u32 {
        let v = w.regs[(UR0 + n) as usize];
        assert!(v.iter().all(|&x| x == v[0]), "UR{n} differs between lanes");
        v[0]
    }

    fn up(w: &Warp, n: u8) -> bool {
        let v = w.pred[(UP0 + n) as usize];
        assert!(v == 0 || v == !0, "UP{n} differs between lanes");
        v != 0
    }

    const LOAD: [&str; 4] = ["S2UR UR4, SR_CTAID.X", "ULDC UR5, c[0x0][0x160]", "ULDC.64 UR6, c[0x0][0x168]", "UMOV UR8, 0x4"];

    fn after_load(code: &[&str]) -> Warp {
        run(&[&LOAD, code].concat())
    }

    #[test]
    fn uniform_loads_and_moves_write_uniform_registers() {
        let w = after_load(&[
            "UMOV UR9, UR5",
            "UMOV UR10, URZ",
            "R2UR UR11, R3",
            "ULDC.U8 UR12, c[0x0][0x160]",
            "ULDC.U16 UR13, c[0x0][0x162]",
            "ULDC UR14, c[0x0][UR8+0x15c]",
            "ULDC.64 UR16, c[0x0][UR8+0x164]",
        ]);
        let expected = [5, 0x8000_0003, 0x9000_0000, 1, 4, 0x8000_0003, 0, 10, 3, 0x8000, 0x8000_0003, 0x9000_0000, 1];
        assert_eq!([4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17].map(|n| ur(&w, n)), expected);
    }

    #[test]
    fn uniform_arithmetic_matches_rust() {
        let w = after_load(&[
            "UIADD3 UR10, UP0, UR5, UR6, URZ",
            "UIADD3.X UR11, URZ, UR7, URZ, UP0, !UPT",
            "UIADD3 UR12, -UR4, 0x3, UR8",
            "UIMAD UR13, UR4, 0x7, UR8",
            "UIMAD.WIDE.U32 UR14, UR5, UR8, UR6",
            "ULEA UR16, UP1, UR5, UR6, 0x2",
            "ULEA.HI.X UR17, UR5, UR7, URZ, 0x2, UP1",
            "ULEA.HI UR18, UR5, UR4, URZ, 0x3",
            "USHF.R.S32.HI UR19, URZ, 0x1f, UR5",
            "USHF.L.U32 UR20, UR4, 0xb, URZ",
            "ULOP3.LUT UR21, UR5, 0xff, URZ, 0xc0, !UPT",
            "UPRMT UR22, UR5, 0x3210, URZ",
            "UPOPC UR23, UR5",
        ]);
        let sum = 0x8000_0003u64 + 0x9000_0000;
        assert_eq!((ur(&w, 10), ur(&w, 11)), (sum as u32, 2));
        assert_eq!((ur(&w, 12), ur(&w, 13)), (2, 39));
        let wide = 0x8000_0003u64 * 4 + 0x1_9000_0000;
        assert_eq!((ur(&w, 14), ur(&w, 15)), (wide as u32, (wide >> 32) as u32));
        let lea = (0x8000_0003u64 << 2) + 0x1_9000_0000;
        assert_eq!((ur(&w, 16), ur(&w, 17)), (lea as u32, (lea >> 32) as u32));
        assert_eq!((ur(&w, 18), ur(&w, 19), ur(&w, 20)), (5 + 4, !0, 5 << 11));
        assert_eq!((ur(&w, 21), ur(&w, 22), ur(&w, 23)), (3, 0x8000_0003, 3));
    }

    #[test]
    fn uniform_predicates_select_and_guard() {
        let w = after_load(&[
            "UISETP.GE.AND UP0, UPT, UR4, 0x3, UPT",
            "UISETP.LT.U32.AND UP1, UPT, UR5, UR6, UPT",
            "UISETP.LT.AND UP2, UPT, UR8, UR5, UPT",
            "ULOP3.LUT UP3, URZ, UR8, 0x3, URZ, 0xc0, !UPT",
            "UPLOP3.LUT UP4, UPT, UP0, UP2, UPT, 0x80, 0x0",
            "USEL UR9, UR4, 0x9, UP0",
            "USEL UR10, UR4, 0x9, UP2",
            "UMOV UR11, 0x1",
            "@!UP0 UMOV UR11, 0x2",
            "@UP0 UMOV UR12, 0x3",
            "UP2UR UR13, UPR, URZ, 0x7f",
            "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0",
            "UR2UP UPR, UR8, 0x6",
        ]);
        assert_eq!((ur(&w, 9), ur(&w, 10), ur(&w, 11), ur(&w, 12)), (5, 9, 1, 3));
        assert_eq!(ur(&w, 13), 0b011);
        assert_eq!(w.pred[0], !0);
        // of UR8, 4, the mask takes bits 1 and 2
        assert_eq!([0, 1, 2, 3, 4].map(|n| up(&w, n)), [true, false, true, false, false]);
    }

    #[test]
    fn vector_instructions_read_uniform_registers() {
        let w = after_load(&[
            "IADD3 R5, R3, UR4, RZ",
            "IMAD.U32 R6, RZ, RZ, UR5",
            "IMAD.WIDE.U32 R8, R3, UR8, R8",
            "ISETP.LT.AND P1, PT, R3, UR5, PT",
            "ISETP.GE.AND P2, PT, R3, UR4, PT",
            "STS [R3.X4+UR8], R5",
            "LDS R10, [R3.X4+UR8]",
            "LDS R11, [UR4+0x2b]",
        ]);
        for l in 0..32 {
            let x = 10 + l as u32;
            assert_eq!([5, 6, 8, 9, 10].map(|r| w.regs[r][l]), [x + 5, 0x8000_0003, 4 * x, 0, x + 5]);
        }
        assert_eq!((w.pred[1], w.pred[2], w.regs[11][7]), (0, !0, 10 + 5 + 1));
    }

    #[test]
    fn uniform_instructions_ignore_threads_that_have_left() {
        // all but lanes 4 and 5 have left
        let w = after_load(&[
            "ISETP.NE.AND P0, PT, R3, 0xe, PT",
            "ISETP.NE.AND P0, PT, R3, 0xf, P0",
            "@P0 EXIT",
            "ISETP.GE.AND P1, PT, R3, 0xf, PT",
            "UIADD3 UR9, UR4, 0x1, URZ",
            "R2UR UR10, R3",
            "VOTEU.ANY UR11, UPT, P1",
            "VOTEU.ALL UP1, P1",
            "VOTEU.ANY UP2, P1",
        ]);
        assert_eq!((ur(&w, 9), ur(&w, 10), ur(&w, 11)), (6, 14, 1 << 5));
        assert_eq!((up(&w, 1), up(&w, 2)), (false, true));
    }

    #[test]
    fn frnd_flushes_subnormals_with_ftz_alone() {
        // the subnormal number below 0: its floor is -1, but that of the zero which it becomes is -0
        let w = run(&["MOV R4, 0x80000001", "FRND.FLOOR R5, R4", "FRND.FTZ.FLOOR R6, R4"]);
        assert_eq!([w.regs[5][0], w.regs[6][0]], [-1f32, -0f32].map(f32::to_bits));
    }

    #[test]
    fn rejects_instructions_and_modifiers_without_a_model() {
        for text in ["UMOV UR63, 0x1", "UFOO UR4, UR5", "ULDC.128 UR4, c[0x0][0x160]", "HMMA.16816.F32 R4, R8, R12, R4"] {
            assert!(decoded(text).is_err_and(|e| e.contains(text)), "{text}");
        }
        for (text, modifier) in [
            ("ISETP.GE.U64.AND P0, PT, R2, R3, PT", ".U64"),
            ("ISETP.LTU.AND P0, PT, R2, R3, PT", ".LTU"),
            ("IABS.U32 R0, R1", ".U32"),
            ("IABS.SH R0, R1", ".SH"),
            ("IADD3.U32 R0, R1, R2, R3", ".U32"),
            ("SGXT.W R0, R1, 0x4", ".W"),
            ("FSETP.GE.RZ.AND P0, PT, R2, R3, PT", ".RZ"),
            ("HSETP2.GE.FTZ.AND P0, P1, R2, R3, PT", ".FTZ"),
            ("VOTE.NONE P0, P1", ".NONE"),
        ] {
            assert!(decoded(text).is_err_and(|e| e.contains(&format!("modifier {modifier}"))), "{text}");
        }
        for text in ["F2F.F16.F32.RP R0, R1", "F2F.F32.F64.RZ R0, R2", "I2F.F16.RM R0, R1"] {
            assert!(decoded(text).is_err_and(|e| e.contains("rounding")), "{text}");
        }
        for text in ["ISETP.GE.U32.AND.EX P0, PT, R2, R3, PT, P1", "ISETP.T.XOR P0, P1, R2, R3, PT", "IABS R0, R1"] {
            decoded(text).unwrap();
        }
    }
}
