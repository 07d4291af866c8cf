//! Branches, calls and exits: which threads of a warp go on where.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::operand::Operand;
use crate::step::{SimResult, Step};
use crate::warp::{GState, Group};

impl Class for Branch {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "BRA" | "JMP" | "CALL" => {
                d.opt_psrcs();
                match d.next() {
                    Some(Operand::Label(t)) => d.inst.target = t,
                    _ => return Err(d.fail("branch target")),
                }
                if d.base == "CALL" {
                    Branch::Call
                } else if d.has("DIV") || d.has("CONV") {
                    Branch::BraIf { converged: d.has("CONV") }
                } else {
                    Branch::Bra
                }
            }
            "BRX" | "JMX" => {
                d.src(0)?;
                let offset = match d.next() {
                    None => 0,
                    Some(Operand::Src(s, _)) if s.kind == SrcKind::Imm => s.val,
                    _ => return Err(d.fail("BRX offset")),
                };
                // from the next instruction
                d.inst.target = (d.inst.pc + 16).wrapping_add(offset);
                Branch::Brx
            }
            "RET" => {
                d.src(0)?;
                Branch::Ret
            }
            "EXIT" => {
                d.opt_psrcs();
                Branch::Exit
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Ctl;
        Ok(Some(Op::Branch(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        let (m, here, gi) = (s.m, s.together, s.group);
        match self {
            Branch::Bra => {
                let take = m & s.p(0) & s.p(1);
                if take == here {
                    s.w.groups[gi].pc = s.inst.target;
                    s.acc.taken = true;
                } else if take != 0 {
                    s.w.groups[gi].mask = here & !take;
                    s.w.groups.push(Group { pc: s.inst.target, mask: take, st: GState::Run });
                    s.acc.taken = true;
                }
                s.w.merge_current();
            }
            Branch::BraIf { converged } => {
                if (here == s.w.live) == converged && m == here {
                    s.w.groups[gi].pc = s.inst.target;
                    s.acc.taken = true;
                }
            }
            Branch::Brx | Branch::Ret => {
                let a = s.raw(0)?;
                let add = if self == Branch::Brx { s.inst.target } else { 0 };
                let rest = here & !m;
                let mut todo = m;
                s.w.groups.remove(gi);
                if rest != 0 {
                    s.w.groups.push(Group { pc: s.inst.pc + 16, mask: rest, st: GState::Run });
                }
                while todo != 0 {
                    let l = todo.trailing_zeros() as usize;
                    let t = a[l].wrapping_add(add);
                    let same = mask_of(|k| a[k] == a[l]) & todo;
                    s.w.groups.push(Group { pc: t, mask: same, st: GState::Run });
                    todo &= !same;
                }
                s.w.cur = s.w.groups.len() - 1;
                s.acc.taken = m != 0;
                s.w.merge_current();
            }
            Branch::Call => {
                if m == here {
                    s.w.groups[gi].pc = s.inst.target;
                } else if m != 0 {
                    s.w.groups[gi].mask = here & !m;
                    s.w.groups.push(Group { pc: s.inst.target, mask: m, st: GState::Run });
                }
                s.acc.taken = m != 0;
            }
            Branch::Exit => {
                let m = m & s.p(0);
                if m != 0 {
                    s.w.live &= !m;
                    s.w.groups[gi].mask &= !m;
                    if s.w.groups[gi].mask == 0 {
                        s.w.groups.remove(gi);
                    }
                    s.w.cur = 0;
                    s.w.check_sync();
                }
            }
        }
        Ok(())
    }
}
