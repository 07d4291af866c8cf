//! Moves, and choices between two registers.

use super::{Class, Op};
use crate::decode::{Decoded, Decoder};
use crate::lanes::*;
use crate::step::{SimResult, Step};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Select {
    Mov,
    Sel,
    Fsel,
}

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
