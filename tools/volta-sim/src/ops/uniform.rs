//! The uniform datapath of sm_75: scalar instructions that a warp executes once. A uniform register is kept as a register whose
//! lanes are equal ([`UR0`]), so that most of these are the instruction of the same name without the U, for all
//! lanes whatever path their threads take.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::step::{SimResult, Step};

/// Instructions that differ from those without the U in their registers alone.
const SCALARS: [&str; 15] =
    ["UIADD3", "UIMAD", "ULEA", "UISETP", "ULOP3", "USHF", "UPRMT", "UPOPC", "UFLO", "UBREV", "UBMSK", "USGXT", "UPLOP3", "UMOV", "USEL"];

/// Gives an instruction of the uniform datapath the name of the vector instruction that does the same. Returns whether the
/// instruction runs there.
pub fn as_vector(d: &mut Decoder) -> Result<bool, String> {
    let (vector, scalar) = match d.base {
        "ULDC" => {
            d.allow(&["64", "U16", "U8"])?;
            if d.has_indexed_constant() {
                // no source says what an index costs here: it takes the way of LDC, which is slower
                (d.base, d.inst.everywhere) = ("LDC", !0);
                return Ok(false);
            }
            (if ["64", "U16", "U8"].iter().any(|width| d.has(width)) { "ULDC" } else { "MOV" }, true)
        }
        // not of the uniform datapath: it takes the way of S2R
        "S2UR" => ("S2R", false),
        "R2UR" => ("R2UR", true),
        "VOTEU" => ("VOTE", true),
        "UP2UR" => ("P2R", true),
        "UR2UP" => ("R2P", true),
        base if SCALARS.contains(&base) => (&base[1..], true),
        _ => return Ok(false),
    };
    d.base = vector;
    d.inst.everywhere = !0;
    Ok(scalar)
}

impl Class for Uniform {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "ULDC" if d.has("U8") => Uniform::LdcNarrow(0xff),
            "ULDC" if d.has("U16") => Uniform::LdcNarrow(0xffff),
            "ULDC" => Uniform::Ldc64,
            "R2UR" => Uniform::R2ur,
            _ => return Ok(None),
        };
        d.dst()?;
        d.src(0)?;
        Ok(Some(Op::Uniform(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Uniform::Ldc64 => {
                let v = s.int64(0)?;
                s.wr64(&v);
            }
            Uniform::LdcNarrow(mask) => {
                let v = s.raw(0)?.map(|word| word & mask);
                s.wr(&v);
            }
            Uniform::R2ur => {
                let first = s.together.trailing_zeros() as usize & 31;
                let v = s.raw(0)?[first];
                s.wr(&[v; 32]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::cta::Cta;
    use crate::disasm::RawInst;
    use crate::env::{Env, HostIsa, Program};
    use crate::isa::*;
    use crate::mem::GlobalMem;
    use crate::ops::decode;
    use crate::step::Access;
    use crate::warp::Warp;

    /// What one warp of block 5 is left with by these instructions. Constants: 0x8000_0003 at 0x160, 0x0000_0001_9000_0000 at 0x168.
    fn run(code: &[&str]) -> Warp {
        let mut bank = vec![0; 0x170];
        bank[0x160..0x164].copy_from_slice(&0x8000_0003u32.to_le_bytes());
        bank[0x168..0x170].copy_from_slice(&0x1_9000_0000u64.to_le_bytes());
        let code: Vec<Inst> = (0..)
            .zip(code)
            .map(|(i, text)| decode(&RawInst { pc: 16 * i, text: text.to_string(), enc: 0 }, &Default::default()).unwrap())
            .collect();
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
    fn loads_and_moves() {
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
    fn arithmetic() {
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
    fn predicates() {
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
    fn sources_of_vector_instructions() {
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
    fn threads_elsewhere_do_not_matter() {
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
    fn what_is_unknown_is_refused() {
        for text in ["UMOV UR63, 0x1", "UFOO UR4, UR5", "ULDC.128 UR4, c[0x0][0x160]", "HMMA.16816.F32 R4, R8, R12, R4"] {
            let e = decode(&RawInst { pc: 0, text: text.into(), enc: 0 }, &Default::default()).unwrap_err();
            assert!(e.contains(text), "{e}");
        }
    }
}
