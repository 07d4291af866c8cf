//! The special-function unit. Results are correctly rounded instead of approximate.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::*;
use crate::step::{SimResult, Step};

impl Class for SpecialFunction {
    fn decode(d: &mut Decoder) -> Decoded {
        if d.base != "MUFU" {
            return Ok(None);
        }
        d.dst()?;
        d.src(0)?;
        d.inst.unit = Unit::Xu;
        Ok(Some(Op::SpecialFunction(match d.mods.first() {
            Some(&"RCP") => SpecialFunction::Rcp,
            Some(&"RSQ") => SpecialFunction::Rsq,
            Some(&"EX2") if d.has("F16") => SpecialFunction::Ex2Half,
            Some(&"EX2") => SpecialFunction::Ex2,
            Some(&"TANH") => SpecialFunction::Tanh,
            Some(&"LG2") => SpecialFunction::Lg2,
            Some(&"SIN") => SpecialFunction::Sin,
            Some(&"COS") => SpecialFunction::Cos,
            Some(&"SQRT") => SpecialFunction::Sqrt,
            Some(&"RCP64H") => SpecialFunction::Rcp64h,
            Some(&"RSQ64H") => SpecialFunction::Rsq64h,
            _ => return Err(d.fail("MUFU function")),
        })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        if matches!(self, SpecialFunction::Rcp64h | SpecialFunction::Rsq64h) {
            let a = s.raw(0)?;
            s.wr(&a.each(|x| {
                let d = f64::from_bits((x as u64) << 32);
                let v = if self == SpecialFunction::Rcp64h { 1.0 / d } else { 1.0 / d.sqrt() };
                (v.to_bits() >> 32) as u32
            }));
            return Ok(());
        }
        if self == SpecialFunction::Ex2Half {
            let (lo, hi) = s.hlf(0)?;
            let x = if matches!(s.inst.src[0].sel, Sel::H(1) | Sel::H1H1) { hi } else { lo };
            s.wr(&x.each(|x| f2h(x.exp2()) as u32));
            return Ok(());
        }
        let a = s.flt(0)?;
        // inputs and outputs of the special-function unit flush subnormals
        let mut r = [0u32; 32];
        for l in 0..32 {
            if s.m >> l & 1 != 0 {
                let x = fz(a[l], true);
                let v = match self {
                    SpecialFunction::Rcp => 1.0 / x,
                    SpecialFunction::Rsq => (1.0 / (x as f64).sqrt()) as f32,
                    SpecialFunction::Ex2 => x.exp2(),
                    SpecialFunction::Lg2 => x.log2(),
                    // the argument arrives premultiplied by 1/2pi (range-reduced by FMUL)
                    SpecialFunction::Sin => ((x as f64) * std::f64::consts::TAU).sin() as f32,
                    SpecialFunction::Cos => ((x as f64) * std::f64::consts::TAU).cos() as f32,
                    SpecialFunction::Sqrt => x.sqrt(),
                    SpecialFunction::Tanh => x.tanh(),
                    SpecialFunction::Ex2Half | SpecialFunction::Rcp64h | SpecialFunction::Rsq64h => unreachable!(),
                };
                r[l] = fz(v, true).to_bits();
            }
        }
        s.wr(&r);
        Ok(())
    }
}
