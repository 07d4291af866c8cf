//! Arithmetic and comparison on the two halves of a register: HADD2, HMUL2, HFMA2, HSETP2, HSET2. `d` decodes an instruction: its calls
//! read the printed operands from left to right. `s` executes it: `s.halves(i)` returns source i's low halves and its high halves as f32,
//! for all lanes. `mrg` selects the halves of the destination that are written.

use super::float;
use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for PackedHalf {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "HADD2" | "HMUL2" | "HFMA2" => {
                let sources = if d.base == "HFMA2" { 3 } else { 2 };
                // MMA, which ptxas adds to some, changes nothing here
                d.allow(&["F32", "SAT", "FTZ", "MRG_H0", "MRG_H1", "MMA"])?.dst()?.srcs(sources)?;
                let (sat, ftz) = (d.sat(), d.ftz());
                let mrg = d.one_of(&[("MRG_H0", Merge::H0), ("MRG_H1", Merge::H1)]).unwrap_or(Merge::Both);
                match d.base {
                    "HADD2" => PackedHalf::Hadd2 { f32: d.has("F32"), sat, ftz, mrg },
                    "HMUL2" => PackedHalf::Hmul2 { sat, ftz, mrg },
                    _ => PackedHalf::Hfma2 { sat, ftz, mrg },
                }
            }
            "HSETP2" => {
                d.allow_comparison(&["H_AND"])?.opt_pred_dsts(2).srcs(2)?.opt_pred_srcs();
                PackedHalf::Hsetp2 { cmp: d.cmp()?, bop: d.bop(), h_and: d.has("H_AND") }
            }
            "HSET2" => {
                d.allow_comparison(&["BF"])?.dst()?.srcs(2)?.opt_pred_srcs();
                PackedHalf::Hset2 { cmp: d.cmp()?, bop: d.bop(), bf: d.has("BF") }
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Fp16;
        Ok(Some(Op::PackedHalf(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        let ((a0, a1), (b0, b1)) = (s.halves(0)?, s.halves(1)?);
        match self {
            PackedHalf::Hadd2 { f32: to32, sat, ftz, mrg } => {
                if to32 {
                    // .F32: the sum of the low halves in fp32
                    s.write(&float::result(lanes(|l| a0[l] + b0[l]), ftz, sat));
                } else {
                    write(s, lanes(|l| f2h(saturate(a0[l] + b0[l], sat))), lanes(|l| f2h(saturate(a1[l] + b1[l], sat))), mrg, ftz);
                }
            }
            PackedHalf::Hmul2 { sat, ftz, mrg } => {
                write(s, lanes(|l| f2h(saturate(a0[l] * b0[l], sat))), lanes(|l| f2h(saturate(a1[l] * b1[l], sat))), mrg, ftz);
            }
            PackedHalf::Hfma2 { sat, ftz, mrg } => {
                let (c0, c1) = s.halves(2)?;
                let f = |a: f32, b: f32, c: f32| {
                    // the product of two halves is exact in f32; saturation precedes the one rounding, and makes NaN 0
                    let sum = (a * b) as f64 + c as f64;
                    d2h(match sat {
                        true if sum.is_nan() => 0.0,
                        true => sum.clamp(0.0, 1.0),
                        false => sum,
                    })
                };
                write(s, lanes(|l| f(a0[l], b0[l], c0[l])), lanes(|l| f(a1[l], b1[l], c1[l])), mrg, ftz);
            }
            PackedHalf::Hsetp2 { cmp, bop, h_and } => {
                let (r0, r1) = (compare(cmp, &a0, &b0), compare(cmp, &a1, &b1));
                if h_and {
                    // .H_AND: one predicate of both halves
                    s.set_predicates(r0 & r1, bop);
                } else {
                    let p = s.predicate(0);
                    s.set_predicate(0, combine(r0, p, bop));
                    s.set_predicate(1, combine(r1, p, bop));
                }
            }
            PackedHalf::Hset2 { cmp, bop, bf } => {
                let p = s.predicate(0);
                let (r0, r1) = (combine(compare(cmp, &a0, &b0), p, bop), combine(compare(cmp, &a1, &b1), p, bop));
                let one = if bf { 0x3c00 } else { 0xffff }; // .BF: true is 1.0
                s.write(&lanes(|l| (if r0 >> l & 1 != 0 { one } else { 0 }) | (if r1 >> l & 1 != 0 { one << 16 } else { 0 })));
            }
        }
        Ok(())
    }
}

/// Writes the halves that `mrg` selects, with subnormals flushed if `ftz`.
#[inline(always)]
fn write(s: &mut Step, lo: [u16; 32], hi: [u16; 32], mrg: Merge, ftz: bool) {
    let old = s.warp.reg(s.inst.dst);
    s.write(&lanes(|l| {
        let (a, b) = (flush(lo[l], ftz) as u32, flush(hi[l], ftz) as u32);
        match mrg {
            Merge::H0 => (old[l] & 0xffff_0000) | a,
            Merge::H1 => (old[l] & 0xffff) | b << 16,
            Merge::Both => a | b << 16,
        }
    }));
}

/// Flushes a subnormal half to zero of the same sign if `on`.
#[inline(always)]
fn flush(h: u16, on: bool) -> u16 {
    if on && h & 0x7c00 == 0 {
        h & 0x8000
    } else {
        h
    }
}
