//! Convergence barriers: where the threads of a warp that went different ways meet again.

use super::class::Class;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::operand::Operand;
use crate::step::{SimResult, Step};
use crate::warp::{GState, Group};

impl Class for Convergence {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "BSSY" => {
                let Some(Operand::B(b)) = d.next() else { return Err(d.fail("barrier register")) };
                if let Some(Operand::Label(t)) = d.next() {
                    d.inst.target = t;
                }
                Convergence::Bssy(b)
            }
            "BSYNC" | "BREAK" => {
                d.opt_psrcs();
                let Some(Operand::B(b)) = d.next() else { return Err(d.fail("barrier register")) };
                if d.base == "BSYNC" {
                    Convergence::Bsync(b)
                } else {
                    Convergence::Break(b)
                }
            }
            "BMOV" => match (d.next(), d.next()) {
                (Some(Operand::Src(s, _)), Some(Operand::B(b))) => {
                    d.inst.dst = s.val as Reg;
                    Convergence::BmovToReg { b, clear: d.has("CLEAR") }
                }
                (Some(Operand::B(b)), Some(Operand::Src(s, _))) => {
                    d.inst.src[0] = s;
                    Convergence::BmovFromReg(b)
                }
                _ => return Err(d.fail("BMOV operands")),
            },
            "WARPSYNC" => {
                d.opt_psrcs();
                d.src(0)?;
                Convergence::Warpsync
            }
            "YIELD" => Convergence::Yield,
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Ctl;
        Ok(Some(Op::Convergence(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        let (m, here, gi) = (s.m, s.together, s.group);
        match self {
            Convergence::Bssy(b) => {
                for l in 0..32 {
                    if m >> l & 1 != 0 {
                        s.w.bars[b as usize][l] = m;
                    }
                }
            }
            Convergence::Bsync(b) => {
                // lanes that met at this pc from different frames of a recursion wait separately
                let bars = s.w.bars[b as usize];
                let mut todo = m;
                let mut scopes = vec![];
                while todo != 0 {
                    let scope = bars[todo.trailing_zeros() as usize];
                    let same = mask_of(|l| bars[l] == scope) & todo;
                    scopes.push((scope, same));
                    todo &= !same;
                }
                if m != 0 && (scopes.len() > 1 || scopes[0].0 & s.w.live & !m != 0) {
                    if here & !m == 0 {
                        s.w.groups.remove(gi);
                    } else {
                        s.w.groups[gi].mask = here & !m;
                    }
                    for (_, mask) in scopes {
                        // pc advances on release
                        s.w.groups.push(Group { pc: s.inst.pc, mask, st: GState::Bsync(b) });
                    }
                    s.w.cur = 0;
                    s.w.check_sync();
                }
            }
            Convergence::Break(b) => {
                let m = m & s.p(0);
                if m != 0 {
                    let scope = s.w.bars[b as usize][m.trailing_zeros() as usize];
                    for x in s.w.bars[b as usize].iter_mut().filter(|x| **x == scope) {
                        *x &= !m;
                    }
                    s.w.check_sync();
                }
            }
            Convergence::BmovToReg { b, clear } => {
                let v = s.w.bars[b as usize];
                s.wr(&v);
                if clear {
                    for l in 0..32 {
                        if m >> l & 1 != 0 {
                            s.w.bars[b as usize][l] = 0;
                        }
                    }
                }
            }
            Convergence::BmovFromReg(b) => {
                let v = s.raw(0)?;
                for l in 0..32 {
                    if m >> l & 1 != 0 {
                        s.w.bars[b as usize][l] = v[l];
                    }
                }
            }
            Convergence::Warpsync => {
                let need = s.raw(0)?[m.trailing_zeros() as usize & 31] & s.w.live;
                if m != 0 && need & !here != 0 {
                    let g = &mut s.w.groups[gi];
                    g.pc = s.inst.pc;
                    g.st = GState::Warpsync(need);
                    s.w.check_sync();
                }
            }
            Convergence::Yield => {
                if s.w.groups.len() > 1 {
                    s.w.cur = (s.w.cur + 1) % s.w.groups.len();
                }
            }
        }
        Ok(())
    }
}
