//! Moves, selection by a predicate, logic on predicates, and predicates as bits of a register (P2R, R2P). `d` decodes an instruction: its
//! calls read the printed operands from left to right. `s` executes it: `s.int(i)` reads source i of all lanes, `s.write` writes active
//! ones.

use super::bits::lop3;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for Select {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "MOV" => {
                d.dst()?.src(0)?;
                Select::Mov
            }
            "SEL" | "FSEL" => {
                d.dst()?.srcs(2)?.opt_pred_srcs();
                if d.base == "SEL" {
                    Select::Sel
                } else {
                    Select::Fsel
                }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Select(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Select::Mov => s.write(&s.bits(0)?),
            Select::Sel => {
                let (a, b, p) = (s.int(0)?, s.int(1)?, s.predicate(0));
                s.write(&lanes(|l| if p >> l & 1 != 0 { a[l] } else { b[l] }));
            }
            Select::Fsel => {
                let (a, b, p) = (s.f32(0)?, s.f32(1)?, s.predicate(0));
                s.write(&lanes(|l| if p >> l & 1 != 0 { a[l].to_bits() } else { b[l].to_bits() }));
            }
        }
        Ok(())
    }
}

// ---- logic on predicates, and predicates as bits of a register -------------------------------

impl Class for Predicate {
    fn decode(d: &mut Decoder) -> Decoded {
        let first = if d.inst.everywhere != 0 { UP0 } else { 0 }; // uniform instructions use the uniform predicates
        let op = match d.base {
            "PLOP3" => {
                d.opt_pred_dsts(2).opt_pred_srcs();
                while d.opt_pred().is_some() {} // three are sources, others have no effect here
                let lut = d.imm()? as u8;
                let lut2 = d.imm()? as u8;
                Predicate::Plop3 { lut, lut2 }
            }
            "P2R" => {
                d.allow(&["B1", "B2", "B3"])?;
                let byte = ["B1", "B2", "B3"].iter().position(|b| d.has(b)).map_or(0, |i| i + 1);
                d.dst()?;
                d.next(); // PR: all predicates
                d.srcs(2)?;
                Predicate::P2r { shift: 8 * byte as u32, first }
            }
            "R2P" => {
                d.next(); // PR
                d.srcs(2)?;
                Predicate::R2p { first }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Predicate(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Predicate::Plop3 { lut, lut2 } => {
                // lop3 takes registers; here one word has a bit per lane
                let (a, b, c) = (s.predicate(0), s.predicate(1), s.predicate(2));
                s.set_predicate(0, lop3(lut, &[a; 32], &[b; 32], &[c; 32])[0]);
                s.set_predicate(1, lop3(lut2, &[a; 32], &[b; 32], &[c; 32])[0]);
            }
            Predicate::P2r { shift, first } => {
                let (a, mk) = (s.int(0)?, s.int(1)?);
                let preds = s.warp.pred;
                // B1 to B3: predicates go to that byte. Bits that the mask leaves out are those of `a`.
                s.write(&lanes(|l| {
                    let bits = (0..7).fold(0, |r, i| r | (preds[first as usize + i] >> l & 1) << i);
                    let mask = mk[l] << shift;
                    (a[l] & !mask) | (bits << shift & mask)
                }));
            }
            Predicate::R2p { first } => {
                let (a, mk) = (s.int(0)?, s.int(1)?);
                // the byte of `a` from which predicates come; bit i of mk: whether predicate i is written
                let sh = match s.inst.src[0].sel {
                    Sel::B(n) => 8 * n as u32,
                    _ => 0,
                };
                for i in 0..7u8 {
                    let sel = mask_of(|l| mk[l] >> i & 1 != 0);
                    let val = mask_of(|l| a[l] >> (sh + i as u32) & 1 != 0);
                    s.warp.set_predicate(first + i, val, s.active & sel);
                }
            }
        }
        Ok(())
    }
}
