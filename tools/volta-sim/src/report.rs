//! The report of a simulated launch, as data (`--json`, `volta_fa::_sim_report`) and as text. Tests: tests/in_process.rs.

use crate::env::Env;
use crate::isa::{Branch, Op};
use crate::machine::{Machine, Occupancy};
use crate::module::{KernelInfo, Shape};
use crate::run::Share; // the CTAs of the timed SM, with their costs
use crate::timing::{Counters, SmSim}; // SmSim: the simulated SM after its run
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};
use std::time::Duration;

/// The launch, and what was simulated of it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub launch: LaunchInfo,
    pub functional: Option<Functional>,
    pub timing: Option<Timing>,
}

/// Result of [`Module::time`](crate::Module::time).
#[derive(Clone, Debug, Serialize)]
pub struct TimingReport {
    #[serde(flatten)]
    pub launch: LaunchInfo,
    pub timing: Timing,
}

/// What is known about a launch without simulating it. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct LaunchInfo {
    /// mangled name of the kernel
    pub kernel: String,
    /// CTAs along x, y, z
    pub grid: [u32; 3],
    /// threads of a CTA along x, y, z
    pub block: [u32; 3],
    pub registers: u32,
    pub static_smem: u32,
    pub dynamic_smem: u32,
    /// local-memory frame of a thread, in bytes
    pub stack_frame: u32,
    /// instructions in the code that access local memory (LDL, STL)
    pub spill_insts_static: usize,
    pub code_insts: usize,
    pub occupancy: Occupancy,
}

/// A functional run. `seconds`: host time.
#[derive(Clone, Debug, Serialize)]
pub struct Functional {
    pub warp_insts: u64,
    pub seconds: f64,
    pub insts_per_second: f64,
}

/// A timing run: one SM's share of the grid, and the estimate for the whole. `cycles` were simulated in `seconds` of host time.
#[derive(Clone, Debug, Serialize)]
pub struct Timing {
    /// the SM whose share was simulated
    pub sm: u32,
    /// how the CTAs were assigned
    pub dispatch: String,
    pub ctas_of_sm: usize,
    pub ctas_simulated: usize,
    /// work of the average SM relative to this one: 1 if all have as much
    pub balance: f64,
    pub cycles: u64,
    /// estimated cycles of the kernel, extrapolated when not all CTAs of the SM were simulated
    pub kernel_cycles: f64,
    /// estimated duration of the kernel in microseconds, without the launch
    pub kernel_us: f64,
    /// minimum and maximum microseconds that the launch itself takes besides on a real card
    pub launch_us: [f64; 2],
    /// cycles between the first and the last read of the clock by the first warp that reads it, for kernels that time themselves
    pub clocked_cycles: Option<u64>,
    /// TFLOP/s of the kernel, if its operations were given
    pub tflops: Option<f64>,
    /// fraction of the simulated cycles that each part of the SM was busy; pipes are averaged over the four sub-partitions
    pub util: Fractions,
    /// shared-memory wavefronts beyond those a conflict-free layout needs, relative to the latter
    pub smem_conflict_excess: f64,
    /// warp instructions of the SM per cycle
    pub ipc: f64,
    /// what the resident warps did or waited for (see [`Stalls`](crate::Stalls)), as fractions of their cycles
    pub stall_fraction: Fractions,
    /// sectors found in L1, of those looked up
    pub l1_hit_rate: f64,
    /// event counts, among them the total of shared-memory wavefronts
    pub counters: Counters,
    /// warp instructions executed, by opcode
    pub mix: BTreeMap<String, u64>,
    pub hot_loop: Option<HotLoop>,
    pub seconds: f64,
    pub insts_per_second: f64,
    /// the code with executions, waits and bank conflicts per instruction, if asked for
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listing: Option<String>,
}

/// Fractions by name, in the order of the report.
pub type Fractions = BTreeMap<&'static str, f64>;

/// The innermost loop that holds most of the executed instructions.
#[derive(Clone, Debug, Serialize)]
pub struct HotLoop {
    pub first_pc: u32,
    /// address of the branch that closes it
    pub last_pc: u32,
    /// bytes of code from the first to the last instruction
    pub code_bytes: u32,
    /// times the closing branch was executed, over all warps
    pub iterations: u64,
    /// fraction of all executed warp instructions
    pub share: f64,
    pub smem_wavefronts: u64,
    /// those beyond a conflict-free layout's, relative to that layout's
    pub smem_conflict_excess: f64,
    /// warp instructions per iteration by opcode
    pub per_iteration: BTreeMap<String, f64>,
}

impl LaunchInfo {
    pub(crate) fn new(kernel: &KernelInfo, shape: &Shape, occupancy: Occupancy) -> Self {
        LaunchInfo {
            kernel: kernel.name.clone(),
            grid: shape.grid,
            block: shape.block,
            registers: kernel.registers,
            static_smem: kernel.static_smem,
            dynamic_smem: shape.dynamic_smem,
            stack_frame: kernel.frame_bytes,
            spill_insts_static: kernel.spill_insts,
            code_insts: kernel.code_bytes / 16,
            occupancy,
        }
    }
}

impl Functional {
    pub(crate) fn new(warp_insts: u64, time: Duration) -> Self {
        let seconds = time.as_secs_f64();
        Functional { warp_insts, seconds, insts_per_second: warp_insts as f64 / seconds.max(1e-9) }
    }
}

impl Timing {
    /// Summarizes a run of the first `n` CTAs of an SM's share, and extrapolates to all of them by their costs.
    pub(crate) fn new(env: &Env, sim: &SmSim, share: &Share, n: usize, m: &Machine, flops: Option<f64>, time: Duration) -> Self {
        let c = &sim.counters;
        let cyc = c.cycles.max(1) as f64;
        let done: u64 = share.cost[..n].iter().sum();
        let all: u64 = share.cost.iter().sum();
        let kernel_cycles = cyc * all as f64 / done.max(1) as f64;
        let us = kernel_cycles / m.clock_mhz;
        let seconds = time.as_secs_f64();
        let mut mix = BTreeMap::new();
        for (i, &h) in env.prog.code.iter().zip(&sim.executions) {
            if h > 0 {
                *mix.entry(opcode(&i.mnemonic)).or_insert(0) += h;
            }
        }
        Timing {
            sm: share.sm,
            dispatch: share.note.clone(),
            ctas_of_sm: share.ctas.len(),
            ctas_simulated: n,
            balance: share.balance,
            cycles: c.cycles,
            kernel_cycles,
            kernel_us: us,
            launch_us: m.launch_us,
            clocked_cycles: sim.clock_reads.map(|(first, last)| last - first),
            tflops: flops.map(|f| f / us / 1e6),
            util: utilization(c, m),
            smem_conflict_excess: c.smem_wavefronts as f64 / c.smem_ideal.max(1) as f64 - 1.0,
            ipc: c.insts as f64 / cyc,
            stall_fraction: stall_fractions(c),
            l1_hit_rate: c.l1_hits as f64 / c.l1_sectors.max(1) as f64,
            counters: c.clone(),
            mix,
            hot_loop: hot_loop(env, sim),
            seconds,
            insts_per_second: c.insts as f64 / seconds.max(1e-9),
            listing: None,
        }
    }
}

fn utilization(c: &Counters, m: &Machine) -> Fractions {
    let cyc = c.cycles.max(1) as f64;
    let pipe = |busy: u64| busy as f64 / (cyc * m.subs as f64);
    let once = |busy: u64| busy as f64 / cyc;
    Fractions::from([
        ("alu", pipe(c.alu_busy)),
        ("dram_bw", c.dram_busy / cyc), // of this SM's share, as l2_bw
        ("fma", pipe(c.fma_busy)),
        ("fp16", pipe(c.fp16_busy)),
        ("fp64", pipe(c.fp64_busy)),
        ("issue", pipe(c.insts)),
        ("l0_fill", once(c.l0_fills * m.l0_line_cycles)),
        ("l2_bw", c.l2_busy / cyc),
        // the data stage of memory instructions (MIO); of that, accesses of global and local memory, and of shared memory
        ("mio", once(c.mio_busy)),
        ("mio_global", once(c.global_wavefronts * m.wavefront_cycles)),
        ("mio_smem", once(c.smem_wavefronts * m.wavefront_cycles)),
        ("tensor", pipe(c.tensor_busy)),
        ("uniform", pipe(c.uniform_busy)),
        ("xu", pipe(c.xu_busy)),
    ])
}

fn stall_fractions(c: &Counters) -> Fractions {
    let s = &c.stalls;
    let waits = [
        ("barrier", s.barrier),
        ("fixed_latency", s.fixed_latency),
        ("issued", c.insts),
        ("long_scoreboard", s.long_scoreboard),
        ("no_instruction", s.no_instruction),
        ("not_selected", s.not_selected),
        ("pipe_busy", s.pipe_busy),
        ("short_scoreboard", s.short_scoreboard),
        ("tensor_scoreboard", s.tensor_scoreboard),
        ("xu_scoreboard", s.xu_scoreboard),
    ];
    waits.into_iter().map(|(name, n)| (name, n as f64 / c.resident_warp_cycles.max(1) as f64)).collect()
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.launch.fmt(f)?;
        if let Some(x) = &self.functional {
            x.fmt(f)?;
        }
        self.timing.as_ref().map_or(Ok(()), |t| t.fmt(f))
    }
}

impl Display for TimingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.launch.fmt(f)?;
        self.timing.fmt(f)
    }
}

impl Display for LaunchInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LaunchInfo { kernel, grid, block, registers, static_smem, dynamic_smem, stack_frame, spill_insts_static, code_insts, .. } =
            self;
        let Occupancy { ctas, warps, limit, .. } = self.occupancy;
        writeln!(f, "kernel {kernel}  grid {grid:?} block {block:?}")?;
        write!(f, "  {registers} registers, shared {static_smem} static + {dynamic_smem} dynamic, frame {stack_frame} B, ")?;
        write!(f, "{spill_insts_static} local-memory instructions in {code_insts}, ")?;
        writeln!(f, "occupancy {ctas} CTAs = {warps} warps (limit: {limit})")
    }
}

impl Display for Functional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  functional: {} warp instructions in {:.2} s ({:.2} M/s)", self.warp_insts, self.seconds, self.insts_per_second / 1e6)
    }
}

impl Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Timing { sm, dispatch, ctas_simulated, ctas_of_sm, cycles, balance, seconds, counters: c, .. } = self;
        write!(f, "  timing: SM {sm} ({dispatch}), {ctas_simulated} of its {ctas_of_sm} CTAs in {cycles} cycles; balance {balance:.3}; ")?;
        writeln!(f, "simulated in {seconds:.2} s ({:.2} M warp instructions/s)", self.insts_per_second / 1e6)?;
        write!(f, "  kernel estimate: {:.0} cycles = {:.1} us", self.kernel_cycles, self.kernel_us)?;
        if let Some(x) = self.tflops {
            write!(f, " = {x:.2} TFLOP/s")?;
        }
        writeln!(f, ", and {:.0} to {:.0} us for the launch", self.launch_us[0], self.launch_us[1])?;
        writeln!(f, "  utilization: {}", percentages(&self.util))?;
        writeln!(f, "  warp cycles: {}", percentages(&self.stall_fraction))?;
        let (excess, hits) = (self.smem_conflict_excess * 100.0, self.l1_hit_rate * 100.0);
        write!(f, "  IPC {:.2}; shared wavefronts {} (+{excess:.1}% over conflict-free), ", self.ipc, c.smem_wavefronts)?;
        write!(f, "L1 hit {hits:.1}%, L2 sectors {}, DRAM sectors {}, ", c.l2_sectors, c.dram_sectors)?;
        writeln!(f, "local instructions {}, register-bank conflicts {}", c.local_insts, c.reg_conflicts)?;
        match &self.hot_loop {
            Some(h) => writeln!(
                f,
                "  hottest loop 0x{:x}..0x{:x} ({:.0}% of instructions), per iteration: {}",
                h.first_pc,
                h.last_pc,
                h.share * 100.0,
                by_count(h.per_iteration.iter().map(|(k, &v)| (k, v)).collect())
            ),
            None => writeln!(f, "  mix: {}", by_count(self.mix.iter().map(|(k, &v)| (k, v as f64)).collect())),
        }
    }
}

fn percentages(fractions: &Fractions) -> String {
    fractions.iter().map(|(name, x)| format!("{name} {:.1}%", x * 100.0)).collect::<Vec<_>>().join(", ")
}

fn by_count(mut m: Vec<(&String, f64)>) -> String {
    m.sort_by(|a, b| b.1.total_cmp(&a.1));
    m.iter().map(|(k, v)| format!("{k} {v:.0}")).collect::<Vec<_>>().join(", ")
}

/// Returns the opcode under which `mix` counts a mnemonic: without most modifiers.
fn opcode(mn: &str) -> String {
    let mut p = mn.split('.');
    let base = p.next().unwrap_or("");
    match base {
        "MUFU" => format!("MUFU.{}", p.next().unwrap_or("")),
        "HMMA" => format!("HMMA.{}", p.next().unwrap_or("")),
        // LDSM.16.M88.4: with the number of matrices, which one alone lacks
        "LDSM" => format!("LDSM.{}", mn.split('.').nth(3).unwrap_or("1")),
        "LDS" | "STS" | "LDG" | "STG" | "LDL" | "STL" => {
            let w = mn.split('.').find(|m| ["64", "128", "U8", "S8", "U16", "S16"].contains(m)).unwrap_or("32");
            format!("{base}.{w}")
        }
        "IMAD" => match p.next() {
            Some(m @ ("MOV" | "WIDE" | "IADD" | "SHL" | "HI" | "X")) => format!("IMAD.{m}"),
            _ => "IMAD".into(),
        },
        "F2F" | "I2F" | "F2I" => mn.split('.').take(3).collect::<Vec<_>>().join("."),
        _ => base.into(),
    }
}

/// Returns the main loop. A loop is what a backward branch closes. Takes the one with the most executed instructions, then as long as a
/// loop inside it has 70% of these, that one.
fn hot_loop(env: &Env, sim: &SmSim) -> Option<HotLoop> {
    let hist = &sim.executions;
    let total: u64 = hist.iter().sum();
    let weight = |a: usize, b: usize| hist[a..=b].iter().sum::<u64>();
    let loops: Vec<(usize, usize)> = env
        .prog
        .code
        .iter()
        .enumerate()
        .filter(|(i, c)| matches!(c.op, Op::Branch(Branch::Bra)) && c.target <= c.pc && hist[*i] > 0)
        .map(|(i, c)| (c.target as usize / 16, i))
        .filter(|&(a, b)| a < b)
        .collect();
    let mut best = *loops.iter().max_by_key(|&&(a, b)| weight(a, b))?;
    // a smaller loop inside the best one, with 70% of its instructions
    let is_inner = |(a, b), (first, last)| a >= first && b <= last && b - a < last - first && weight(a, b) * 10 >= weight(first, last) * 7;
    while let Some(&inner) = loops.iter().filter(|&&l| is_inner(l, best)).max_by_key(|&&(a, b)| weight(a, b)) {
        best = inner;
    }
    let (a, b) = best;
    let iterations = hist[b].max(1);
    let mut per = BTreeMap::new();
    for i in a..=b {
        if hist[i] > 0 {
            *per.entry(opcode(&env.prog.code[i].mnemonic)).or_insert(0.0) += hist[i] as f64 / iterations as f64;
        }
    }
    let waves: u64 = sim.smem_wavefronts[a..=b].iter().sum();
    let excess: u64 = sim.excess_wavefronts[a..=b].iter().sum();
    Some(HotLoop {
        first_pc: a as u32 * 16,
        last_pc: b as u32 * 16,
        code_bytes: (b - a + 1) as u32 * 16,
        iterations,
        share: weight(a, b) as f64 / total.max(1) as f64,
        smem_wavefronts: waves,
        smem_conflict_excess: excess as f64 / (waves - excess).max(1) as f64,
        per_iteration: per,
    })
}

/// Returns the code with, per instruction: executions, average cycles waited before it, excess shared-memory wavefronts, control code.
pub fn annotate(env: &Env, sim: &SmSim) -> String {
    let mut s = String::from("    pc      execs  avg-wait  bank-excess  control (wait:rd:wr:yield:stall)  instruction\n");
    for (i, c) in env.prog.code.iter().enumerate() {
        let k = &c.ctrl;
        let sb = |x: u8| if x < 6 { x.to_string() } else { "-".into() }; // 7: no scoreboard
        let wait: String = (0..6).map(|b| if k.wait >> b & 1 != 0 { char::from(b'0' + b) } else { '-' }).collect();
        let h = sim.executions[i];
        let (average, excess) = (sim.wait_cycles[i] as f64 / h.max(1) as f64, sim.excess_wavefronts[i]);
        let (rd, wr, yields) = (sb(k.rd_sb), sb(k.wr_sb), if k.yield_ { 'Y' } else { '-' });
        let _ = writeln!(s, "{:6x} {h:10} {average:9.1} {excess:12} {wait}:{rd}:{wr}:{yields}:{:02}  {}", c.pc, k.stall, c.text);
    }
    s
}
