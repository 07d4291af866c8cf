//! Timing model of one SM, which launch.rs makes and runs: issue follows the control codes (stall counts and scoreboards in each
//! instruction), pipes and memory are resources with a "free at" time, and instructions execute functionally when they issue. Times are
//! cycles. A line of code is 128 bytes, 8 instructions. A sub-partition is one of the SM's four schedulers with its pipes. A slot is room
//! for a resident CTA. Tests: tests/real_cards.rs, tests/in_process.rs.

use crate::cta::Cta;
use crate::env::Env;
use crate::machine::Machine;
use crate::step::{Access, SimResult};
use std::collections::HashMap;

mod cache;
mod counters;
mod issue;
mod memory;

pub use counters::{Counters, Stalls};

use cache::{Cache, ICache, ABSENT}; // ICache::ready has for each line the cycle from which it is here, or ABSENT
use counters::{SubPartition, WarpTiming}; // WarpTiming: a resident warp as its scheduler sees it

/// The simulated SM. Fields with `free` are cycles from which a resource is free: the data stage of memory instructions (`lsu`), the way of
/// code lines out of the L1.5 instruction cache (`l15`) and into it from L2 (`l15_fill`), and the SM's shares of L2 and DRAM bandwidth.
pub struct SmSim<'a, 'e> {
    env: &'a Env<'e>,
    machine: &'a Machine,
    pub counters: Counters,
    /// by instruction of the code, like the next three: how often a warp executed it
    pub executions: Vec<u64>,
    /// cycles that warps waited before they issued it
    pub wait_cycles: Vec<u64>,
    /// shared-memory wavefronts, and those beyond the ideal
    pub smem_wavefronts: Vec<u64>,
    pub excess_wavefronts: Vec<u64>,
    /// resident warps, those of CTA slot s from s * (warps of a CTA) on, and CTAs by slot
    warps: Vec<Option<WarpTiming>>,
    ctas: Vec<Option<Cta>>,
    subs: Vec<SubPartition>,
    lsu_free: u64,
    l15: ICache,
    l15_free: u64,
    l15_fill_free: u64,
    l2_free: f64,
    dram_free: f64,
    /// rates of this SM in bytes per cycle
    l2_rate: f64,
    dram_rate: f64,
    l1: Cache,
    l2: Cache,
    /// sectors that were prefetched and not loaded yet, and when they arrive in L2
    in_flight: HashMap<u64, u64>,
    /// by buffer, the sectors that this SM still fetches from DRAM: its share, as other SMs bring the rest into L2
    dram_budget: Vec<u64>,
    /// cycles of the first and the last read of the clock by the first warp that reads it
    pub clock_reads: Option<(u64, u64)>,
    clock_reader: Option<usize>,
    /// warps launched so far
    launched: u64,
}

impl<'a, 'e> SmSim<'a, 'e> {
    /// Returns an SM that holds `slots` CTAs with `smem_per_cta` bytes of shared memory each. Shared memory takes the least carve-out of
    /// the L1 that holds them. `busy_sms` SMs, this one among them, share the bytes and the bandwidth of L2 and DRAM.
    pub fn new(env: &'a Env<'e>, m: &'a Machine, slots: u32, smem_per_cta: u32, busy_sms: u32) -> Self {
        let used = slots * smem_per_cta.div_ceil(m.smem_gran) * m.smem_gran;
        let carve = m.smem_carve_kib.iter().map(|k| k * 1024).find(|&k| k >= used).unwrap_or(m.smem_per_sm);
        let warps_per_cta = env.block.iter().product::<u32>().div_ceil(32);
        let n = env.prog.code.len();
        let lines = n.div_ceil(8); // of code
        let equal = f64::from(m.sms) / f64::from(busy_sms);
        let share = equal.min(m.l2_port_bytes_per_clk / m.l2_bytes_per_clk).max(1.0); // of the bandwidth; 1: where all SMs are busy
        SmSim {
            env,
            machine: m,
            counters: Counters::default(),
            executions: vec![0; n],
            wait_cycles: vec![0; n],
            smem_wavefronts: vec![0; n],
            excess_wavefronts: vec![0; n],
            warps: (0..slots * warps_per_cta).map(|_| None).collect(),
            ctas: (0..slots).map(|_| None).collect(),
            // the second argument: a seed of its own for each cache
            subs: (0..m.subs).map(|i| SubPartition { l0: ICache::new(lines, i as u64 + 1), ..SubPartition::default() }).collect(),
            lsu_free: 0,
            l15: ICache::new(lines, 1),
            l15_free: 0,
            l15_fill_free: 0,
            l2_free: 0.0,
            dram_free: 0.0,
            l2_rate: m.l2_bytes_per_clk * share,
            dram_rate: m.dram_bytes_per_clk() * share,
            l1: Cache::new((m.l1_smem_total - carve) as u64, 64), // bytes, ways
            l2: Cache::new(m.l2_bytes, 16),
            in_flight: HashMap::new(),
            // `exchanged`: other CTAs wrote the buffer just before, so it is in L2
            dram_budget: env.mem.bufs.iter().map(|b| if b.exchanged { 0 } else { b.len.div_ceil(32).div_ceil(busy_sms.into()) }).collect(),
            clock_reads: None,
            clock_reader: None,
            launched: 0,
        }
    }

    /// Runs the given CTAs, indices (x, y, z) in dispatch order, to completion. Each starts when a slot is free.
    pub fn run(&mut self, list: &[[u32; 3]]) -> SimResult<()> {
        let mut pending = list.iter();
        let mut now = 0u64;
        let mut acc = Access::default();
        for s in 0..self.ctas.len() {
            if let Some(&id) = pending.next() {
                self.launch(s, id, self.machine.cta_launch);
            }
        }
        let mut live = self.ctas.iter().filter(|c| c.is_some()).count();
        let mut resident: u64 = self.warps.iter().flatten().count() as u64;
        while live > 0 {
            let mut issued = false;
            let mut next_event = u64::MAX;
            for s in 0..self.subs.len() {
                match self.pick(s, now) {
                    Ok(w) => {
                        issued = true;
                        if let Some(slot) = self.issue(s, w, now, &mut acc)? {
                            // CTA finished: refill its slot
                            live -= 1;
                            self.counters.ctas += 1;
                            self.ctas[slot] = None;
                            if let Some(&id) = pending.next() {
                                self.launch(slot, id, now + self.machine.cta_launch);
                                live += 1;
                            }
                            resident = self.warps.iter().flatten().count() as u64;
                        }
                    }
                    Err(t) => next_event = next_event.min(t),
                }
            }
            let step = if issued {
                1
            } else if next_event == u64::MAX {
                let stuck: String = self.ctas.iter().flatten().map(|c| format!("\n  CTA {:?}:{}", c.id, c.stuck())).collect();
                return Err(format!("deadlock at cycle {now}:{stuck}"));
            } else {
                next_event.max(now + 1) - now
            };
            self.counters.resident_warp_cycles += resident * step;
            now += step;
        }
        self.counters.cycles = now;
        Ok(())
    }

    /// Puts a CTA into a slot. Its warps may issue from cycle `at` on.
    fn launch(&mut self, slot: usize, id: [u32; 3], at: u64) {
        let cta = Cta::new(self.env, id);
        let n = cta.warps.len();
        for warp_index in 0..n {
            let k = slot * n + warp_index;
            self.warps[k] =
                Some(WarpTiming { cta: slot, warp_index, age: self.launched, next: at, ready: at, last_issue: at, ..Default::default() });
            // sub-partitions get warps in turn, across CTAs too
            self.subs[(self.launched % u64::from(self.machine.subs)) as usize].warps.push(k);
            self.launched += 1;
        }
        self.ctas[slot] = Some(cta);
    }

    /// Returns the warp from which scheduler `s` issues at cycle `now`, or as an error the next cycle at which it may have one.
    fn pick(&mut self, s: usize, now: u64) -> Result<usize, u64> {
        let mut best: Option<usize> = None;
        let mut best_rank = u64::MAX;
        let mut next = u64::MAX;
        let (last, last_yielded) = (self.subs[s].last, self.subs[s].last_yield);
        for i in 0..self.subs[s].warps.len() {
            let k = self.subs[s].warps[i];
            let Some(w) = self.warps[k].as_mut() else { continue };
            if w.blocked {
                continue;
            }
            if w.ready > now {
                next = next.min(w.ready);
                continue;
            }
            let age = w.age;
            w.scans += 1;
            let warp = &mut self.ctas[w.cta].as_mut().unwrap().warps[w.warp_index];
            // the group (threads that share a pc) that runs next
            let g = warp.select().expect("unblocked warp has a runnable group");
            let pc = warp.groups[g].pc;
            // Cta::step fails for a pc outside the code
            let Some(inst) = self.env.prog.code.get((pc / 16) as usize) else { return Ok(k) };
            if self.machine.icache {
                let t = self.fetch(s, pc / 128, now);
                if t > now {
                    next = next.min(t);
                    self.warps[k].as_mut().unwrap().fetch_wait += 1;
                    continue;
                }
            }
            let free = self.unit_free(s, inst);
            if free > now {
                next = next.min(free);
                self.warps[k].as_mut().unwrap().pipe_wait += 1;
                continue;
            }
            // the least rank issues: greedily the warp that issued last, then the oldest. A yield hint pushes the last warp to the back
            let rank = match last == Some(k) {
                true if last_yielded => u64::MAX - 1,
                true => 0,
                false => age + 1,
            };
            if rank < best_rank {
                best_rank = rank;
                best = Some(k);
            }
        }
        best.ok_or(next)
    }

    /// Returns when sub-partition `s` can issue from the code line. Starts fetches of it and of `l0_prefetch` lines after it.
    fn fetch(&mut self, s: usize, line: u32, now: u64) -> u64 {
        let cap = (self.machine.l0_bytes / 128) as usize;
        self.subs[s].l0.used[line as usize] = now;
        for l in line..=(line + self.machine.l0_prefetch).min(self.subs[s].l0.ready.len() as u32 - 1) {
            if self.subs[s].l0.ready[l as usize] != ABSENT {
                continue;
            }
            let start = self.in_l15(l, now).max(self.l15_free);
            self.l15_free = start + self.machine.l0_line_cycles;
            self.counters.l0_fills += 1;
            self.subs[s].l0.fill(l, line, cap, self.machine.l0_random, now, start + self.machine.l0_miss_latency);
        }
        self.subs[s].l0.ready[line as usize]
    }

    /// Returns when the code line can leave the L1.5, which may have to fetch it from L2.
    fn in_l15(&mut self, line: u32, now: u64) -> u64 {
        if self.machine.l15_bytes == 0 {
            return now;
        }
        if self.l15.ready[line as usize] == ABSENT {
            // never used: an earlier launch has left it there
            let ready = if self.l15.used[line as usize] == 0 {
                now
            } else {
                let start = now.max(self.l15_fill_free);
                self.l15_fill_free = start + self.machine.l15_line_cycles;
                self.counters.l15_fills += 1;
                start + self.machine.l2_latency
            };
            // `line` is also the one to keep; false: it replaces the line unused longest, not a random one
            self.l15.fill(line, line, (self.machine.l15_bytes / 128) as usize, false, now, ready);
        }
        self.l15.used[line as usize] = now;
        self.l15.ready[line as usize].max(now)
    }
}
