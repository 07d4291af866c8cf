//! Conversions between numeric types: I2F, F2I, F2F and FRND. I2F to F32 rounds as its modifier says, and F2F of F32 to F16 toward zero
//! with RZ. All other results in F16, F32 or F64 round to nearest; other modifiers are refused.
//!
//! Letters are types: h f16, f f32, d f64 (d2h: f64 to f16). Calls of `d` read the printed operands from left to right. `s.f32(i)`,
//! `s.halves(i)` (lower and upper halves) and so on read source i of all lanes; `s.write` and `s.write64` write the result.

use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::operand::look_up;
use crate::step::{Class, SimResult, Step};

fn type_of(modifier: &str) -> Option<NumTy> {
    use NumTy::*;
    #[rustfmt::skip]
    let types = [
        ("U8", U8), ("S8", S8), ("U16", U16), ("S16", S16), ("U32", U32), ("S32", S32), ("U64", U64), ("S64", S64),
        ("F16", F16), ("F32", F32), ("F64", F64),
    ];
    look_up(&types, modifier)
}

/// Returns how a conversion rounds to an integer; to nearest even without a modifier.
fn int_round(d: &Decoder) -> IntRound {
    d.one_of(&[("TRUNC", IntRound::Trunc), ("FLOOR", IntRound::Floor), ("CEIL", IntRound::Ceil)]).unwrap_or(IntRound::Near)
}

/// Returns the floating-point and the integer type among the modifiers. Fails for a modifier that is no type and not in `known`.
fn float_and_int(d: &Decoder, known: &[&str]) -> Result<(NumTy, NumTy), String> {
    let (mut float, mut int) = (NumTy::F32, NumTy::S32);
    for m in &d.mods {
        match type_of(m) {
            Some(t @ (NumTy::F16 | NumTy::F32 | NumTy::F64)) => float = t,
            Some(t) => int = t,
            None if known.contains(m) => {}
            None => return Err(d.fail(&format!("{} modifier", d.base))),
        }
    }
    Ok((float, int))
}

impl Class for Conversion {
    fn decode(d: &mut Decoder) -> Decoded {
        if !["I2F", "F2I", "F2F", "FRND"].contains(&d.base) {
            return Ok(None);
        }
        d.dst()?.src(0)?.on(Unit::Xu);
        let ftz = d.ftz();
        Ok(Some(Op::Conversion(match d.base {
            "I2F" => {
                let (to, from) = float_and_int(d, &["RP", "RM", "RZ", "RN"])?;
                let rnd = d.round();
                if to != NumTy::F32 && rnd != Round::Rn {
                    return Err(d.fail("rounding"));
                }
                Conversion::I2f { from, to, rnd }
            }
            "F2I" => {
                let (from, to) = float_and_int(d, &["TRUNC", "FLOOR", "CEIL", "NTZ", "FTZ", "RN"])?;
                Conversion::F2i { from, to, rnd: int_round(d), ftz }
            }
            "F2F" => {
                d.allow(&["F16", "F32", "F64", "RP", "RM", "RZ", "RN", "FTZ"])?;
                let types: Vec<NumTy> = d.mods.iter().filter_map(|m| type_of(m)).collect();
                let [to, from] = types[..] else { return Err(d.fail("F2F types")) };
                let rnd = d.round();
                if rnd != Round::Rn && (from, to, rnd) != (NumTy::F32, NumTy::F16, Round::Rz) {
                    return Err(d.fail("rounding"));
                }
                Conversion::F2f { from, to, rnd, ftz }
            }
            _ => {
                d.allow(&["TRUNC", "FLOOR", "CEIL", "FTZ"])?;
                Conversion::Frnd { rnd: int_round(d), ftz }
            }
        })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Conversion::I2f { from, to, rnd } => {
                let v: [i128; 32] = if matches!(from, NumTy::S64 | NumTy::U64) {
                    s.int64(0)?.each(|x| if from == NumTy::S64 { x as i64 as i128 } else { x as i128 })
                } else {
                    let src = s.inst.src[0];
                    let sh = match src.sel {
                        Sel::B(n) => 8 * n as u32,
                        Sel::H(n) => 16 * n as u32,
                        Sel::H1H1 => 16,
                        _ => 0,
                    };
                    s.bits(0)?.each(|x| {
                        let x = x >> sh;
                        let v = match from {
                            NumTy::U8 => x as u8 as i128,
                            NumTy::S8 => x as i8 as i128,
                            NumTy::U16 => x as u16 as i128,
                            NumTy::S16 => x as i16 as i128,
                            NumTy::U32 => x as i128,
                            _ => x as i32 as i128,
                        };
                        let v = if src.abs { v.abs() } else { v };
                        v * if src.neg { -1 } else { 1 }
                    })
                };
                match to {
                    NumTy::F32 => s.write(&v.each(|x| {
                        let f = x as f32;
                        step_directed(f, Some(x.cmp(&(f as i128))), rnd).to_bits()
                    })),
                    NumTy::F64 => s.write64(&v.each(|x| (x as f64).to_bits())),
                    _ => s.write(&v.each(|x| d2h(x as f64) as u32)),
                }
            }
            Conversion::F2i { from, to, rnd, ftz } => {
                let v: [f64; 32] = match from {
                    NumTy::F64 => s.f64(0)?,
                    NumTy::F16 => s.halves(0)?.0.each(|x| x as f64),
                    _ => s.f32(0)?.each(|x| flush_subnormal(x, ftz) as f64),
                };
                let v = v.each(|x| to_int(x, rnd));
                // `as` saturates and maps NaN to 0, as the hardware does for results of 32 bits; 64-bit results of NaN are 2^63
                match to {
                    NumTy::S64 => s.write64(&v.each(|x| if x.is_nan() { 1 << 63 } else { x as i64 as u64 })),
                    NumTy::U64 => s.write64(&v.each(|x| if x.is_nan() { 1 << 63 } else { x as u64 })),
                    _ => s.write(&v.each(|x| match to {
                        NumTy::U32 => x as u32,
                        NumTy::U16 => x as u16 as u32,
                        NumTy::S16 => x as i16 as i32 as u32,
                        NumTy::U8 => x as u8 as u32,
                        NumTy::S8 => x as i8 as i32 as u32,
                        _ => x as i32 as u32,
                    })),
                }
            }
            Conversion::F2f { from, to, rnd, ftz } => match (from, to) {
                (NumTy::F32, NumTy::F16) => {
                    let a = s.f32(0)?.each(|x| flush_subnormal(x, ftz));
                    s.write(&a.each(|x| if rnd == Round::Rz { f2h_rz(x) } else { f2h(x) } as u32));
                }
                (NumTy::F16, NumTy::F32) => {
                    // of the modifiers that select a half, halves() applies H0_H0 and H1_H1, but not H1 (`Sel::H(1)`)
                    let (lo, hi) = s.halves(0)?;
                    s.write(&(if s.inst.src[0].sel == Sel::H(1) { hi } else { lo }).each(f32::to_bits));
                }
                (NumTy::F32, NumTy::F64) => s.write64(&s.f32(0)?.each(|x| (x as f64).to_bits())),
                (NumTy::F64, NumTy::F32) => s.write(&s.f64(0)?.each(|x| (x as f32).to_bits())),
                (NumTy::F32, NumTy::F32) => s.write(&s.f32(0)?.each(|x| flush_subnormal(x, ftz).to_bits())),
                (NumTy::F64, NumTy::F16) => s.write(&s.f64(0)?.each(|x| d2h(x) as u32)),
                _ => return Err(s.refuse("unimplemented conversion")),
            },
            Conversion::Frnd { rnd, ftz } => s.write(&s.f32(0)?.each(|x| (to_int(flush_subnormal(x, ftz) as f64, rnd) as f32).to_bits())),
        }
        Ok(())
    }
}

/// Rounds to an integer, as a float.
#[inline(always)]
fn to_int(x: f64, r: IntRound) -> f64 {
    match r {
        IntRound::Near => x.round_ties_even(),
        IntRound::Trunc => x.trunc(),
        IntRound::Floor => x.floor(),
        IntRound::Ceil => x.ceil(),
    }
}
