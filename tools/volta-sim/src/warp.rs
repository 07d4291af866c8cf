//! The state of one warp: registers, predicates, and the groups that divergent branches divide its threads into. `ops` changes it.

use crate::isa::*;
use crate::lanes::{assign, Each, V};

/// Whether a group can run, or what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupState {
    Run,
    /// waiting at BSYNC Bn
    Bsync(u8),
    /// waiting at WARPSYNC for these lanes
    Warpsync(u32),
    /// waiting at the CTA barrier of this number
    Bar(u8),
}

/// Threads of a warp that share a pc: the address in bytes of their next instruction. `mask` has a bit per lane.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub pc: u32,
    pub mask: u32,
    pub state: GroupState,
}

/// A warp of a resident CTA.
pub struct Warp {
    /// by register number (`isa::Reg`), a value per lane
    pub regs: Vec<V>,
    /// by predicate number, a bit per lane: the threads' own, then the uniform ones, whose lanes are equal
    pub pred: [u32; 16],
    pub groups: Vec<Group>,
    /// the group that executes
    pub current: usize,
    /// convergence barriers by number (B0 to B15): per lane, the mask of the lanes that it waits for there
    pub convergence: [[u32; 32]; 16],
    /// threads that have not exited
    pub live: u32,
    /// local memory, lane after lane; empty until the first access
    pub local: Vec<u8>,
    /// result of its last barrier with a reduction
    pub bar_result: u32,
    /// its number in its CTA
    pub index: u32,
    /// index of the buffer of global memory that it accessed last, where the next look-up begins
    pub hint: usize,
    /// instructions that it has executed
    pub insts: u64,
}

impl Warp {
    /// Returns a warp before its first instruction. `nregs`: registers of a thread; `live`: its threads, a bit each.
    pub fn new(index: u32, nregs: usize, live: u32) -> Self {
        let mut pred = [0; 16];
        pred[PT as usize] = !0;
        Warp {
            regs: vec![[0; 32]; nregs],
            pred,
            groups: vec![Group { pc: 0, mask: live, state: GroupState::Run }],
            current: 0,
            convergence: [[0; 32]; 16],
            live,
            local: vec![],
            bar_result: 0,
            index,
            hint: 0,
            insts: 0,
        }
    }
    /// Returns a predicate that is read, a bit per lane.
    #[inline(always)]
    pub fn predicate(&self, p: PredOp) -> u32 {
        self.pred[p.idx as usize] ^ (p.neg as u32).wrapping_neg()
    }
    /// Writes a predicate for the lanes in `mask`. A write to PT has no effect.
    #[inline(always)]
    pub fn set_predicate(&mut self, p: u8, val: u32, mask: u32) {
        if p != PT {
            let r = &mut self.pred[p as usize];
            *r = (*r & !mask) | (val & mask);
        }
    }
    /// Writes a register for the lanes in `mask`. A write to RZ has no effect.
    #[inline(always)]
    pub fn write(&mut self, r: Reg, v: &V, mask: u32) {
        if r != RZ {
            assign(&mut self.regs[r as usize], v, mask);
        }
    }
    /// Writes the pair of registers `r`, the low word, and `r + 1`.
    #[inline(always)]
    pub fn write64(&mut self, r: Reg, v: &[u64; 32], mask: u32) {
        if r != RZ {
            self.write(r, &v.each(|x| x as u32), mask);
            self.write(r + 1, &v.each(|x| (x >> 32) as u32), mask);
        }
    }
    #[inline(always)]
    pub fn reg(&self, r: Reg) -> V {
        if r == RZ {
            [0; 32]
        } else {
            self.regs[r as usize]
        }
    }
    /// Returns the index of the group to run: the current one, else the runnable one with the least pc. None: all wait or have exited.
    #[inline(always)]
    pub fn select(&mut self) -> Option<usize> {
        let runs = |g: &Group| g.state == GroupState::Run;
        if !self.groups.get(self.current).is_some_and(runs) {
            (self.current, _) = self.groups.iter().enumerate().filter(|(_, g)| runs(g)).min_by_key(|(_, g)| g.pc)?;
        }
        Some(self.current)
    }
    /// Returns true once all threads have exited.
    pub fn done(&self) -> bool {
        self.groups.is_empty()
    }
    /// Merges runnable groups that have the same pc into the current one.
    pub fn merge_current(&mut self) {
        let Some(&g) = self.groups.get(self.current).filter(|g| g.state == GroupState::Run) else { return };
        let mut i = 0;
        while i < self.groups.len() {
            let o = self.groups[i];
            if i != self.current && o.state == GroupState::Run && o.pc == g.pc {
                self.groups[self.current].mask |= o.mask;
                self.groups.remove(i);
                if i < self.current {
                    self.current -= 1;
                }
            } else {
                i += 1;
            }
        }
    }
    /// Releases convergence barriers and WARPSYNCs whose participants have all arrived or exited: they continue at the next instruction,
    /// and those at one pc become one group.
    pub fn check_sync(&mut self) {
        let mut i = 0;
        while i < self.groups.len() {
            let g = self.groups[i];
            let convergence = &self.convergence;
            // the mask that a group's threads got from their BSSY. It tells apart the frames of a recursion that use the same B register
            let scope = |o: &Group, b: u8| convergence[b as usize][o.mask.trailing_zeros() as usize & 31];
            let need = match g.state {
                GroupState::Bsync(b) => scope(&g, b),
                GroupState::Warpsync(m) => m,
                _ => {
                    i += 1;
                    continue;
                }
            };
            // whether a group waits at the same barrier as `g`
            let same = |o: &Group| match g.state {
                GroupState::Bsync(b) => o.state == g.state && scope(o, b) == scope(&g, b),
                _ => matches!(o.state, GroupState::Warpsync(_)) && o.pc == g.pc,
            };
            let need = need & self.live;
            let have = self.groups.iter().filter(|o| same(o)).fold(0, |a, o| a | o.mask);
            if need & !have != 0 {
                i += 1;
                continue;
            }
            let mut merged: Vec<Group> = vec![]; // the released threads, by their next pc
            self.groups.retain(|o| {
                // the participants, and `g` itself if its own mask leaves it out
                if same(o) && (o.mask & need != 0 || o.mask == g.mask) {
                    match merged.iter_mut().find(|m| m.pc == o.pc + 16) {
                        Some(m) => m.mask |= o.mask,
                        None => merged.push(Group { pc: o.pc + 16, mask: o.mask, state: GroupState::Run }),
                    }
                    false
                } else {
                    true
                }
            });
            self.groups.extend(merged);
            self.current = self.groups.len() - 1;
            i = 0;
        }
    }
}
