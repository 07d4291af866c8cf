//! State of the timing model's warps and schedulers, what warps wait for, and the counts of a run.

use super::cache::ICache;
use serde::Serialize;
use std::collections::VecDeque;

/// What a warp waits for; [`Stalls`] counts the cycles. An earlier instruction holds a scoreboard until its result is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum WaitReason {
    /// the cycles that the instruction before asks for in its encoding
    #[default]
    StallCount,
    ShortScoreboard,
    LongScoreboard,
    XuScoreboard,
    TensorScoreboard,
    Barrier,
}

/// When an outstanding user of a scoreboard releases it.
#[derive(Clone, Copy)]
pub(super) struct Release {
    pub(super) at: u64,
    /// the same for an HMMA.884 that waits: earlier if the user is an HMMA.884 too, which forwards its accumulators
    pub(super) for_hmma: u64,
}

/// The outstanding users of one scoreboard.
#[derive(Default, Clone)]
pub(super) struct Scoreboard {
    pub(super) users: Vec<Release>,
    /// what a wait for the last of them counts as
    pub(super) why: WaitReason,
}

/// A resident warp as the scheduler sees it.
#[derive(Default)]
pub(super) struct WarpTiming {
    /// its CTA in `SmSim::ctas`, and its number there
    pub(super) cta: usize,
    pub(super) warp_index: usize,
    /// number in the order of launches: the lower, the older
    pub(super) age: u64,
    /// cycle of the earliest issue by stall count, barrier and branch
    pub(super) next: u64,
    /// the same, with scoreboards too
    pub(super) ready: u64,
    /// what it waits for until `ready`
    pub(super) ready_reason: WaitReason,
    pub(super) sb: [Scoreboard; 6],
    pub(super) last_issue: u64,
    /// whether it waits at a barrier of its CTA
    pub(super) blocked: bool,
    /// since its last issue: how often the scheduler looked at it
    pub(super) scans: u64,
    /// of these, how often its pipe was busy, and how often its instruction was absent
    pub(super) pipe_wait: u64,
    pub(super) fetch_wait: u64,
}

/// A sub-partition of the SM: a scheduler with its pipes.
#[derive(Default)]
pub(super) struct SubPartition {
    /// its warps, as indices of `SmSim::warps`
    pub(super) warps: Vec<usize>,
    /// the warp that issued last
    pub(super) last: Option<usize>,
    /// whether that warp's instruction asked to prefer another warp
    pub(super) last_yield: bool,
    /// by `Unit`: when the pipe can take another instruction
    pub(super) free: [u64; 8], // Unit::Ctl, the last one, has no pipe
    /// when each queued memory instruction leaves the MIO queue, in which it waits for the SM's data stage
    pub(super) mio: VecDeque<u64>,
    /// when its address unit can take another instruction
    pub(super) agu_free: u64,
    pub(super) l0: ICache,
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
    /// results of HMMA and IMMA
    pub tensor_scoreboard: u64,
    pub barrier: u64,
    /// instruction not yet in the L0 cache
    pub no_instruction: u64,
    /// execution pipe or MIO queue busy
    pub pipe_busy: u64,
    /// another warp was chosen
    pub not_selected: u64,
}

impl Stalls {
    pub(super) fn of(&mut self, reason: WaitReason) -> &mut u64 {
        match reason {
            WaitReason::StallCount => &mut self.fixed_latency,
            WaitReason::ShortScoreboard => &mut self.short_scoreboard,
            WaitReason::LongScoreboard => &mut self.long_scoreboard,
            WaitReason::XuScoreboard => &mut self.xu_scoreboard,
            WaitReason::TensorScoreboard => &mut self.tensor_scoreboard,
            WaitReason::Barrier => &mut self.barrier,
        }
    }
}

/// Event counts of the simulated SM. "Busy" counts of pipes are cycles, summed over the four sub-partitions.
#[derive(Default, Clone, Debug, Serialize)]
pub struct Counters {
    /// clock cycles from the first launch to the last exit
    pub cycles: u64,
    /// warp instructions
    pub insts: u64,
    pub ctas: u64,
    /// FP32 and IMAD
    pub fma_busy: u64,
    pub alu_busy: u64,
    pub fp16_busy: u64,
    pub fp64_busy: u64,
    /// special functions and conversions
    pub xu_busy: u64,
    pub tensor_busy: u64,
    pub uniform_busy: u64,
    /// cycles of the SM's one data stage of memory instructions and shuffles (MIO)
    pub mio_busy: u64,
    /// shared-memory wavefronts, 128 bytes each
    pub smem_wavefronts: u64,
    /// wavefronts that the same bytes need without bank conflicts
    pub smem_ideal: u64,
    /// warp shuffles, MATCH and MOVM
    pub shfl: u64,
    /// wavefronts of global and local accesses
    pub global_wavefronts: u64,
    /// 32-byte sectors looked up in L1
    pub l1_sectors: u64,
    pub l1_hits: u64,
    pub l2_sectors: u64,
    pub dram_sectors: u64,
    pub store_sectors: u64,
    /// cycles of this SM's share of the L2 bandwidth
    pub l2_busy: f64,
    /// cycles of this SM's share of the DRAM bandwidth
    pub dram_busy: f64,
    /// local-memory warp instructions (spills, stack)
    pub local_insts: u64,
    pub barriers: u64,
    /// instructions that lost a cycle to a register-bank conflict
    pub reg_conflicts: u64,
    /// 128-byte instruction lines fetched into the L0 caches
    pub l0_fills: u64,
    /// of these, lines that the L1.5 first had to fetch from L2; 0 where the L1.5 is not modeled
    pub l15_fills: u64,
    /// resident warps, summed over all cycles
    pub resident_warp_cycles: u64,
    pub stalls: Stalls,
}
