//! The state of one CTA (thread block): its warps, shared memory and named barriers. `ops` executes its instructions (`Cta::step`).

use crate::env::Env;
use crate::isa::BarMode;
use crate::warp::{GroupState, Warp};

/// Threads of a warp that execute a BAR.
pub struct Arrival {
    /// the barrier, 0 to 15
    pub id: usize,
    pub mode: BarMode,
    /// index in Warp::groups of the group that executes it: threads that diverged together and share a pc
    pub group: usize,
    /// threads that the barrier waits for; 0: all of the CTA
    pub threads: u32,
    /// lanes that arrive, a bit each
    pub mask: u32,
    /// those of them whose predicate holds: they vote yes in a reduction
    pub votes: u32,
}

/// A named barrier, and the reduction (BAR.RED) over the votes of the threads that have arrived.
#[derive(Default, Clone)]
pub struct NamedBarrier {
    /// number of warps that have arrived
    pub arrived: u32,
    /// number of warps that it waits for; 0: all of the CTA
    pub expect: u32,
    /// warps that have arrived and wait: all but those of BAR.ARV
    pub waiting: Vec<usize>,
    /// number of threads that voted yes
    pub yes_votes: u32,
    /// whether a thread voted no
    pub has_no: bool,
}

/// A resident CTA. `id` is its index (x, y, z) in the grid. `barriers` are by number, 0 to 15. `live_warps`: those with threads that have
/// not exited.
pub struct Cta {
    pub id: [u32; 3],
    pub shared: Vec<u8>,
    pub warps: Vec<Warp>,
    pub barriers: Vec<NamedBarrier>,
    pub live_warps: u32,
    /// warps that barriers released, for the timing model, which empties the list after each instruction
    pub released: Vec<usize>,
}

impl Cta {
    pub fn new(env: &Env, id: [u32; 3]) -> Self {
        let threads = env.block.iter().product::<u32>();
        let live_warps = threads.div_ceil(32);
        // the last warp may have fewer than 32 threads; reg_file: registers of a thread
        let live_lanes = |warp: u32| !0 >> (32 - (threads - warp * 32).min(32));
        let warps = (0..live_warps).map(|i| Warp::new(i, env.prog.reg_file, live_lanes(i))).collect();
        // all bits set are NaN in fp16 and fp32, so that reads of unwritten shared memory show
        let shared = vec![0xff; env.smem_bytes as usize];
        Cta { id, shared, warps, barriers: vec![NamedBarrier::default(); 16], live_warps, released: vec![] }
    }
    pub fn done(&self) -> bool {
        self.live_warps == 0
    }

    /// Threads of warp `warp_index` arrive at a barrier. Returns whether the whole warp has arrived. The last warp releases the barrier.
    pub fn arrive(&mut self, warp_index: usize, a: Arrival) -> bool {
        let b = &mut self.barriers[a.id];
        b.yes_votes += a.votes.count_ones();
        b.has_no |= a.votes != a.mask;
        b.expect = a.threads / 32;
        if a.mode != BarMode::Arv {
            let here = GroupState::Bar(a.id as u8);
            let w = &mut self.warps[warp_index];
            w.groups[a.group].state = here;
            let waiting = w.groups.iter().filter(|g| g.state == here).fold(0, |m, g| m | g.mask);
            if waiting != w.live {
                return false;
            }
            b.waiting.push(warp_index);
        }
        b.arrived += 1;
        let need = if b.expect == 0 { self.live_warps } else { b.expect };
        if b.arrived >= need {
            self.bar_release(a.id, Some(a.mode));
        }
        true
    }

    /// Resets barrier `id`, and lets the warps that wait there run with the result of the last arrival's mode.
    fn bar_release(&mut self, id: usize, mode: Option<BarMode>) {
        let b = std::mem::take(&mut self.barriers[id]);
        let val = match mode {
            Some(BarMode::RedPopc) => b.yes_votes,
            Some(BarMode::RedAnd) if !b.has_no => !0,
            Some(BarMode::RedOr) if b.yes_votes > 0 => !0,
            _ => 0,
        };
        for warp_index in b.waiting {
            let w = &mut self.warps[warp_index];
            w.bar_result = val;
            for g in w.groups.iter_mut() {
                if g.state == GroupState::Bar(id as u8) {
                    g.state = GroupState::Run;
                }
            }
            w.current = 0; // the index of the group that runs
            w.merge_current(); // groups that waited at one pc become one
            self.released.push(warp_index);
        }
    }

    /// Counts a warp whose threads have all exited. Barriers of the whole CTA no longer expect it.
    pub fn warp_exited(&mut self) {
        self.live_warps -= 1;
        for id in 0..16 {
            let b = &self.barriers[id];
            if b.arrived > 0 && b.expect == 0 && b.arrived >= self.live_warps {
                // no arrival's mode is kept, so a reduction that an exit completes has the result 0
                self.bar_release(id, None);
            }
        }
    }

    /// Returns text for a deadlock's error: where every live warp waits.
    pub fn stuck(&self) -> String {
        let groups = self.warps.iter().flat_map(|w| w.groups.iter().map(move |g| (w.index, g)));
        groups.map(|(i, g)| format!(" warp {i}: pc 0x{:x} mask {:#x} {:?};", g.pc, g.mask, g.state)).collect()
    }
}
