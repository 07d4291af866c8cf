//! Times of the instructions of the MIO (memory input/output), from the lanes' addresses. Loads, stores, shuffles and others pass a queue
//! in each sub-partition, then the SM's one data stage, to shared memory and L1. Times are cycles.

use super::counters::WaitReason;
use super::issue::SOURCES_READ;
use super::SmSim;
use crate::isa::*;
use crate::lanes::lanes_in;
use crate::machine::{lanes_per_group, smem_wavefronts, sorted_set};
use crate::ops::memory::shared_offset;
use crate::step::Access;

impl SmSim<'_, '_> {
    /// Passes instruction `idx` of the code, of warp `k`, through the queue of sub-partition `s` and the data stage from cycle `now` on,
    /// and global and local accesses through L1, L2 and DRAM, sector by sector. Returns when the result is written, when the sources have
    /// been read, and the reason of waits for either.
    pub(super) fn memory(&mut self, s: usize, k: usize, idx: usize, now: u64, acc: &Access) -> (u64, u64, WaitReason) {
        let m = self.machine;
        let inst = &self.env.prog.code[idx];
        match inst.op {
            Op::SpecialRegister(SpecialRegister::S2r(_)) | Op::Barrier(Barrier::B2r) => {
                return (now + m.s2r_latency, now + SOURCES_READ, WaitReason::ShortScoreboard)
            }
            Op::Barrier(Barrier::Membar) => return (now + m.l2_latency, now + SOURCES_READ, WaitReason::LongScoreboard),
            Op::Memory(Memory::Qspc { .. }) => return (now + m.lds_latency, now + SOURCES_READ, WaitReason::ShortScoreboard),
            _ => {}
        }
        let prefetch = matches!(inst.op, Op::Memory(Memory::Prefetch));
        let strong = matches!(inst.op, Op::Memory(Memory::Ld { strong: true, .. }));
        // `bytes`: of a lane; space None: a shuffle, MATCH or MOVM
        let (space, bytes, write, atomic) = match inst.op {
            Op::Memory(Memory::Ld { space, bytes, .. }) => (Some(space), bytes as u32, false, false),
            Op::Memory(Memory::St { space, bytes }) => (Some(space), bytes as u32, true, false),
            Op::Memory(Memory::Prefetch) => (Some(Space::Global), 4, false, false),
            Op::Memory(Memory::Ldsm { .. }) => (Some(Space::Shared), 16, false, false),
            Op::Atomic(a) => (Some(a.space), if a.wide() { 8 } else { 4 }, true, true),
            _ => (None, 4, false, false),
        };
        // A generic access takes the space of its first lane. The window of shared memory begins at bank 0, so banks follow from addresses.
        let first = acc.addr[acc.mask.trailing_zeros() as usize % 32];
        let space = match space {
            Some(Space::Generic) if shared_offset(first).is_some() => Some(Space::Shared),
            Some(Space::Generic) => Some(Space::Global),
            known => known,
        };
        // wavefronts: passes of at most 128 bytes through the data stage
        let mut sectors: Vec<u64> = vec![];
        let waves = match space {
            None => {
                self.counters.shfl += 1;
                1
            }
            Some(Space::Shared) => {
                // LDSM reads a row of 16 bytes at each of the first 8 * matrices lanes' addresses
                let lanes = match inst.op {
                    Op::Memory(Memory::Ldsm { matrices, .. }) => !0 >> (32 - 8 * matrices as u32),
                    _ => acc.mask,
                };
                let mut w = smem_wavefronts(&acc.addr, lanes, bytes);
                let ideal = (lanes.count_ones() * bytes).div_ceil(128).max(1);
                if atomic {
                    w = w.max(2); // reads, then writes
                }
                self.counters.smem_wavefronts += w as u64;
                self.counters.smem_ideal += ideal as u64;
                self.smem_wavefronts[idx] += w as u64;
                self.excess_wavefronts[idx] += (w - ideal.min(w)) as u64;
                w
            }
            Some(Space::Const) => 1,
            Some(Space::Local) => {
                self.counters.local_insts += 1;
                sectors = local_sectors(acc, bytes, k as u64, self.env.local_bytes as u64);
                sectors.len().div_ceil(4) as u32
            }
            Some(Space::Global | Space::Generic) => {
                let waves;
                (waves, sectors) = global_wavefronts(acc, bytes);
                waves
            }
        };
        // address generation in the sub-partition (AGU), then the data stage shared by all four, which is free from `lsu_free` on
        let agu = now.max(self.subs[s].agu_free);
        self.subs[s].agu_free = agu + m.agu_cycles;
        let start = (agu + m.mio_delay).max(self.lsu_free);
        // shuffles and constants do not pass through the banks
        let each = if matches!(space, None | Some(Space::Const)) { 1 } else { m.wavefront_cycles };
        let store = if write && space == Some(Space::Shared) { m.sts_extra_cycles } else { 0 };
        let busy = waves as u64 * each + store;
        self.lsu_free = start + busy;
        self.counters.mio_busy += busy;
        let q = &mut self.subs[s].mio;
        while q.front().is_some_and(|&t| t <= now) {
            q.pop_front();
        }
        q.push_back(start);
        let done = start + busy - each; // when the last wavefront enters the data stage
        let rd = done + m.rd_release;
        let tail = |latency: u64| latency - m.mio_delay; // the constants count from the address unit, mio_delay before the data stage
        match space {
            None if matches!(inst.op, Op::WarpWide(WarpWide::Movm)) => (done + tail(m.movm_latency), rd, WaitReason::ShortScoreboard),
            None => (done + tail(m.shfl_latency), rd, WaitReason::ShortScoreboard),
            Some(Space::Shared) => (done + tail(m.lds_latency), rd, WaitReason::ShortScoreboard),
            Some(Space::Const) => (done + tail(m.ldc_latency), rd, WaitReason::ShortScoreboard),
            Some(sp) => {
                self.counters.global_wavefronts += waves as u64;
                let mut ready = done + tail(m.l1_latency);
                for sector in sectors {
                    let a = sector * 32; // its byte address
                    if write && sp == Space::Global {
                        // write-through; atomics are performed in L2
                        let t = self.l2_transfer(done, false); // false: over L2's bandwidth alone
                        self.counters.store_sectors += 1;
                        // access() returns whether the cache has the sector, which it has afterwards
                        if !self.l2.access(a) && self.is_written_back(a) {
                            self.dram_transfer(t as f64);
                        }
                        if atomic {
                            ready = ready.max(t + tail(m.l2_latency) + m.atom_extra);
                        }
                        continue;
                    }
                    if prefetch {
                        if !self.l2.access(a) && self.first_touch(a) {
                            let arrives = self.dram_transfer(done as f64) as u64 + tail(m.dram_latency);
                            self.in_flight.insert(sector, arrives);
                        }
                        continue;
                    }
                    if !strong {
                        self.counters.l1_sectors += 1;
                        // stores to local memory, the only ones that come here, stay in L1
                        if self.l1.access(a) || write {
                            self.counters.l1_hits += 1;
                            continue;
                        }
                    }
                    self.counters.l2_sectors += 1;
                    let hit = self.l2.access(a) || sp == Space::Local || !self.first_touch(a);
                    let t = self.l2_transfer(done, !hit);
                    ready = ready.max(t + tail(if hit { m.l2_latency } else { m.dram_latency }));
                    if let Some(arrives) = self.in_flight.remove(&sector) {
                        ready = ready.max(arrives);
                    }
                }
                (ready, rd, WaitReason::LongScoreboard)
            }
        }
    }

    /// Moves one 32-byte sector over this SM's share of the L2 bandwidth, with `dram` of DRAM's too, from cycle `at` on. Returns when it
    /// starts.
    pub(super) fn l2_transfer(&mut self, at: u64, dram: bool) -> u64 {
        let cycles = 32.0 / self.l2_rate;
        let mut t = (at as f64).max(self.l2_free);
        self.l2_free = t + cycles;
        self.counters.l2_busy += cycles;
        if dram {
            t = self.dram_transfer(t);
        }
        t as u64
    }

    /// Moves one sector over this SM's share of the DRAM bandwidth. Returns when it starts.
    pub(super) fn dram_transfer(&mut self, at: f64) -> f64 {
        let cycles = 32.0 / self.dram_rate;
        let t = at.max(self.dram_free);
        self.dram_free = t + cycles;
        self.counters.dram_busy += cycles;
        self.counters.dram_sectors += 1;
        t
    }

    /// Returns whether a stored sector costs this SM a write to DRAM: as many sectors of a buffer do as its budget has (`first_touch`), if
    /// the buffer is larger than L2. Smaller ones stay in L2.
    pub(super) fn is_written_back(&mut self, addr: u64) -> bool {
        let buffers = &self.env.mem.bufs;
        buffers.iter().find(|b| b.touches(addr)).is_some_and(|b| b.len > self.machine.l2_bytes) && self.first_touch(addr)
    }

    /// Returns whether this SM pays the DRAM fetch of a sector that no warp of it touched before, and takes it off the buffer's budget
    /// (`dram_budget`). It pays for one part in as many as SMs are busy. The others bring the rest into L2.
    pub(super) fn first_touch(&mut self, addr: u64) -> bool {
        let Some(i) = self.env.mem.bufs.iter().position(|b| b.touches(addr)) else { return false };
        let pays = self.dram_budget[i] > 0;
        self.dram_budget[i] -= u64::from(pays);
        pays
    }
}

/// Returns the 32-byte sectors that the active lanes of warp `k` access in local memory. It interleaves lanes word by word, and here begins
/// at 2^60, above all buffers. A warp has 32 lanes of `lane_bytes`.
fn local_sectors(acc: &Access, bytes: u32, k: u64, lane_bytes: u64) -> Vec<u64> {
    let words = (bytes / 4).max(1) as u64;
    let address = |l: usize, word: u64| (1 << 60) + k * lane_bytes * 32 + ((acc.addr[l] / 4 + word) * 32 + l as u64) * 4;
    sorted_set(lanes_in(acc.mask).flat_map(|l| (0..words).map(move |word| address(l, word) / 32)))
}

/// Returns the wavefronts of a global access, one for each 128-byte line that a group of lanes touches, and the access's 32-byte sectors.
/// [`lanes_per_group`] has the size of a group.
fn global_wavefronts(acc: &Access, bytes: u32) -> (u32, Vec<u64>) {
    let group = lanes_per_group(bytes);
    let active = |l: &usize| acc.mask >> l & 1 != 0;
    let lines = |first: usize| sorted_set((first..first + group).filter(active).map(|l| acc.addr[l] / 128)).len() as u32;
    let sectors = |l: usize| [acc.addr[l] / 32, (acc.addr[l] + bytes as u64 - 1) / 32]; // a lane has at most 16 bytes
    ((0..32).step_by(group).map(lines).sum::<u32>().max(1), sorted_set(lanes_in(acc.mask).flat_map(sectors)))
}
