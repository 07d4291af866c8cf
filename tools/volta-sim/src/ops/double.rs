//! Double-precision arithmetic and comparison.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{SimResult, Step};

impl Class for Double {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "DADD" | "DMUL" | "DFMA" => {
                d.allow(&[])?;
                d.dst()?;
                d.srcs(if d.base == "DFMA" { 3 } else { 2 })?;
                match d.base {
                    "DADD" => Double::Dadd,
                    "DMUL" => Double::Dmul,
                    _ => Double::Dfma,
                }
            }
            "DSETP" => {
                d.opt_pdsts(2);
                d.srcs(2)?;
                d.opt_psrcs();
                Double::Dsetp { cmp: d.cmp()?, bop: d.bop() }
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Fp64;
        Ok(Some(Op::Double(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Double::Dadd => {
                let (a, b) = (s.dbl(0)?, s.dbl(1)?);
                s.wr64(&lanes(|l| (a[l] + b[l]).to_bits()));
            }
            Double::Dmul => {
                let (a, b) = (s.dbl(0)?, s.dbl(1)?);
                s.wr64(&lanes(|l| (a[l] * b[l]).to_bits()));
            }
            Double::Dfma => {
                let (a, b, c) = (s.dbl(0)?, s.dbl(1)?, s.dbl(2)?);
                s.wr64(&lanes(|l| a[l].mul_add(b[l], c[l]).to_bits()));
            }
            Double::Dsetp { cmp, bop } => {
                let (a, b) = (s.dbl(0)?, s.dbl(1)?);
                s.setp_two(compare(cmp, &a, &b), bop);
            }
        }
        Ok(())
    }
}
