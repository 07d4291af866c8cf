//! Arithmetic and comparison on two halves a register: SASS HADD2, HMUL2, HFMA2, HSETP2, HSET2. `hlf(i)` is both halves of source i as f32,
//! `mrg` says which half of the destination is written.

use super::class::Class;
use super::float;
use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::step::{SimResult, Step};

impl Class for PackedHalf {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "HADD2" | "HMUL2" | "HFMA2" => {
                d.allow(&["F32", "SAT", "FTZ", "MRG_H0", "MRG_H1", "MMA"])?;
                d.dst()?;
                d.srcs(if d.base == "HFMA2" { 3 } else { 2 })?;
                let (sat, ftz) = (d.sat(), d.ftz());
                let mrg = if d.has("MRG_H0") {
                    Merge::H0
                } else if d.has("MRG_H1") {
                    Merge::H1
                } else {
                    Merge::Both
                };
                match d.base {
                    "HADD2" => PackedHalf::Hadd2 { f32: d.has("F32"), sat, ftz, mrg },
                    "HMUL2" => PackedHalf::Hmul2 { sat, ftz, mrg },
                    _ => PackedHalf::Hfma2 { sat, ftz, mrg },
                }
            }
            "HSETP2" => {
                d.opt_pdsts(2);
                d.srcs(2)?;
                d.opt_psrcs();
                PackedHalf::Hsetp2 { cmp: d.cmp()?, bop: d.bop(), hand: d.has("H_AND") }
            }
            "HSET2" => {
                d.dst()?;
                d.srcs(2)?;
                d.opt_psrcs();
                PackedHalf::Hset2 { cmp: d.cmp()?, bop: d.bop(), bf: d.has("BF") }
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Fp16;
        Ok(Some(Op::PackedHalf(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            PackedHalf::Hadd2 { f32: to32, sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1)) = (s.hlf(0)?, s.hlf(1)?);
                let lo: [f32; 32] = lanes(|l| a0[l] + b0[l]);
                if to32 {
                    s.wr(&float::result(lo, ftz, sat));
                } else {
                    let hi: [f32; 32] = lanes(|l| a1[l] + b1[l]);
                    write(s, lanes(|l| f2h(saturate(lo[l], sat))), lanes(|l| f2h(saturate(hi[l], sat))), mrg, ftz);
                }
            }
            PackedHalf::Hmul2 { sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1)) = (s.hlf(0)?, s.hlf(1)?);
                write(s, lanes(|l| f2h(saturate(a0[l] * b0[l], sat))), lanes(|l| f2h(saturate(a1[l] * b1[l], sat))), mrg, ftz);
            }
            PackedHalf::Hfma2 { sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1), (c0, c1)) = (s.hlf(0)?, s.hlf(1)?, s.hlf(2)?);
                let f = |a: f32, b: f32, c: f32| {
                    let sum = (a * b) as f64 + c as f64; // the product of two halves is exact in f32
                    if sat {
                        f2h(saturate(sum as f32, true))
                    } else {
                        d2h(sum)
                    }
                };
                write(s, lanes(|l| f(a0[l], b0[l], c0[l])), lanes(|l| f(a1[l], b1[l], c1[l])), mrg, ftz);
            }
            PackedHalf::Hsetp2 { cmp, bop, hand } => {
                let ((a0, a1), (b0, b1)) = (s.hlf(0)?, s.hlf(1)?);
                let r0 = compare(cmp, &a0, &b0);
                let r1 = compare(cmp, &a1, &b1);
                if hand {
                    s.setp_two(r0 & r1, bop);
                } else {
                    let p = s.p(0);
                    s.setp(0, combine(r0, p, bop));
                    s.setp(1, combine(r1, p, bop));
                }
            }
            PackedHalf::Hset2 { cmp, bop, bf } => {
                let ((a0, a1), (b0, b1)) = (s.hlf(0)?, s.hlf(1)?);
                let p = s.p(0);
                let r0 = combine(compare(cmp, &a0, &b0), p, bop);
                let r1 = combine(compare(cmp, &a1, &b1), p, bop);
                let one = if bf { 0x3c00 } else { 0xffff };
                s.wr(&lanes(|l| (if r0 >> l & 1 != 0 { one } else { 0 }) | (if r1 >> l & 1 != 0 { one << 16 } else { 0 })));
            }
        }
        Ok(())
    }
}

#[inline(always)]
fn write(s: &mut Step, lo: [u16; 32], hi: [u16; 32], mrg: Merge, ftz: bool) {
    let old = s.w.reg(s.inst.dst);
    s.wr(&lanes(|l| {
        let (a, b) = (flush(lo[l], ftz) as u32, flush(hi[l], ftz) as u32);
        match mrg {
            Merge::H0 => (old[l] & 0xffff_0000) | a,
            Merge::H1 => (old[l] & 0xffff) | b << 16,
            Merge::Both => a | b << 16,
        }
    }));
}

#[inline(always)]
fn flush(h: u16, on: bool) -> u16 {
    if on && h & 0x7c00 == 0 {
        h & 0x8000
    } else {
        h
    }
}
