//! Branches, calls and exits, convergence barriers, and barriers of a CTA, of memory and of the scoreboards.
//!
//! A warp's threads are in groups that share a pc ([`crate::warp`]). `Cta::step` moves the running group's pc to the next instruction (16
//! bytes on), then calls `execute`, which overwrites it for a branch. In `execute`, `gi` is the index of the running group, `here` the mask
//! of its lanes, and `m` the mask of those whose guard holds. A branch that only some take divides the group.
//! `merge_current` joins groups that have met at one pc; `check_sync` releases barriers whose threads have all come or exited.

use crate::cta::Arrival;
use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::operand::Operand;
use crate::step::{Class, SimResult, Step};
use crate::warp::{Group, GroupState};

impl Class for Branch {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "BRA" | "JMP" | "CALL" => {
                d.opt_pred_srcs();
                match d.next() {
                    Some(Operand::Label(t)) => d.inst.target = t,
                    _ => return Err(d.fail("branch target")),
                }
                if d.base == "CALL" {
                    Branch::Call
                } else if d.has("DIV") || d.has("CONV") {
                    // taken by the whole group or not at all: CONV if it has all live threads of the warp, DIV if it does not
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
                // the offset counts from the next instruction
                d.inst.target = (d.inst.pc + 16).wrapping_add(offset);
                Branch::Brx
            }
            "RET" => {
                d.src(0)?;
                Branch::Ret
            }
            "EXIT" => {
                d.opt_pred_srcs();
                Branch::Exit
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Ctl;
        Ok(Some(Op::Branch(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        let (m, here, gi) = (s.active, s.group_mask, s.group);
        match self {
            Branch::Bra => {
                let take = m & s.predicate(0) & s.predicate(1);
                jump(s, take);
                s.warp.merge_current();
            }
            Branch::BraIf { converged } => {
                if (here == s.warp.live) == converged && m == here {
                    jump(s, here);
                }
            }
            // each thread goes to the pc in its register, for BRX plus the target: a group for each pc
            Branch::Brx | Branch::Ret => {
                let a = s.bits(0)?;
                let add = if self == Branch::Brx { s.inst.target } else { 0 };
                let rest = here & !m;
                let mut todo = m;
                s.warp.groups.remove(gi);
                if rest != 0 {
                    s.warp.groups.push(Group { pc: s.inst.pc + 16, mask: rest, state: GroupState::Run });
                }
                while todo != 0 {
                    let l = todo.trailing_zeros() as usize;
                    let t = a[l].wrapping_add(add);
                    let same = mask_of(|k| a[k] == a[l]) & todo;
                    s.warp.groups.push(Group { pc: t, mask: same, state: GroupState::Run });
                    todo &= !same;
                }
                s.warp.current = s.warp.groups.len() - 1;
                s.access.taken = m != 0;
                s.warp.merge_current();
            }
            Branch::Call => jump(s, m),
            Branch::Exit => {
                let m = m & s.predicate(0);
                if m != 0 {
                    s.warp.live &= !m;
                    s.warp.groups[gi].mask &= !m;
                    if s.warp.groups[gi].mask == 0 {
                        s.warp.groups.remove(gi);
                    }
                    s.warp.current = 0;
                    s.warp.check_sync();
                }
            }
        }
        Ok(())
    }
}

/// Moves the threads in `take` to the instruction's target: as a group of their own if others of their group stay.
#[inline(always)]
fn jump(s: &mut Step, take: u32) {
    if take == s.group_mask {
        s.warp.groups[s.group].pc = s.inst.target;
    } else if take != 0 {
        s.warp.groups[s.group].mask = s.group_mask & !take;
        s.warp.groups.push(Group { pc: s.inst.target, mask: take, state: GroupState::Run });
    }
    s.access.taken = take != 0;
}

// ---- convergence barriers: BSSY Bn stores the mask of its threads in Bn, and each of them waits at BSYNC Bn for the others. Bn has a
// mask per lane: lanes in different frames of a recursion wait for different threads ----

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
                d.opt_pred_srcs();
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
                d.opt_pred_srcs().src(0)?;
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
        let (m, here, gi) = (s.active, s.group_mask, s.group);
        match self {
            Convergence::Bssy(b) => assign(&mut s.warp.convergence[b as usize], &[m; 32], m),
            Convergence::Bsync(b) => {
                // lanes that met at this pc from different frames of a recursion wait separately
                let bars = s.warp.convergence[b as usize];
                let mut todo = m;
                let mut scopes = vec![];
                while todo != 0 {
                    let scope = bars[todo.trailing_zeros() as usize];
                    let same = mask_of(|l| bars[l] == scope) & todo;
                    scopes.push((scope, same));
                    todo &= !same;
                }
                if m != 0 && (scopes.len() > 1 || scopes[0].0 & s.warp.live & !m != 0) {
                    if here & !m == 0 {
                        s.warp.groups.remove(gi);
                    } else {
                        s.warp.groups[gi].mask = here & !m;
                    }
                    for (_, mask) in scopes {
                        // the pc stays at BSYNC until check_sync() releases the group
                        s.warp.groups.push(Group { pc: s.inst.pc, mask, state: GroupState::Bsync(b) });
                    }
                    s.warp.current = 0;
                    s.warp.check_sync();
                }
            }
            Convergence::Break(b) => {
                // takes threads out of the barrier, so that the others no longer wait for them
                let m = m & s.predicate(0);
                if m != 0 {
                    let scope = s.warp.convergence[b as usize][m.trailing_zeros() as usize];
                    for x in s.warp.convergence[b as usize].iter_mut().filter(|x| **x == scope) {
                        *x &= !m;
                    }
                    s.warp.check_sync();
                }
            }
            Convergence::BmovToReg { b, clear } => {
                let v = s.warp.convergence[b as usize];
                s.write(&v);
                if clear {
                    assign(&mut s.warp.convergence[b as usize], &[0; 32], m);
                }
            }
            Convergence::BmovFromReg(b) => {
                let v = s.bits(0)?;
                assign(&mut s.warp.convergence[b as usize], &v, m);
            }
            // waits for the lanes in its source
            Convergence::Warpsync => {
                let need = s.bits(0)?[m.trailing_zeros() as usize & 31] & s.warp.live;
                if m != 0 && need & !here != 0 {
                    let g = &mut s.warp.groups[gi];
                    g.pc = s.inst.pc;
                    g.state = GroupState::Warpsync(need);
                    s.warp.check_sync();
                }
            }
            Convergence::Yield => {
                if s.warp.groups.len() > 1 {
                    s.warp.current = (s.warp.current + 1) % s.warp.groups.len();
                }
            }
        }
        Ok(())
    }
}

// ---- barriers of a CTA, of memory and of the scoreboards -------------------------------------

impl Class for Barrier {
    fn decode(d: &mut Decoder) -> Decoded {
        let (op, unit) = match d.base {
            "BAR" => {
                let mode = match d.one_of(&[("ARV", BarMode::Arv), ("RED", BarMode::RedOr), ("SYNC", BarMode::Sync)]) {
                    Some(BarMode::RedOr) => d.one_of(&[("POPC", BarMode::RedPopc), ("AND", BarMode::RedAnd)]).unwrap_or(BarMode::RedOr),
                    Some(mode) => mode,
                    None => return Err(d.fail("BAR mode")),
                };
                d.src(0)?;
                if d.src_follows() {
                    d.src(1)?;
                }
                d.opt_pred_srcs();
                (Barrier::Bar(mode), Unit::Ctl)
            }
            "B2R" => {
                d.dst()?.opt_pred_dsts(2);
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
                let (id, threads) = (s.bits(0)?[0] as usize & 15, s.bits(1)?[0]);
                // Cta::step() passes it to the CTA, which may make the group wait
                let arrival = Arrival { id, mode, group: s.group, threads, mask: s.active, votes: s.predicate(0) & s.active };
                s.arrival = (s.active != 0).then_some(arrival);
            }
            Barrier::B2r => {
                let v = s.warp.bar_result;
                s.write(&[v; 32]);
                s.set_predicate(0, if v != 0 { !0 } else { 0 });
            }
            // they wait for memory and for results, which are there at once here: only the timing model (timing/) makes them take time
            Barrier::Membar | Barrier::Depbar { .. } => {}
        }
        Ok(())
    }
}
