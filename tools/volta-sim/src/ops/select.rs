//! Moves, and choices between two registers.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{SimResult, Step};

impl Class for Select {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "MOV" => {
                d.dst()?;
                d.src(0)?;
                Select::Mov
            }
            "SEL" | "FSEL" => {
                d.dst()?;
                d.srcs(2)?;
                d.opt_psrcs();
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
            Select::Mov => {
                let a = s.raw(0)?;
                s.wr(&a);
            }
            Select::Sel => {
                let (a, b, p) = (s.int(0)?, s.int(1)?, s.p(0));
                s.wr(&lanes(|l| if p >> l & 1 != 0 { a[l] } else { b[l] }));
            }
            Select::Fsel => {
                let (a, b, p) = (s.flt(0)?, s.flt(1)?, s.p(0));
                s.wr(&lanes(|l| if p >> l & 1 != 0 { a[l].to_bits() } else { b[l].to_bits() }));
            }
        }
        Ok(())
    }
}
