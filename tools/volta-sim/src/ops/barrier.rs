//! Barriers of a CTA, of memory and of the scoreboards.

use super::class::Class;
use crate::cta::Arrival;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::operand::Operand;
use crate::step::{SimResult, Step};

impl Class for Barrier {
    fn decode(d: &mut Decoder) -> Decoded {
        let (op, unit) = match d.base {
            "BAR" => {
                let mode = if d.has("ARV") {
                    BarMode::Arv
                } else if d.has("RED") {
                    if d.has("POPC") {
                        BarMode::RedPopc
                    } else if d.has("AND") {
                        BarMode::RedAnd
                    } else {
                        BarMode::RedOr
                    }
                } else if d.has("SYNC") {
                    BarMode::Sync
                } else {
                    return Err(d.fail("BAR mode"));
                };
                d.src(0)?;
                if d.src_follows() {
                    d.src(1)?;
                }
                d.opt_psrcs();
                (Barrier::Bar(mode), Unit::Ctl)
            }
            "B2R" => {
                d.dst()?;
                d.opt_pdsts(2);
                (Barrier::B2r, Unit::Lsu)
            }
            "MEMBAR" => (Barrier::Membar, Unit::Lsu),
            "DEPBAR" => {
                let Some(Operand::Sb(sb)) = d.next() else { return Err(d.fail("scoreboard")) };
                let n = if d.has("LE") { d.imm()? as u8 } else { 0 };
                (Barrier::Depbar { sb, n }, Unit::Ctl)
            }
            _ => return Ok(None),
        };
        d.inst.unit = unit;
        Ok(Some(Op::Barrier(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Barrier::Bar(mode) => {
                let (id, threads) = (s.raw(0)?[0] as usize & 15, s.raw(1)?[0]);
                let arrival = Arrival { id, mode, group: s.group, threads, mask: s.m, votes: s.p(0) & s.m };
                s.arrival = (s.m != 0).then_some(arrival);
            }
            Barrier::B2r => {
                let v = s.w.bar_result;
                s.wr(&[v; 32]);
                s.setp(0, ((v != 0) as u32).wrapping_neg());
            }
            Barrier::Membar | Barrier::Depbar { .. } => {}
        }
        Ok(())
    }
}
