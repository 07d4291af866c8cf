//! Integer arithmetic and comparison of sources a, b and c. Carries (`.X`) and comparisons of low words (`.EX`) go from the instruction's
//! destination predicates (`pred_dst`) to another's source predicates (`s.predicate(i)`). `d` decodes an instruction: its calls read the
//! printed operands from left to right. `s` executes it: `s.int(i)` reads source i of all lanes, `s.write` writes the active ones.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};
use std::cmp::Ordering;

impl Class for Integer {
    fn decode(d: &mut Decoder) -> Decoded {
        let signed = d.signed();
        let op = match d.base {
            "IADD3" => {
                d.allow(&["X"])?.dst()?.opt_pred_dsts(2).srcs(3)?.opt_carries();
                Integer::Iadd3 { x: d.has("X") }
            }
            "IMAD" => {
                // MOV, IADD and SHL only say what the compiler multiplies for
                d.allow(&["MOV", "IADD", "SHL", "U32", "X", "WIDE", "HI"])?.dst()?.opt_pred_dsts(2).srcs(3)?.opt_carries();
                d.inst.unit = Unit::Fma; // not the integer unit
                if d.has("WIDE") {
                    Integer::ImadWide { signed, x: d.has("X") }
                } else if d.has("HI") {
                    Integer::ImadHi { signed, x: d.has("X") }
                } else {
                    Integer::Imad { x: d.has("X") }
                }
            }
            "LEA" => {
                d.allow(&["HI", "X", "SX32"])?.dst()?.opt_pred_dsts(2).srcs(2)?;
                // LEA.HI has the high word as third source, except in the SX32 form
                if d.has("HI") && !d.has("SX32") {
                    d.src(2)?;
                }
                let shift = d.opt_imm().unwrap_or(0) as u8;
                d.opt_carries();
                Integer::Lea { hi: d.has("HI"), x: d.has("X"), sx32: d.has("SX32"), shift }
            }
            "ISETP" => {
                d.allow(&["F", "LT", "EQ", "LE", "GT", "NE", "GE", "T", "U32", "AND", "OR", "XOR", "EX"])?
                    .opt_pred_dsts(2)
                    .srcs(2)?
                    .opt_pred_srcs();
                Integer::Isetp { cmp: d.cmp()?, signed, bop: d.bop(), ex: d.has("EX") }
            }
            "IMNMX" => {
                d.allow(&["U32"])?.dst()?.srcs(2)?.opt_pred_srcs();
                Integer::Imnmx { signed }
            }
            "IABS" => {
                d.allow(&[])?.dst()?.src(0)?;
                Integer::Iabs
            }
            "VABSDIFF" => {
                d.allow(&["U32"])?.dst()?.srcs(3)?;
                Integer::Vabsdiff { signed }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Integer(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Integer::Iadd3 { x } => {
                if s.inst.pred_dst == [PT; 2] && !x {
                    let (a, b, c) = (s.int(0)?, s.int(1)?, s.int(2)?);
                    s.write(&lanes(|l| a[l].wrapping_add(b[l]).wrapping_add(c[l])));
                } else {
                    // the sum in 64 bits has the carries above bit 31; a negated operand is ~v + 1
                    let mut sum = [0u64; 32];
                    for i in 0..3 {
                        let Src { inv, neg, .. } = s.inst.src[i];
                        let v = s.bits(i)?;
                        for l in 0..32 {
                            sum[l] += (if inv | neg { !v[l] } else { v[l] }) as u64 + (neg & !inv) as u64;
                        }
                    }
                    if x {
                        let (c0, c1) = (s.predicate(0), s.predicate(1));
                        for l in 0..32 {
                            sum[l] += (c0 >> l & 1) as u64 + (c1 >> l & 1) as u64;
                        }
                    }
                    s.write(&sum.each(|v| v as u32));
                    s.set_predicate(0, mask_of(|l| sum[l] >> 32 >= 1));
                    s.set_predicate(1, mask_of(|l| sum[l] >> 32 >= 2));
                }
            }
            Integer::Imad { x } => {
                let (a, b, c) = (s.int(0)?, s.int(1)?, s.int(2)?);
                if x || s.inst.pred_dst[0] != PT {
                    let cin = if x { s.predicate(0) } else { 0 };
                    let sum: [u64; 32] = lanes(|l| a[l].wrapping_mul(b[l]) as u64 + c[l] as u64 + (cin >> l & 1) as u64);
                    s.write(&sum.each(|v| v as u32));
                    s.set_predicate(0, mask_of(|l| sum[l] >> 32 != 0));
                } else {
                    s.write(&lanes(|l| a[l].wrapping_mul(b[l]).wrapping_add(c[l])));
                }
            }
            Integer::ImadWide { signed, x } => {
                let sum = wide_sum(s, signed, x)?;
                s.write64(&sum.each(|v| v as u64));
                s.set_predicate(0, mask_of(|l| sum[l] >> 64 != 0));
            }
            Integer::ImadHi { signed, x } => {
                let sum = wide_sum(s, signed, x)?;
                s.write(&sum.each(|v| (v >> 32) as u32));
                s.set_predicate(0, mask_of(|l| sum[l] >> 64 != 0));
            }
            // (a << shift) + b; HI: the high word of the pair (a, c) shifted, or with SX32 of a sign-extended
            Integer::Lea { hi, x, sx32, shift } => {
                let (a, b) = (s.bits(0)?, s.int(1)?);
                let neg = s.inst.src[0].neg;
                let c = if hi && !sx32 { s.bits(2)? } else { [0; 32] };
                let cin = if x { s.predicate(0) } else { 0 };
                let sum: [u64; 32] = lanes(|l| {
                    let wide = if sx32 { a[l] as i32 as i64 as u64 } else { a[l] as u64 | (c[l] as u64) << 32 };
                    let sh = if hi { ((wide as u128) << shift >> 32) as u32 } else { a[l] << (shift & 31) };
                    let sh = if hi && sx32 { (((wide as i64 as i128) << shift) >> 32) as u32 } else { sh };
                    let sh = if neg { !sh as u64 + u64::from(!x) } else { sh as u64 };
                    sh + b[l] as u64 + (cin >> l & 1) as u64
                });
                s.write(&sum.each(|v| v as u32));
                s.set_predicate(0, mask_of(|l| sum[l] >> 32 != 0));
            }
            Integer::Isetp { cmp, signed, bop, ex } => {
                let (a, b) = (s.int(0)?, s.int(1)?);
                let mut r =
                    if signed { compare_by(cmp, |l| (a[l] as i32).cmp(&(b[l] as i32))) } else { compare_by(cmp, |l| a[l].cmp(&b[l])) };
                if ex {
                    let low = s.predicate(1); // the result of the low words
                    let eq = mask_of(|l| a[l] == b[l]);
                    r = match cmp {
                        Cmp::Eq => eq & low,
                        Cmp::Ne => !eq | low,
                        _ => (eq & low) | (!eq & r),
                    };
                }
                s.set_predicates(r, bop);
            }
            // the minimum where the predicate is true
            Integer::Imnmx { signed } => {
                let (a, b, p) = (s.int(0)?, s.int(1)?, s.predicate(0));
                s.write(&lanes(|l| {
                    let lt = if signed { (a[l] as i32) < b[l] as i32 } else { a[l] < b[l] };
                    if lt == (p >> l & 1 != 0) {
                        a[l]
                    } else {
                        b[l]
                    }
                }));
            }
            Integer::Iabs => s.write(&s.int(0)?.each(|x| (x as i32).wrapping_abs() as u32)),
            // |a - b| + c
            Integer::Vabsdiff { signed } => {
                let (a, b, c) = (s.int(0)?, s.int(1)?, s.int(2)?);
                s.write(&lanes(|l| {
                    let d = if signed { (a[l] as i32).abs_diff(b[l] as i32) } else { a[l].abs_diff(b[l]) };
                    d.wrapping_add(c[l])
                }));
            }
        }
        Ok(())
    }
}

/// Returns the 64-bit product of two sources, plus the third, a register pair, plus a carry. Bit 64 is the carry out.
#[inline(always)]
fn wide_sum(s: &Step, signed: bool, x: bool) -> SimResult<[u128; 32]> {
    let (a, b, c) = (s.int(0)?, s.int(1)?, s.int64(2)?);
    let cin = if x { s.predicate(0) } else { 0 };
    let product = |l: usize| match signed {
        true => (a[l] as i32 as i64).wrapping_mul(b[l] as i32 as i64) as u64,
        false => a[l] as u64 * b[l] as u64,
    };
    Ok(lanes(|l| product(l) as u128 + c[l] as u128 + (cin >> l & 1) as u128))
}

#[inline(always)]
fn compare_by(cmp: Cmp, f: impl Fn(usize) -> Ordering) -> u32 {
    match cmp {
        Cmp::Lt => mask_of(|l| f(l).is_lt()),
        Cmp::Le => mask_of(|l| f(l).is_le()),
        Cmp::Gt => mask_of(|l| f(l).is_gt()),
        Cmp::Ge => mask_of(|l| f(l).is_ge()),
        Cmp::Eq => mask_of(|l| f(l).is_eq()),
        Cmp::Ne => mask_of(|l| f(l).is_ne()),
        Cmp::T => !0,
        _ => 0,
    }
}
