//! The uniform datapath of sm_75: scalar instructions that a warp executes once. A uniform register is kept as a register whose lanes are
//! equal ([`UR0`]), so most of these execute as the instruction of the same name without the U, for all lanes, active or not.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::Each;
use crate::step::{Class, SimResult, Step};

/// Instructions that differ from those without the U in their registers alone.
const SCALARS: [&str; 15] =
    ["UIADD3", "UIMAD", "ULEA", "UISETP", "ULOP3", "USHF", "UPRMT", "UPOPC", "UFLO", "UBREV", "UBMSK", "USGXT", "UPLOP3", "UMOV", "USEL"];

/// Gives a uniform instruction the name of the vector instruction that does the same; others keep theirs. Returns true if it is timed on
/// the uniform datapath.
pub fn as_vector(d: &mut Decoder) -> Result<bool, String> {
    let (vector, scalar) = match d.base {
        "ULDC" => {
            d.allow(&["64", "U16", "U8"])?;
            if d.has_indexed_constant() {
                // no published measurement has the cost of an indexed ULDC, so it is timed as LDC, which is slower than a plain ULDC
                (d.base, d.inst.everywhere) = ("LDC", !0);
                return Ok(false);
            }
            (if ["64", "U16", "U8"].iter().any(|width| d.has(width)) { "ULDC" } else { "MOV" }, true)
        }
        // not of the uniform datapath: it is timed as S2R
        "S2UR" => ("S2R", false),
        "R2UR" => ("R2UR", true),
        "VOTEU" => ("VOTE", true),
        "UP2UR" => ("P2R", true),
        "UR2UP" => ("R2P", true),
        base if SCALARS.contains(&base) => (&base[1..], true),
        _ => return Ok(false),
    };
    d.base = vector;
    d.inst.everywhere = !0; // mask of lanes that it writes even if they are not active
    Ok(scalar)
}

impl Class for Uniform {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "ULDC" if d.has("U8") => Uniform::LdcNarrow(0xff),
            "ULDC" if d.has("U16") => Uniform::LdcNarrow(0xffff),
            "ULDC" => Uniform::Ldc64,
            "R2UR" => Uniform::R2ur,
            _ => return Ok(None),
        };
        d.dst()?.src(0)?;
        Ok(Some(Op::Uniform(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Uniform::Ldc64 => s.write64(&s.int64(0)?),
            Uniform::LdcNarrow(mask) => s.write(&s.bits(0)?.each(|word| word & mask)),
            Uniform::R2ur => {
                // all active lanes hold the same value, so that of the first one serves (`group_mask`: mask of the lanes that execute)
                let first = s.group_mask.trailing_zeros() as usize & 31;
                s.write(&[s.bits(0)?[first]; 32]);
            }
        }
        Ok(())
    }
}
