//! Functional model: executes one warp instruction at a time. What each does: [`crate::ops`].

use crate::cta::Cta;
use crate::env::Env;
use crate::ops;
use crate::step::{Access, SimResult, Step};
use crate::warp::Group;

impl Cta {
    /// Execute the next instruction of warp `wi`. The caller has checked that the warp is runnable.
    /// `now` feeds the clock registers. Returns the index of the executed instruction.
    pub fn step(&mut self, wi: usize, env: &Env, now: u64, acc: &mut Access) -> SimResult<usize> {
        let w = &mut self.warps[wi];
        let group = match w.select() {
            Some(g) => g,
            None => return Err(format!("kernel `{}`: warp {wi} stepped while blocked", env.prog.name)),
        };
        let Group { pc, mask: together, .. } = w.groups[group];
        let idx = (pc / 16) as usize;
        let Some(inst) = env.prog.code.get(idx) else {
            return Err(format!("kernel `{}`: pc 0x{pc:x} outside the code", env.prog.name));
        };
        let m = (together | inst.everywhere) & w.p(inst.guard);
        acc.mask = m;
        acc.taken = false;
        w.insts += 1;
        w.groups[group].pc = pc + 16;

        let mut s = Step { env, inst, w, group, together, m, shared: &mut self.shared, cta: &self.id, now, acc, arrival: None };
        ops::execute(inst.op, &mut s)?;
        if let Some(arrival) = s.arrival {
            if !self.arrive(wi, arrival) {
                return Ok(idx);
            }
        } else if s.w.done() {
            self.warp_exited();
        }
        let w = &mut self.warps[wi];
        if w.groups.len() > 1 {
            // let the other side of a divergent spin loop make progress
            if w.insts % 4096 == 0 {
                w.cur = (w.cur + 1) % w.groups.len();
            }
            w.merge_current();
        }
        Ok(idx)
    }
}
