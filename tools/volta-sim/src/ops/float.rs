//! Single- and double-precision arithmetic and comparison, and the special-function unit. `d` decodes an instruction: its calls read the
//! printed operands from left to right. `s` executes it: `s.f32(i)` reads source i of all lanes, `s.write` writes the active ones.

use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for Float {
    fn decode(d: &mut Decoder) -> Decoded {
        let ftz = d.ftz();
        let op = match d.base {
            "FADD" | "FMUL" | "FFMA" => {
                let sources = if d.base == "FFMA" { 3 } else { 2 };
                d.allow(&["FTZ", "SAT", "RZ", "RM", "RP", "RN"])?.dst()?.srcs(sources)?.on(Unit::Fma);
                let (sat, rnd) = (d.sat(), d.round());
                match d.base {
                    "FADD" => Float::Fadd { ftz, sat, rnd },
                    "FMUL" => Float::Fmul { ftz, sat, rnd },
                    _ => Float::Ffma { ftz, sat, rnd },
                }
            }
            "FMNMX" => {
                d.allow(&["FTZ"])?.dst()?.srcs(2)?.opt_pred_srcs();
                Float::Fmnmx { ftz }
            }
            "FSETP" => {
                d.allow_comparison(&["FTZ"])?.opt_pred_dsts(2).srcs(2)?.opt_pred_srcs();
                Float::Fsetp { cmp: d.cmp()?, bop: d.bop(), ftz }
            }
            "FSET" => {
                d.allow_comparison(&["FTZ", "BF"])?.dst()?.srcs(2)?.opt_pred_srcs();
                Float::Fset { cmp: d.cmp()?, bop: d.bop(), ftz, bf: d.has("BF") }
            }
            "FCHK" => {
                d.allow(&["DIVIDE"])?.opt_pred_dsts(2).srcs(2)?.on(Unit::Xu);
                Float::Fchk
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Float(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Float::Fadd { ftz, sat, rnd } => {
                let (a, b) = (source(s, 0, ftz)?, source(s, 1, ftz)?);
                let r = rounded(rnd, |l| a[l] + b[l], |l| a[l] as f64 + b[l] as f64);
                s.write(&result(r, ftz, sat));
            }
            Float::Fmul { ftz, sat, rnd } => {
                let (a, b) = (source(s, 0, ftz)?, source(s, 1, ftz)?);
                let r = rounded(rnd, |l| a[l] * b[l], |l| a[l] as f64 * b[l] as f64);
                s.write(&result(r, ftz, sat));
            }
            Float::Ffma { ftz, sat, rnd } => {
                let (a, b, c) = (source(s, 0, ftz)?, source(s, 1, ftz)?, source(s, 2, ftz)?);
                let r = rounded(rnd, |l| a[l].mul_add(b[l], c[l]), |l| a[l] as f64 * b[l] as f64 + c[l] as f64);
                s.write(&result(r, ftz, sat));
            }
            Float::Fmnmx { ftz } => {
                let (a, b, p) = (source(s, 0, ftz)?, source(s, 1, ftz)?, s.predicate(0));
                let r: [f32; 32] = lanes(|l| {
                    let (x, y) = (a[l], b[l]);
                    if x.is_nan() {
                        return if y.is_nan() { f32::from_bits(0x7fff_ffff) } else { y };
                    }
                    if y.is_nan() {
                        return x;
                    }
                    // the minimum where the predicate is true; -0 orders below +0
                    let lt = x < y || (x == y && x.is_sign_negative());
                    if lt == (p >> l & 1 != 0) {
                        x
                    } else {
                        y
                    }
                });
                s.write(&r.each(f32::to_bits));
            }
            Float::Fsetp { cmp, bop, ftz } => {
                s.set_predicates(compare(cmp, &source(s, 0, ftz)?, &source(s, 1, ftz)?), bop);
            }
            Float::Fset { cmp, bop, ftz, bf } => {
                let r = combine(compare(cmp, &source(s, 0, ftz)?, &source(s, 1, ftz)?), s.predicate(0), bop);
                let one = if bf { 1f32.to_bits() } else { !0 }; // .BF: true is 1.0
                s.write(&lanes(|l| if r >> l & 1 != 0 { one } else { 0 }));
            }
            Float::Fchk => {
                // true where a / b by a reciprocal could overflow or lose bits: the compiler's code then takes a slow path. The limits, of
                // exponents with bias 127, are conservative: infinity or NaN; remainders (2^-24 of a), 1 / b or a / b near the range's ends
                let exponents = |x: f32| (x.to_bits() >> 23 & 255) as i32;
                let (a, b) = (s.f32(0)?.each(exponents), s.f32(1)?.each(exponents));
                let is_extreme = |a, b| a == 255 || b == 255 || a <= 25 || b <= 1 || b >= 252 || a - b >= 125 || a - b <= -124;
                s.set_predicate(0, mask_of(|l| is_extreme(a[l], b[l])));
            }
        }
        Ok(())
    }
}

/// Returns source `i`, with subnormals flushed if `ftz`.
#[inline(always)]
fn source(s: &Step, i: usize, ftz: bool) -> SimResult<[f32; 32]> {
    Ok(s.f32(i)?.each(|x| flush_subnormal(x, ftz)))
}

/// Returns each lane's result: `near`, which f32 arithmetic rounds to nearest, or for another mode `exact`, in f64, rounded in that mode.
#[inline(always)]
fn rounded(rnd: Round, near: impl Fn(usize) -> f32, exact: impl Fn(usize) -> f64) -> [f32; 32] {
    match rnd {
        Round::Rn => lanes(near),
        _ => lanes(|l| round_directed(exact(l), rnd)),
    }
}

/// Returns results as the GPU writes them: any NaN as 0x7fffffff, then saturated, then flushed.
#[inline(always)]
pub fn result(r: [f32; 32], ftz: bool, sat: bool) -> V {
    r.each(|x| {
        let x = if x.is_nan() { f32::from_bits(0x7fff_ffff) } else { x };
        flush_subnormal(saturate(x, sat), ftz).to_bits()
    })
}

// ---- double precision ------------------------------------------------------------------------

impl Class for Double {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "DADD" | "DMUL" | "DFMA" => {
                let (op, sources) = match d.base {
                    "DADD" => (Double::Dadd, 2),
                    "DMUL" => (Double::Dmul, 2),
                    _ => (Double::Dfma, 3),
                };
                d.allow(&[])?.dst()?.srcs(sources)?;
                op
            }
            "DSETP" => {
                d.allow_comparison(&[])?.opt_pred_dsts(2).srcs(2)?.opt_pred_srcs();
                Double::Dsetp { cmp: d.cmp()?, bop: d.bop() }
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Fp64;
        Ok(Some(Op::Double(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        let (a, b) = (s.f64(0)?, s.f64(1)?);
        match self {
            Double::Dadd => s.write64(&lanes(|l| (a[l] + b[l]).to_bits())),
            Double::Dmul => s.write64(&lanes(|l| (a[l] * b[l]).to_bits())),
            Double::Dfma => {
                let c = s.f64(2)?;
                s.write64(&lanes(|l| a[l].mul_add(b[l], c[l]).to_bits()));
            }
            Double::Dsetp { cmp, bop } => s.set_predicates(compare(cmp, &a, &b), bop),
        }
        Ok(())
    }
}

// ---- the special-function unit: results are the host math library's, not approximations ------

impl Class for SpecialFunction {
    fn decode(d: &mut Decoder) -> Decoded {
        if d.base != "MUFU" {
            return Ok(None);
        }
        d.dst()?.src(0)?.on(Unit::Xu);
        use SpecialFunction::*;
        #[rustfmt::skip]
        let known = [
            ("RCP", Rcp), ("RSQ", Rsq), ("EX2", Ex2), ("TANH", Tanh), ("LG2", Lg2), ("SIN", Sin), ("COS", Cos), ("SQRT", Sqrt),
            ("RCP64H", Rcp64h), ("RSQ64H", Rsq64h),
        ];
        let function = d.one_of(&known).ok_or_else(|| d.fail("MUFU function"))?;
        Ok(Some(Op::SpecialFunction(if function == Ex2 && d.has("F16") { Ex2Half } else { function })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        if matches!(self, SpecialFunction::Rcp64h | SpecialFunction::Rsq64h) {
            s.write(&s.bits(0)?.each(|high| {
                let d = f64::from_bits((high as u64) << 32);
                let v = if self == SpecialFunction::Rcp64h { 1.0 / d } else { 1.0 / d.sqrt() };
                (v.to_bits() >> 32) as u32
            }));
            return Ok(());
        }
        if self == SpecialFunction::Ex2Half {
            let (lo, hi) = s.halves(0)?;
            let x = if matches!(s.inst.src[0].sel, Sel::H(1) | Sel::H1H1) { hi } else { lo };
            s.write(&x.each(|x| f2h(x.exp2()) as u32));
            return Ok(());
        }
        let a = s.f32(0)?;
        // inputs and outputs of the special-function unit flush subnormals
        let mut r = [0u32; 32];
        for l in lanes_in(s.active) {
            let x = flush_subnormal(a[l], true);
            let v = match self {
                SpecialFunction::Rcp => 1.0 / x,
                SpecialFunction::Rsq => (1.0 / (x as f64).sqrt()) as f32,
                SpecialFunction::Ex2 => x.exp2(),
                SpecialFunction::Lg2 => x.log2(),
                // the code before has multiplied the argument by 1/2pi
                SpecialFunction::Sin => ((x as f64) * std::f64::consts::TAU).sin() as f32,
                SpecialFunction::Cos => ((x as f64) * std::f64::consts::TAU).cos() as f32,
                SpecialFunction::Sqrt => x.sqrt(),
                SpecialFunction::Tanh => x.tanh(),
                SpecialFunction::Ex2Half | SpecialFunction::Rcp64h | SpecialFunction::Rsq64h => unreachable!(),
            };
            r[l] = flush_subnormal(v, true).to_bits();
        }
        s.write(&r);
        Ok(())
    }
}
