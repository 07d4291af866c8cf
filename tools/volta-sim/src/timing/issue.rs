//! Issue of an instruction: units, scoreboards and stall counts. A scoreboard is one of six counters of a warp: an instruction of variable
//! latency holds one, and later instructions wait for it. `s` is a sub-partition (scheduler), `k` an index of `SmSim::warps`, `idx` the
//! number of an instruction in the code. `w` is a warp's `WarpTiming`, what the scheduler knows of it. A slot is room for a resident CTA.
//! Times are cycles. Tests: tests/real_cards.rs.

use super::counters::{Release, WaitReason};
use super::SmSim;
use crate::isa::*;
use crate::step::{Access, SimResult};

/// Cycles from the issue of an FMA, ALU, FP16 or uniform instruction to its result, as published. The code's stall counts contain them.
const FIXED_LATENCY: u64 = 4;
/// Cycles until an instruction has read its sources, assumed.
pub(super) const SOURCES_READ: u64 = 2;

impl SmSim<'_, '_> {
    /// Returns when the instruction's unit can take it. A memory instruction needs a place in the MIO (memory input/output) queue.
    pub(super) fn unit_free(&self, s: usize, inst: &Inst) -> u64 {
        let sub = &self.subs[s];
        match inst.unit {
            Unit::Lsu => {
                // sub.mio: when each queued instruction leaves. None: a place is free
                let first = sub.mio.len().checked_sub(self.machine.mio_queue);
                first.map_or(0, |i| sub.mio[i])
            }
            Unit::Ctl => 0,
            u => sub.free[u as usize],
        }
    }

    /// Executes the next instruction of warp `k`, and records when it releases its scoreboards and when the warp may go on. `acc` gets the
    /// lanes' addresses. Returns the CTA's slot if the CTA has finished.
    pub(super) fn issue(&mut self, s: usize, k: usize, now: u64, acc: &mut Access) -> SimResult<Option<usize>> {
        let (slot, warp_index) = {
            let w = self.warps[k].as_ref().unwrap();
            (w.cta, w.warp_index)
        };
        let env = self.env;
        let cta = self.ctas[slot].as_mut().unwrap();
        let idx = cta.step(warp_index, env, now, acc)?;
        let inst = &env.prog.code[idx];
        self.counters.insts += 1;
        self.executions[idx] += 1;
        if matches!(inst.op, Op::SpecialRegister(SpecialRegister::S2r(SReg::Clock) | SpecialRegister::Cs2r { sreg: SReg::Clock, .. }))
            && *self.clock_reader.get_or_insert(k) == k
        {
            self.clock_reads = Some((self.clock_reads.map_or(now, |(first, _)| first), now));
        }

        // --- what the warp waited for since its last issue: until `next` the stall count or a barrier, until `ready` a scoreboard, until
        // `now` fetches, pipes and other warps
        {
            let w = self.warps[k].as_mut().unwrap();
            let stalls = &mut self.counters.stalls;
            self.wait_cycles[idx] += (now - w.last_issue).saturating_sub(1);
            let first = w.last_issue + 1; // the first cycle in which it could have issued
            let is_barrier = w.ready_reason == WaitReason::Barrier;
            *stalls.of(if is_barrier { WaitReason::Barrier } else { WaitReason::StallCount }) += w.next.min(now).saturating_sub(first);
            *stalls.of(w.ready_reason) += w.ready.min(now).saturating_sub(w.next.max(first));
            let rest = now.saturating_sub(w.ready.max(first));
            // scans: the scheduler's looks at the warp since its last issue, the last of them for this issue; fetch_wait, pipe_wait: looks
            // that found its instruction absent, its unit busy. Cycles are skipped, so counts only give shares of `rest`
            let scans = (w.scans - 1).max(1);
            let no_instruction = (rest * w.fetch_wait / scans).min(rest);
            let pipe_busy = (rest * w.pipe_wait / scans).min(rest - no_instruction);
            stalls.no_instruction += no_instruction;
            stalls.pipe_busy += pipe_busy;
            stalls.not_selected += rest - no_instruction - pipe_busy;
            (w.pipe_wait, w.fetch_wait, w.scans) = (0, 0, 0);
            w.last_issue = now;
        }

        // --- resources, and when results are written (wr) and sources read (rd), which release scoreboards. An instruction whose guard
        // holds in no lane takes no unit
        let (wr, rd, why) = if acc.mask == 0 && !matches!(inst.unit, Unit::Ctl) {
            (now + 1, now + 1, WaitReason::ShortScoreboard)
        } else {
            self.occupy(s, k, idx, now, acc)
        };

        let w = self.warps[k].as_mut().unwrap();
        // at `forwarded` a later HMMA.884 can take this HMMA.884's result, before the registers have it (wr)
        let forwarded = if is_hmma884(inst) { now + self.machine.hmma_forward } else { wr };
        for (sb, at, for_hmma) in [(inst.ctrl.wr_sb, wr, forwarded), (inst.ctrl.rd_sb, rd, rd)] {
            // 7 is no scoreboard
            if sb < 6 {
                let b = &mut w.sb[sb as usize];
                b.users.retain(|x| x.at > now);
                b.users.push(Release { at, for_hmma });
                b.why = why;
            }
        }
        let mut next = now + (inst.ctrl.stall as u64).max(1);
        if acc.taken {
            next = next.max(now + self.machine.branch_cycles);
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

        // --- barrier releases and exits; the warps of a CTA are next to each other in `warps`, from `base` on
        let cta = self.ctas[slot].as_mut().unwrap();
        let released = std::mem::take(&mut cta.released);
        let base = slot * cta.warps.len();
        let ended = cta.warps[warp_index].done();
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
            self.refresh(k, WaitReason::StallCount);
        }
        if !released.is_empty() {
            self.counters.barriers += 1;
        }
        for r in released {
            let t = now + self.machine.bar_latency;
            if let Some(w) = self.warps[base + r].as_mut() {
                w.next = w.next.max(t);
                self.refresh(base + r, WaitReason::Barrier);
            }
        }
        Ok(all_done.then_some(slot))
    }

    /// Computes when warp `k` may issue its next instruction: not before `w.next`, for which it waits because of `reason` (the stall count
    /// or a barrier), and not before the scoreboards that the instruction needs.
    pub(super) fn refresh(&mut self, k: usize, reason: WaitReason) {
        let w = self.warps[k].as_mut().unwrap();
        let warp = &mut self.ctas[w.cta].as_mut().unwrap().warps[w.warp_index];
        let Some(g) = warp.select() else {
            w.blocked = true;
            return;
        };
        w.blocked = false;
        let Some(inst) = self.env.prog.code.get((warp.groups[g].pc / 16) as usize) else { return };
        w.ready = w.next;
        w.ready_reason = reason;
        let is_hmma = is_hmma884(inst);
        for i in 0..6 {
            if inst.ctrl.wait >> i & 1 != 0 {
                let sb = &w.sb[i];
                if let Some(t) = sb.users.iter().map(|x| if is_hmma { x.for_hmma } else { x.at }).max() {
                    if t > w.ready {
                        w.ready = t;
                        w.ready_reason = sb.why;
                    }
                }
            }
        }
    }

    /// Occupies the instruction's unit. Returns when the result is written, when the sources have been read, and the reason of waits for
    /// either. Instructions of fixed latency, the last arm, hold no scoreboard, so the times that it returns hardly matter.
    pub(super) fn occupy(&mut self, s: usize, k: usize, idx: usize, now: u64, acc: &Access) -> (u64, u64, WaitReason) {
        let m = self.machine;
        let inst = &self.env.prog.code[idx];
        let (tensor_cycles, tensor_latency) = match inst.op {
            Op::Tensor(Tensor::Hmma884 { f32: true, .. }) => (m.hmma_f32_cycles, m.hmma_latency),
            Op::Tensor(Tensor::Hmma1688 { f32: true }) => (m.hmma_1688_f32_cycles, m.hmma_1688_f32_latency),
            Op::Tensor(Tensor::Hmma1688 { f32: false }) => (m.hmma_1688_f16_cycles, m.hmma_1688_f16_latency),
            Op::Tensor(Tensor::Imma8816 { .. }) => (m.imma_8816_cycles, m.imma_8816_latency),
            _ => (m.hmma_f16_cycles, m.hmma_latency), // HMMA.884 with f16 accumulators; other operations do not use it
        };
        let is_wide = matches!(inst.op, Op::Integer(Integer::ImadWide { .. } | Integer::ImadHi { .. }));
        let c = &mut self.counters;
        let (mut cost, busy) = match inst.unit {
            Unit::Fma => (if is_wide { m.imad_wide_cycles } else { m.fma_cycles }, &mut c.fma_busy),
            Unit::Alu => (m.alu_cycles, &mut c.alu_busy),
            Unit::Fp16 => (m.fp16_cycles, &mut c.fp16_busy),
            Unit::Fp64 => (m.fp64_cycles, &mut c.fp64_busy),
            Unit::Xu => (m.xu_cycles, &mut c.xu_busy),
            Unit::Tensor => (tensor_cycles, &mut c.tensor_busy),
            Unit::Uniform => (m.uniform_cycles, &mut c.uniform_busy),
            Unit::Lsu => return self.memory(s, k, idx, now, acc), // in memory.rs
            Unit::Ctl => return (now + SOURCES_READ, now + SOURCES_READ, WaitReason::ShortScoreboard),
        };
        if m.reg_banks && !matches!(inst.unit, Unit::Tensor | Unit::Xu | Unit::Uniform) && bank_conflict(inst) {
            cost += 1;
            c.reg_conflicts += 1;
        }
        *busy += cost;
        self.subs[s].free[inst.unit as usize] = now + cost;
        match inst.unit {
            Unit::Xu => (now + m.xu_latency, now + cost, WaitReason::XuScoreboard),
            Unit::Tensor => (now + tensor_latency, now + cost + SOURCES_READ, WaitReason::TensorScoreboard),
            Unit::Uniform if matches!(inst.op, Op::Uniform(Uniform::R2ur)) => {
                (now + m.r2ur_latency, now + SOURCES_READ, WaitReason::ShortScoreboard)
            }
            Unit::Fp64 => (now + m.fp64_latency, now + cost, WaitReason::ShortScoreboard),
            _ => (now + FIXED_LATENCY, now + SOURCES_READ, WaitReason::ShortScoreboard),
        }
    }
}

fn is_hmma884(inst: &Inst) -> bool {
    matches!(inst.op, Op::Tensor(Tensor::Hmma884 { .. }))
}

/// Returns whether it reads three distinct registers from one of the two banks, of even and of odd numbers. The reuse cache serves none.
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
