//! Timing model of one SM: issue follows the control codes, pipes and memory are resources with a
//! "free at" time, and instructions execute functionally when they issue.

use crate::cta::Cta;
use crate::env::Env;
use crate::isa::*;
use crate::machine::Machine;
use crate::mem::Buffer;
use crate::ops::memory::shared_offset;
use crate::step::{Access, SimResult};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};

/// Set-associative, sectored, LRU tag store.
struct Cache {
    sets: Vec<Vec<Line>>,
    ways: usize,
    tick: u64,
}
struct Line {
    tag: u64,
    sectors: u8,
    used: u64,
}
impl Cache {
    fn new(bytes: u64, ways: usize) -> Self {
        let n = (bytes / 128 / ways as u64).max(1) as usize;
        Cache { sets: (0..n).map(|_| Vec::new()).collect(), ways, tick: 0 }
    }
    /// Look up a 32-byte sector; `fill` inserts it on a miss. True on a hit.
    fn access(&mut self, addr: u64, fill: bool) -> bool {
        self.tick += 1;
        let (tag, sector) = (addr / 128, 1u8 << (addr / 32 % 4));
        let n = self.sets.len() as u64;
        let set = &mut self.sets[((tag ^ (tag >> 7)) % n) as usize];
        if let Some(l) = set.iter_mut().find(|l| l.tag == tag) {
            l.used = self.tick;
            let hit = l.sectors & sector != 0;
            if fill {
                l.sectors |= sector;
            }
            return hit;
        }
        if fill {
            let line = Line { tag, sectors: sector, used: self.tick };
            if set.len() < self.ways {
                set.push(line);
            } else {
                *set.iter_mut().min_by_key(|l| l.used).unwrap() = line;
            }
        }
        false
    }
}

/// An instruction cache, the L0 of one sub-partition or the L1.5 they share: ready time per code line, LRU over a fixed capacity.
#[derive(Default)]
struct ICache {
    ready: Vec<u64>,
    used: Vec<u64>,
    held: Vec<u32>,
    /// of the pseudo-random choice of a victim, not 0
    seed: u64,
}
const ABSENT: u64 = u64::MAX;

impl ICache {
    fn new(lines: usize, seed: u64) -> Self {
        ICache { ready: vec![ABSENT; lines], used: vec![0; lines], held: vec![], seed }
    }

    /// A line that is absent will be here at `ready`, in place of another where there is no room for more than `capacity`: of the one
    /// unused for longest, or with `random` of any but `keep`, which a warp waits for.
    fn fill(&mut self, line: u32, keep: u32, capacity: usize, random: bool, now: u64, ready: u64) {
        if self.held.len() >= capacity {
            let i = if random {
                // xorshift64*: the same victims in each run
                self.seed ^= self.seed >> 12;
                self.seed ^= self.seed << 25;
                self.seed ^= self.seed >> 27;
                let i = (self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as usize % self.held.len();
                (i + usize::from(self.held[i] == keep)) % self.held.len()
            } else {
                self.held.iter().enumerate().min_by_key(|(_, &h)| self.used[h as usize]).unwrap().0
            };
            let old = self.held.swap_remove(i);
            self.ready[old as usize] = ABSENT;
        }
        self.ready[line as usize] = ready;
        self.used[line as usize] = now;
        self.held.push(line);
    }
}

/// What a warp waits for: [`Stalls`] has the reasons. Sb: a scoreboard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    StallCount,
    ShortSb,
    LongSb,
    XuSb,
    TensorSb,
    Barrier,
}

/// When an outstanding user of a scoreboard releases it.
#[derive(Clone, Copy)]
struct Release {
    at: u64,
    /// for an HMMA that waits: earlier after an HMMA, whose accumulators are forwarded
    for_hmma: u64,
}

/// The outstanding users of one scoreboard.
#[derive(Default, Clone)]
struct Scoreboard {
    users: Vec<Release>,
    why: Option<Why>,
}

/// A resident warp as the scheduler sees it.
struct WarpT {
    /// its CTA in `SmSim::ctas`, and its number there
    cta: usize,
    wi: usize,
    /// number in the order of launches: the lower, the older
    age: u64,
    /// earliest issue by stall count / barrier / branch
    next: u64,
    /// earliest issue including scoreboards
    ready: u64,
    /// what it waits for until `ready`
    ready_why: Why,
    sb: [Scoreboard; 6],
    last_issue: u64,
    /// whether it waits at a barrier of its CTA
    blocked: bool,
    /// since its last issue: how often the scheduler looked at it, and found its pipe busy or its instruction absent
    pipe_wait: u64,
    fetch_wait: u64,
    scans: u64,
}

/// A sub-partition of the SM: a scheduler with its pipes.
#[derive(Default)]
struct Sub {
    warps: Vec<usize>,
    /// the warp that issued last, and whether its instruction asked to prefer another
    last: Option<usize>,
    last_yield: bool,
    /// by `Unit`: when the pipe can take another instruction
    free: [u64; 8],
    /// when the queued memory instructions leave the queue
    mio: VecDeque<u64>,
    /// when its address unit can take another instruction
    agu_free: u64,
    l0: ICache,
}

/// Warp cycles spent waiting, summed over all resident warps, by reason.
#[derive(Default, Serialize, Clone, Debug)]
pub struct Stalls {
    /// stall count of the previous instruction (fixed latencies)
    pub fixed_latency: u64,
    /// shared memory, shuffle and other short scoreboards
    pub short_scoreboard: u64,
    /// global or local memory
    pub long_scoreboard: u64,
    /// special functions and conversions
    pub xu_scoreboard: u64,
    /// results of HMMA
    pub tensor_scoreboard: u64,
    /// CTA barrier
    pub barrier: u64,
    /// instruction not yet in the L0 cache
    pub no_instruction: u64,
    /// execution pipe or MIO queue busy
    pub pipe_busy: u64,
    /// another warp was chosen
    pub not_selected: u64,
}

/// Event counts of the simulated SM. "Busy" counts are cycles, summed over the four sub-partitions.
#[derive(Default, Clone, Debug, Serialize)]
pub struct Counters {
    /// clock cycles from the first launch to the last exit
    pub cycles: u64,
    /// warp instructions
    pub insts: u64,
    /// CTAs that ran
    pub ctas: u64,
    /// issue slots used
    pub issue_slots: u64,
    /// FP32 and IMAD pipe busy
    pub fma_busy: u64,
    /// integer and logic pipe busy
    pub alu_busy: u64,
    /// packed-half pipe busy
    pub fp16_busy: u64,
    /// double-precision pipe busy
    pub fp64_busy: u64,
    /// special-function and conversion pipe busy
    pub xu_busy: u64,
    /// tensor cores busy
    pub tensor_busy: u64,
    /// uniform datapath busy
    pub uniform_busy: u64,
    /// cycles of the SM's one LSU data stage
    pub mio_busy: u64,
    /// shared-memory wavefronts (one per clock)
    pub smem_wavefronts: u64,
    /// wavefronts that the same bytes need without bank conflicts
    pub smem_ideal: u64,
    /// warp shuffles (and MATCH)
    pub shfl: u64,
    /// wavefronts of global and local accesses
    pub global_wavefronts: u64,
    /// 32-byte sectors looked up in L1
    pub l1_sectors: u64,
    /// of these, hits
    pub l1_hits: u64,
    /// sectors read from L2
    pub l2_sectors: u64,
    /// sectors read from DRAM
    pub dram_sectors: u64,
    /// sectors stored
    pub store_sectors: u64,
    /// cycles of this SM's share of the L2 bandwidth
    pub l2_busy: f64,
    /// cycles of this SM's share of the DRAM bandwidth
    pub dram_busy: f64,
    /// local-memory warp instructions (spills, stack)
    pub local_insts: u64,
    /// CTA barriers completed
    pub barriers: u64,
    /// instructions that lost a cycle to a register-bank conflict
    pub reg_conflicts: u64,
    /// 128-byte instruction lines fetched into the L0 caches
    pub l0_fills: u64,
    /// of these, into the L1.5 cache from L2, where it is modelled
    pub l15_fills: u64,
    /// resident warps, summed over all cycles
    pub resident_warp_cycles: u64,
    /// where the warps waited
    pub stalls: Stalls,
}

pub struct SmSim<'a, 'e> {
    env: &'a Env<'e>,
    m: &'a Machine,
    pub c: Counters,
    /// executions of each instruction
    pub hist: Vec<u64>,
    /// issue-to-issue cycles attributed to waiting before each instruction
    pub wait_hist: Vec<u64>,
    /// shared-memory wavefronts, and those beyond the ideal, per instruction
    pub smem_hist: Vec<u64>,
    pub conflict_hist: Vec<u64>,
    warps: Vec<Option<WarpT>>,
    ctas: Vec<Option<Cta>>,
    subs: Vec<Sub>,
    lsu_free: u64,
    l15: ICache,
    l15_free: u64,
    l15_fill_free: u64,
    l2_free: f64,
    dram_free: f64,
    l1: Cache,
    l2: Cache,
    /// sectors that were prefetched and not loaded yet, and when they are there
    on_its_way: HashMap<u64, u64>,
    /// first touches left that this SM pays from DRAM, per buffer (others are fetched by other SMs)
    dram_budget: Vec<u64>,
    /// cycles of the first and the last read of the clock by the first warp that reads it
    pub clock_reads: Option<(u64, u64)>,
    clock_reader: Option<usize>,
    age: u64,
    sub_cursor: u32,
}

impl<'a, 'e> SmSim<'a, 'e> {
    pub fn new(env: &'a Env<'e>, m: &'a Machine, slots: u32, smem_per_cta: u32) -> Self {
        let used = slots * smem_per_cta.div_ceil(m.smem_gran) * m.smem_gran;
        let carve = m.smem_carve_kib.iter().map(|k| k * 1024).find(|&k| k >= used).unwrap_or(m.smem_per_sm);
        let wpc = env.block.iter().product::<u32>().div_ceil(32);
        let n = env.prog.code.len();
        let lines = n.div_ceil(8);
        let sharers = m.sms.min(env.grid.iter().product()) as u64;
        SmSim {
            env,
            m,
            c: Counters::default(),
            hist: vec![0; n],
            wait_hist: vec![0; n],
            smem_hist: vec![0; n],
            conflict_hist: vec![0; n],
            warps: (0..slots * wpc).map(|_| None).collect(),
            ctas: (0..slots).map(|_| None).collect(),
            subs: (0..m.subs).map(|i| Sub { l0: ICache::new(lines, i as u64 + 1), ..Sub::default() }).collect(),
            lsu_free: 0,
            l15: ICache::new(lines, 1),
            l15_free: 0,
            l15_fill_free: 0,
            l2_free: 0.0,
            dram_free: 0.0,
            l1: Cache::new((m.l1_smem_total - carve) as u64, 64),
            l2: Cache::new(m.l2_bytes, 16),
            on_its_way: HashMap::new(),
            dram_budget: env.mem.bufs.iter().map(|b| b.len.div_ceil(32).div_ceil(sharers)).collect(),
            clock_reads: None,
            clock_reader: None,
            age: 0,
            sub_cursor: 0,
        }
    }

    /// Run the given CTAs (in dispatch order) to completion.
    pub fn run(&mut self, list: &[[u32; 3]]) -> SimResult<()> {
        let mut pending = list.iter();
        let mut now = 0u64;
        let mut acc = Access::default();
        for s in 0..self.ctas.len() {
            if let Some(&id) = pending.next() {
                self.launch(s, id, self.m.cta_launch);
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
                            self.c.ctas += 1;
                            self.ctas[slot] = None;
                            if let Some(&id) = pending.next() {
                                self.launch(slot, id, now + self.m.cta_launch);
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
                let mut s = String::new();
                for c in self.ctas.iter().flatten() {
                    s += &format!("\n  CTA {:?}:{}", c.id, c.stuck());
                }
                return Err(format!("deadlock at cycle {now}:{s}"));
            } else {
                next_event.max(now + 1) - now
            };
            self.c.resident_warp_cycles += resident * step;
            now += step;
        }
        self.c.cycles = now;
        Ok(())
    }

    fn launch(&mut self, slot: usize, id: [u32; 3], at: u64) {
        let cta = Cta::new(self.env, id);
        let n = cta.warps.len();
        for wi in 0..n {
            let k = slot * n + wi;
            self.warps[k] = Some(WarpT {
                cta: slot,
                wi,
                age: self.age,
                next: at,
                ready: at,
                ready_why: Why::StallCount,
                sb: Default::default(),
                last_issue: at,
                blocked: false,
                pipe_wait: 0,
                fetch_wait: 0,
                scans: 0,
            });
            self.age += 1;
            // warp w -> sub-partition (w % 4), continuing across CTAs for odd warp counts
            let sub = (self.sub_cursor % self.m.subs) as usize;
            self.sub_cursor += 1;
            self.subs[sub].warps.push(k);
        }
        self.ctas[slot] = Some(cta);
    }

    /// Choose a warp for scheduler `s`, or the next cycle at which it might have one.
    fn pick(&mut self, s: usize, now: u64) -> Result<usize, u64> {
        let mut best: Option<usize> = None;
        let mut best_age = u64::MAX;
        let mut next = u64::MAX;
        let (greedy, avoid) = (self.subs[s].last, self.subs[s].last_yield);
        for i in 0..self.subs[s].warps.len() {
            let k = self.subs[s].warps[i];
            let Some(w) = self.warps[k].as_ref() else { continue };
            if w.blocked {
                continue;
            }
            if w.ready > now {
                next = next.min(w.ready);
                continue;
            }
            let age = w.age;
            let cta = self.ctas[w.cta].as_mut().unwrap();
            let ww = &mut cta.warps[w.wi];
            self.warps[k].as_mut().unwrap().scans += 1;
            let g = ww.select().expect("unblocked warp has a runnable group");
            let pc = ww.groups[g].pc;
            // a pc outside the code is reported by the step
            let Some(inst) = self.env.prog.code.get((pc / 16) as usize) else { return Ok(k) };
            if self.m.icache {
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
            // greedy, then oldest; a yield hint pushes the last warp to the back
            let age = if greedy == Some(k) {
                if avoid {
                    u64::MAX - 1
                } else {
                    0
                }
            } else {
                age + 1
            };
            if age < best_age {
                best_age = age;
                best = Some(k);
            }
        }
        best.ok_or(next)
    }

    /// When the code line can be issued from by sub-partition `s`; starts fetches as needed.
    fn fetch(&mut self, s: usize, line: u32, now: u64) -> u64 {
        let cap = (self.m.l0_bytes / 128) as usize;
        self.subs[s].l0.used[line as usize] = now;
        for l in line..=(line + self.m.l0_prefetch).min(self.subs[s].l0.ready.len() as u32 - 1) {
            if self.subs[s].l0.ready[l as usize] != ABSENT {
                continue;
            }
            let start = self.in_l15(l, now).max(self.l15_free);
            self.l15_free = start + self.m.l0_line_cycles;
            self.c.l0_fills += 1;
            self.subs[s].l0.fill(l, line, cap, self.m.l0_random, now, start + self.m.l0_miss_latency);
        }
        self.subs[s].l0.ready[line as usize]
    }

    /// When the code line can leave the L1.5, which may have to fetch it from L2.
    fn in_l15(&mut self, line: u32, now: u64) -> u64 {
        if self.m.l15_bytes == 0 {
            return now;
        }
        if self.l15.ready[line as usize] == ABSENT {
            // the first time, an earlier launch has left it there
            let ready = if self.l15.used[line as usize] == 0 {
                now
            } else {
                let start = now.max(self.l15_fill_free);
                self.l15_fill_free = start + self.m.l15_line_cycles;
                self.c.l15_fills += 1;
                start + self.m.l2_latency
            };
            self.l15.fill(line, line, (self.m.l15_bytes / 128) as usize, false, now, ready);
        }
        self.l15.used[line as usize] = now;
        self.l15.ready[line as usize].max(now)
    }

    fn unit_free(&self, s: usize, inst: &Inst) -> u64 {
        let sub = &self.subs[s];
        match inst.unit {
            Unit::Lsu => {
                if sub.mio.len() >= self.m.mio_queue {
                    sub.mio[sub.mio.len() - self.m.mio_queue]
                } else {
                    0
                }
            }
            Unit::Ctl => 0,
            u => sub.free[u as usize],
        }
    }

    /// Issue one instruction; returns the CTA slot if this finished the CTA.
    fn issue(&mut self, s: usize, k: usize, now: u64, acc: &mut Access) -> SimResult<Option<usize>> {
        let (slot, wi) = {
            let w = self.warps[k].as_ref().unwrap();
            (w.cta, w.wi)
        };
        let env = self.env;
        let cta = self.ctas[slot].as_mut().unwrap();
        let idx = cta.step(wi, env, now, acc)?;
        let inst = &env.prog.code[idx];
        self.c.insts += 1;
        self.c.issue_slots += 1;
        self.hist[idx] += 1;
        if matches!(inst.op, Op::SpecialRegister(SpecialRegister::S2r(SReg::Clock) | SpecialRegister::Cs2r { sreg: SReg::Clock, .. }))
            && *self.clock_reader.get_or_insert(k) == k
        {
            self.clock_reads = Some((self.clock_reads.map_or(now, |(first, _)| first), now));
        }

        // --- stall attribution
        {
            let w = self.warps[k].as_mut().unwrap();
            let st = &mut self.c.stalls;
            let gap = now - w.last_issue;
            self.wait_hist[idx] += gap.saturating_sub(1);
            let fixed = w.next.min(now).saturating_sub(w.last_issue + 1);
            match w.ready_why {
                Why::Barrier => st.barrier += fixed,
                _ => st.fixed_latency += fixed,
            }
            let sbw = w.ready.min(now).saturating_sub(w.next.max(w.last_issue + 1));
            match w.ready_why {
                Why::ShortSb => st.short_scoreboard += sbw,
                Why::LongSb => st.long_scoreboard += sbw,
                Why::XuSb => st.xu_scoreboard += sbw,
                Why::TensorSb => st.tensor_scoreboard += sbw,
                Why::Barrier => st.barrier += sbw,
                Why::StallCount => st.fixed_latency += sbw,
            }
            let rest = now.saturating_sub(w.ready.max(w.last_issue + 1));
            // idle cycles are skipped, so the scan counters only give proportions
            let n = (w.scans - 1).max(1);
            let nofetch = (rest * w.fetch_wait / n).min(rest);
            let busy = (rest * w.pipe_wait / n).min(rest - nofetch);
            st.no_instruction += nofetch;
            st.pipe_busy += busy;
            st.not_selected += rest - nofetch - busy;
            (w.pipe_wait, w.fetch_wait, w.scans) = (0, 0, 0);
            w.last_issue = now;
        }

        // --- resources: (write release, read release, reason)
        let (wr, rd, why) = if acc.mask == 0 && !matches!(inst.unit, Unit::Ctl) {
            (now + 1, now + 1, Why::ShortSb)
        } else {
            self.occupy(s, k, idx, now, acc)
        };

        let w = self.warps[k].as_mut().unwrap();
        let forwarded = if is_hmma884(inst) { now + self.m.hmma_forward } else { wr };
        for (sb, at, for_hmma) in [(inst.ctrl.wr_sb, wr, forwarded), (inst.ctrl.rd_sb, rd, rd)] {
            if sb < 6 {
                let b = &mut w.sb[sb as usize];
                b.users.retain(|x| x.at > now);
                b.users.push(Release { at, for_hmma });
                b.why = Some(why);
            }
        }
        let mut next = now + (inst.ctrl.stall as u64).max(1);
        if acc.taken {
            next = next.max(now + self.m.branch_cycles);
        }
        if let Op::Barrier(Barrier::Depbar { sb, n }) = inst.op {
            let mut t: Vec<u64> = w.sb[sb as usize % 6].users.iter().map(|x| x.at).collect();
            t.sort_unstable();
            if t.len() > n as usize {
                next = next.max(t[t.len() - 1 - n as usize]);
            }
        }
        w.next = next;
        self.subs[s].last = Some(k);
        self.subs[s].last_yield = inst.ctrl.yield_;

        // --- barrier releases and exits
        let cta = self.ctas[slot].as_mut().unwrap();
        let released = std::mem::take(&mut cta.released);
        let base = slot * cta.warps.len();
        let ended = cta.warps[wi].done();
        let all_done = cta.done();
        if ended {
            self.warps[k] = None;
            for sub in self.subs.iter_mut() {
                sub.warps.retain(|&x| x != k);
                if sub.last == Some(k) {
                    sub.last = None;
                }
            }
        } else {
            self.refresh(k, Why::StallCount);
        }
        if !released.is_empty() {
            self.c.barriers += 1;
        }
        for r in released {
            let t = now + self.m.bar_latency;
            if let Some(w) = self.warps[base + r].as_mut() {
                w.next = w.next.max(t);
                self.refresh(base + r, Why::Barrier);
            }
        }
        Ok(all_done.then_some(slot))
    }

    /// Recompute when warp `k` may issue its next instruction.
    fn refresh(&mut self, k: usize, base_why: Why) {
        let w = self.warps[k].as_mut().unwrap();
        let ww = &mut self.ctas[w.cta].as_mut().unwrap().warps[w.wi];
        let Some(g) = ww.select() else {
            w.blocked = true;
            return;
        };
        w.blocked = false;
        let Some(inst) = self.env.prog.code.get((ww.groups[g].pc / 16) as usize) else { return };
        w.ready = w.next;
        w.ready_why = base_why;
        let is_hmma = is_hmma884(inst);
        for i in 0..6 {
            if inst.ctrl.wait >> i & 1 != 0 {
                let sb = &w.sb[i];
                if let Some(t) = sb.users.iter().map(|x| if is_hmma { x.for_hmma } else { x.at }).max() {
                    if t > w.ready {
                        w.ready = t;
                        w.ready_why = sb.why.unwrap_or(Why::ShortSb);
                    }
                }
            }
        }
    }

    fn occupy(&mut self, s: usize, k: usize, idx: usize, now: u64, acc: &Access) -> (u64, u64, Why) {
        let m = self.m;
        let inst = &self.env.prog.code[idx];
        let mut cost = match inst.unit {
            Unit::Fma => match inst.op {
                Op::Integer(Integer::ImadWide { .. } | Integer::ImadHi { .. }) => m.imad_wide_cycles,
                _ => m.fma_cycles,
            },
            Unit::Alu => m.alu_cycles,
            Unit::Fp16 => m.fp16_cycles,
            Unit::Fp64 => m.fp64_cycles,
            Unit::Xu => m.xu_cycles,
            Unit::Tensor => match inst.op {
                Op::Tensor(Tensor::Hmma884 { f32: true, .. }) => m.hmma_f32_cycles,
                Op::Tensor(Tensor::Hmma1688 { f32: true }) => m.hmma_1688_f32_cycles,
                Op::Tensor(Tensor::Hmma1688 { f32: false }) => m.hmma_1688_f16_cycles,
                Op::Tensor(Tensor::Imma8816 { .. }) => m.imma_8816_cycles,
                _ => m.hmma_f16_cycles,
            },
            Unit::Uniform => m.uniform_cycles,
            Unit::Lsu => return self.memory(s, k, idx, now, acc),
            Unit::Ctl => return (now + 2, now + 2, Why::ShortSb),
        };
        if m.reg_banks && !matches!(inst.unit, Unit::Tensor | Unit::Xu | Unit::Uniform) && bank_conflict(inst) {
            cost += 1;
            self.c.reg_conflicts += 1;
        }
        self.subs[s].free[inst.unit as usize] = now + cost;
        let c = &mut self.c;
        match inst.unit {
            Unit::Fma => c.fma_busy += cost,
            Unit::Alu => c.alu_busy += cost,
            Unit::Fp16 => c.fp16_busy += cost,
            Unit::Fp64 => c.fp64_busy += cost,
            Unit::Xu => c.xu_busy += cost,
            Unit::Tensor => c.tensor_busy += cost,
            Unit::Uniform => c.uniform_busy += cost,
            _ => {}
        }
        match inst.unit {
            Unit::Xu => (now + m.xu_latency, now + cost, Why::XuSb),
            Unit::Tensor => {
                let latency = match inst.op {
                    Op::Tensor(Tensor::Hmma1688 { f32: true }) => m.hmma_1688_f32_latency,
                    Op::Tensor(Tensor::Hmma1688 { f32: false }) => m.hmma_1688_f16_latency,
                    Op::Tensor(Tensor::Imma8816 { .. }) => m.imma_8816_latency,
                    _ => m.hmma_latency,
                };
                (now + latency, now + cost + 2, Why::TensorSb)
            }
            Unit::Uniform if matches!(inst.op, Op::Uniform(Uniform::R2ur)) => (now + m.r2ur_latency, now + 2, Why::ShortSb),
            Unit::Fp64 => (now + m.fp64_latency, now + cost, Why::ShortSb),
            _ => (now + 4, now + 2, Why::ShortSb),
        }
    }

    /// Memory-side instructions: enter the sub-partition's MIO queue, then the shared LSU stage.
    fn memory(&mut self, s: usize, k: usize, idx: usize, now: u64, acc: &Access) -> (u64, u64, Why) {
        let m = self.m;
        let inst = &self.env.prog.code[idx];
        match inst.op {
            Op::SpecialRegister(SpecialRegister::S2r(_)) | Op::Barrier(Barrier::B2r) => {
                return (now + m.s2r_latency, now + 2, Why::ShortSb)
            }
            Op::Barrier(Barrier::Membar) => return (now + m.l2_latency, now + 2, Why::LongSb),
            Op::Memory(Memory::Qspc { .. }) => return (now + m.lds_latency, now + 2, Why::ShortSb),
            _ => {}
        }
        let prefetch = matches!(inst.op, Op::Memory(Memory::Prefetch));
        let strong = matches!(inst.op, Op::Memory(Memory::Ld { strong: true, .. }));
        let (space, bytes, write, atomic) = match inst.op {
            Op::Memory(Memory::Ld { space, bytes, .. }) => (Some(space), bytes as u32, false, false),
            Op::Memory(Memory::St { space, bytes }) => (Some(space), bytes as u32, true, false),
            Op::Memory(Memory::Prefetch) => (Some(Space::Global), 4, false, false),
            Op::Memory(Memory::Ldsm { .. }) => (Some(Space::Shared), 16, false, false),
            Op::Atomic(a) => (Some(a.space), if a.wide() { 8 } else { 4 }, true, true),
            _ => (None, 4, false, false),
        };
        // the lanes of a generic access are taken to be in one space; its offset from the window's base has the same banks
        let first = acc.addr[acc.mask.trailing_zeros() as usize % 32];
        let space = match space {
            Some(Space::Generic) if shared_offset(first).is_some() => Some(Space::Shared),
            Some(Space::Generic) => Some(Space::Global),
            known => known,
        };
        // wavefronts in the data stage
        let mut sectors: Vec<u64> = vec![];
        let waves = match space {
            None => {
                self.c.shfl += 1;
                1
            }
            Some(Space::Shared) => {
                // LDSM: a row of 16 bytes from each lane whose address counts
                let lanes = match inst.op {
                    Op::Memory(Memory::Ldsm { matrices, .. }) => !0 >> (32 - 8 * matrices as u32),
                    _ => acc.mask,
                };
                let mut w = m.smem_wavefronts(&acc.addr, lanes, bytes);
                let ideal = (lanes.count_ones() * bytes).div_ceil(128).max(1);
                if atomic {
                    w = w.max(2);
                }
                self.c.smem_wavefronts += w as u64;
                self.c.smem_ideal += ideal as u64;
                self.smem_hist[idx] += w as u64;
                self.conflict_hist[idx] += (w - ideal.min(w)) as u64;
                w
            }
            Some(Space::Const) => 1,
            Some(Space::Local) => {
                // local memory interleaves lanes word by word
                self.c.local_insts += 1;
                let lb = self.env.local_bytes as u64;
                for l in 0..32u64 {
                    if acc.mask >> l & 1 != 0 {
                        for j in 0..(bytes / 4).max(1) as u64 {
                            let a = (1u64 << 60) + k as u64 * lb * 32 + ((acc.addr[l as usize] / 4 + j) * 32 + l) * 4;
                            sectors.push(a / 32);
                        }
                    }
                }
                sectors.sort_unstable();
                sectors.dedup();
                sectors.len().div_ceil(4) as u32
            }
            Some(Space::Global | Space::Generic) => {
                let per = match bytes {
                    16 => 8,
                    8 => 16,
                    _ => 32,
                };
                let mut waves = 0;
                for g in 0..32 / per {
                    let mut lines: Vec<u64> = vec![];
                    for l in g * per..(g + 1) * per {
                        if acc.mask >> l & 1 != 0 {
                            lines.push(acc.addr[l] / 128);
                            for b in (0..bytes as u64).step_by(32).chain([bytes as u64 - 1]) {
                                sectors.push((acc.addr[l] + b) / 32);
                            }
                        }
                    }
                    lines.sort_unstable();
                    lines.dedup();
                    waves += lines.len() as u32;
                }
                sectors.sort_unstable();
                sectors.dedup();
                waves.max(1)
            }
        };
        // address generation in the sub-partition, then the data stage shared by all four
        let agu = now.max(self.subs[s].agu_free);
        self.subs[s].agu_free = agu + m.agu_cycles;
        let start = (agu + m.mio_delay).max(self.lsu_free);
        // shuffles and constants do not pass through the banks
        let each = if matches!(space, None | Some(Space::Const)) { 1 } else { m.wavefront_cycles };
        let store = if write && space == Some(Space::Shared) { m.sts_extra_cycles } else { 0 };
        let busy = waves as u64 * each + store;
        self.lsu_free = start + busy;
        self.c.mio_busy += busy;
        let q = &mut self.subs[s].mio;
        while q.front().is_some_and(|&t| t <= now) {
            q.pop_front();
        }
        q.push_back(start);
        let done = start + busy - each; // last wavefront enters
        let rd = done + m.rd_release;
        let tail = |lat: u64| lat - m.mio_delay;
        match space {
            None if matches!(inst.op, Op::WarpWide(WarpWide::Movm)) => (done + tail(m.movm_latency), rd, Why::ShortSb),
            None => (done + tail(m.shfl_latency), rd, Why::ShortSb),
            Some(Space::Shared) => (done + tail(m.lds_latency), rd, Why::ShortSb),
            Some(Space::Const) => (done + tail(m.ldc_latency), rd, Why::ShortSb),
            Some(sp) => {
                self.c.global_wavefronts += waves as u64;
                let mut ready = done + tail(m.l1_latency);
                for sct in sectors {
                    let a = sct * 32;
                    if write && sp == Space::Global {
                        // write-through; atomics are performed in L2
                        let t = self.l2_xfer(done, false);
                        self.c.store_sectors += 1;
                        if !self.l2.access(a, true) && self.is_written_back(a) {
                            self.dram_xfer(t as f64);
                        }
                        if atomic {
                            ready = ready.max(t + tail(m.l2_latency) + m.atom_extra);
                        }
                        continue;
                    }
                    if prefetch {
                        if !self.l2.access(a, true) && self.first_touch(a) {
                            let arrives = self.dram_xfer(done as f64) as u64 + tail(m.dram_latency);
                            self.on_its_way.insert(sct, arrives);
                        }
                        continue;
                    }
                    if !strong {
                        self.c.l1_sectors += 1;
                        if self.l1.access(a, true) || write {
                            self.c.l1_hits += 1;
                            continue;
                        }
                    }
                    self.c.l2_sectors += 1;
                    let hit = self.l2.access(a, true) || sp == Space::Local || !self.first_touch(a);
                    let t = self.l2_xfer(done, !hit);
                    ready = ready.max(t + tail(if hit { m.l2_latency } else { m.dram_latency }));
                    if let Some(arrives) = self.on_its_way.remove(&sct) {
                        ready = ready.max(arrives);
                    }
                }
                (ready, rd, Why::LongSb)
            }
        }
    }

    /// Move one sector over this SM's share of the L2 (and DRAM) bandwidth.
    fn l2_xfer(&mut self, at: u64, dram: bool) -> u64 {
        let c = 32.0 / self.m.l2_bytes_per_clk;
        let mut t = (at as f64).max(self.l2_free);
        self.l2_free = t + c;
        self.c.l2_busy += c;
        if dram {
            t = self.dram_xfer(t);
        }
        t as u64
    }

    /// Move one sector over this SM's share of the DRAM bandwidth.
    fn dram_xfer(&mut self, at: f64) -> f64 {
        let c = 32.0 / self.m.dram_bytes_per_clk();
        let t = at.max(self.dram_free);
        self.dram_free = t + c;
        self.c.dram_busy += c;
        self.c.dram_sectors += 1;
        t
    }

    /// Does this SM pay for the way of a stored sector to DRAM? Its fair share of each buffer that is larger than L2; what smaller ones
    /// get stays there.
    fn is_written_back(&mut self, addr: u64) -> bool {
        let is_large = |b: &&Buffer| b.len > self.m.l2_bytes;
        let holds = |b: &&Buffer| addr + 32 > b.base && addr < b.base + b.len;
        self.env.mem.bufs.iter().find(holds).filter(is_large).is_some() && self.first_touch(addr)
    }

    /// Does this SM pay the DRAM fetch of a sector nobody on this SM touched before? Its fair share
    /// of each buffer (one SM's on a full GPU) is; the rest was brought into L2 by the other SMs.
    fn first_touch(&mut self, addr: u64) -> bool {
        for (i, b) in self.env.mem.bufs.iter().enumerate() {
            if addr + 32 > b.base && addr < b.base + b.len {
                if self.dram_budget[i] > 0 {
                    self.dram_budget[i] -= 1;
                    return true;
                }
                return false;
            }
        }
        false
    }
}

fn is_hmma884(inst: &Inst) -> bool {
    matches!(inst.op, Op::Tensor(Tensor::Hmma884 { .. }))
}

/// Three distinct source registers in the same bank (even / odd), none served by the reuse cache.
fn bank_conflict(inst: &Inst) -> bool {
    let mut r = [0; 3];
    for i in 0..3 {
        match inst.src[i].reg() {
            Some(x) if !inst.src[i].reuse => r[i] = x,
            _ => return false,
        }
    }
    r[0] != r[1] && r[1] != r[2] && r[0] != r[2] && r[0] & 1 == r[1] & 1 && r[1] & 1 == r[2] & 1
}
