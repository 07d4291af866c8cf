//! The uniform datapath of sm_75: scalar instructions that a warp executes once. A uniform register is kept as a register whose
//! lanes are equal ([`UR0`](crate::isa::UR0)), so that most of these are the instruction of the same name without the U, for all
//! lanes whatever path their threads take.

use super::{Class, Op, Select};
use crate::decode::{Decoded, Decoder};
use crate::isa::*;
use crate::step::{SimResult, Step};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Uniform {
    /// ULDC.64: a constant into a register pair
    Ldc64,
    /// a register that is the same in all threads
    R2ur,
}

/// Instructions that differ from those without the U in their registers alone.
const SCALARS: [&str; 15] =
    ["UIADD3", "UIMAD", "ULEA", "UISETP", "ULOP3", "USHF", "UPRMT", "UPOPC", "UFLO", "UBREV", "UBMSK", "USGXT", "UPLOP3", "UMOV", "USEL"];

impl Class for Uniform {
    fn decode(d: &mut Decoder) -> Decoded {
        let vector = match d.base {
            "R2UR" => {
                d.dst()?;
                d.src(0)?;
                return scalar(d, Some(Op::Uniform(Uniform::R2ur)));
            }
            "ULDC" => {
                d.allow(&["64"])?;
                d.dst()?;
                d.src(0)?;
                return scalar(d, Some(if d.has("64") { Op::Uniform(Uniform::Ldc64) } else { Op::Select(Select::Mov) }));
            }
            // not of the uniform datapath: it takes the way of S2R
            "S2UR" => {
                d.base = "S2R";
                d.inst.everywhere = !0;
                return Op::decode(d);
            }
            "VOTEU" => "VOTE",
            "UP2UR" => "P2R",
            "UR2UP" => "R2P",
            base if SCALARS.contains(&base) => &base[1..],
            _ => return Ok(None),
        };
        d.base = vector;
        d.inst.everywhere = !0;
        let op = Op::decode(d)?;
        scalar(d, op)
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Uniform::Ldc64 => {
                let v = s.int64(0)?;
                s.wr64(&v);
            }
            Uniform::R2ur => {
                let first = s.together.trailing_zeros() as usize & 31;
                let v = s.raw(0)?[first];
                s.wr(&[v; 32]);
            }
        }
        Ok(())
    }
}

fn scalar(d: &mut Decoder, op: Option<Op>) -> Decoded {
    d.inst.everywhere = !0;
    d.inst.unit = Unit::Uniform;
    Ok(op)
}
