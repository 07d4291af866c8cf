//! Constants of the simulated GPUs for the timing model (`timing`), each with its source: the V100-SXM2's at the fields of [`Machine`], the
//! other cards' at their values. Times are cycles of the SM's clock. A CTA is a thread block. MIO is the path of memory instructions and
//! shuffles: a queue in each sub-partition, then a data stage of the SM, which moves a wavefront of 128 bytes at once.
//!
//! Sources; "assumed" at a field: no direct source.
//! - (Jia18) Jia, Maggioni, Staiger, Scarpazza, "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (2018)
//! - (WP) NVIDIA Tesla V100 GPU Architecture whitepaper
//! - (GPGPU) the GPGPU-Sim / Accel-Sim SM7_QV100 configuration
//! - (PG) CUDA C++ programming guide, throughput table
//! - (RGA19) Raihan, Goli, Aamodt, "Modeling Deep Learning Accelerator Enabled GPUs" (2019)
//! - (1Cat) measurements on GV100 cards that the repository 1CatAI/1Cat-vLLM publishes (docs/design, 2026-08), see
//!   docs/validation/real-cards.md
//! - (HSG25) Huerta, Shoushtary, Cruz, Gonzalez, "Dissecting and Modeling the Architecture of Modern GPU Cores" (MICRO 2025), of Ampere
//!
//! For Turing:
//! - (TWP) NVIDIA Turing GPU Architecture whitepaper and the cards' data sheets
//! - (Jia19) Jia, Maggioni, Smith, Scarpazza, "Dissecting the NVIDIA Turing T4 GPU via Microbenchmarking" (2019)
//! - (Yan20) Yan, Wang, Chu, "Demystifying Tensor Cores to Optimize Half-Precision Matrix Multiply" (IPDPS 2020)
//! - (SJF) sjfeng1999/gpu-arch-microbenchmark, an RTX 2070
//! - (CC) Chips and Cheese on Turing
//! - (HHC) haohervchb's measured rates of an RTX 2080 Ti
//! - (PTXAS) the distance at which ptxas 12.9 places such instructions

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Defines [`Machine`] from its fields, each with the V100-SXM2's value.
macro_rules! machine {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $v100:expr,)*) => {
        /// Constants of the timing model. [`Machine::default`] is a V100-SXM2.
        #[derive(Clone, Debug, Serialize, Deserialize)]
        pub struct Machine {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Machine {
            /// Tesla V100-SXM2.
            pub fn v100() -> Machine {
                Machine { $($field: $v100,)* }
            }
        }
    };
}

machine! {
    /// one of [`Machine::names`]
    name: String = "v100".into(),
    /// architecture whose code it runs, 70 for sm_70
    sm: u32 = 70,
    /// SM clock in MHz while boosted (WP)
    clock_mhz: f64 = 1530.0,
    /// streaming multiprocessors (WP)
    sms: u32 = 80,
    /// sub-partitions (warp schedulers) per SM (WP); warp w -> sub-partition w % 4 (Jia18)
    subs: u32 = 4,
    /// resident warps per SM (PG)
    max_warps: u32 = 64,
    /// resident CTAs per SM (PG)
    max_ctas: u32 = 32,
    /// 32-bit registers per SM (PG)
    regs_per_sm: u32 = 65536,
    /// register allocation granularity per warp, in registers (PG)
    reg_gran: u32 = 256,
    /// shared memory usable per SM, in bytes (PG)
    smem_per_sm: u32 = 96 * 1024,
    /// shared-memory allocation granularity, in bytes (PG)
    smem_gran: u32 = 256,
    /// combined L1 + shared memory, in bytes (WP)
    l1_smem_total: u32 = 128 * 1024,
    /// what shared memory can take of it, in KiB (PG)
    smem_carve_kib: Vec<u32> = vec![0, 8, 16, 32, 64, 96],

    // --- cycles a pipe of one sub-partition is busy per warp instruction -----------------
    /// FP32 / IMAD pipe: 16 lanes (WP)
    fma_cycles: u64 = 2,
    /// IMAD.WIDE and IMAD.HI: assumed half rate (64-bit result)
    imad_wide_cycles: u64 = 4,
    /// integer / logic pipe: 16 lanes (WP)
    alu_cycles: u64 = 2,
    /// packed-half pipe: 16 lanes of half2 (WP: 2x the FP32 rate)
    fp16_cycles: u64 = 2,
    /// 8 FP64 lanes per sub-partition (WP)
    fp64_cycles: u64 = 4,
    /// special functions and conversions: 16 lanes/clk/SM = 4 per sub-partition (PG)
    xu_cycles: u64 = 8,
    /// HMMA.884 F32 step: 512 FLOP at 256 FLOP/clk/sub-partition (WP: 125 TFLOP/s)
    hmma_f32_cycles: u64 = 2,
    /// HMMA.884 F16 step: 1024 FLOP (2 steps per mma)
    hmma_f16_cycles: u64 = 4,
    /// HMMA.1688 of sm_75 with f32 accumulators: 2048 FLOP. sm_70 has neither it, IMMA, MOVM nor a uniform datapath: fields of
    /// these are 0 here, but for movm_latency, which the other cards take too
    hmma_1688_f32_cycles: u64 = 0,
    /// and with f16 accumulators
    hmma_1688_f16_cycles: u64 = 0,
    /// IMMA.8816 of sm_75: 2048 operations
    imma_8816_cycles: u64 = 0,
    /// scalar instruction of sm_75's uniform datapath
    uniform_cycles: u64 = 0,

    // --- latencies from issue to the release of the write scoreboard ----------------------
    /// HMMA.884, for an HMMA that waits for its accumulators. These are forwarded, so only the stall counts that instructions encode delay
    /// a chain of HMMAs (1Cat: 8.66 cycles per m8n8k4)
    hmma_forward: u64 = 2,
    /// HMMA.884, for other instructions that wait: the first results of an HMMA set come after 10..12 cycles (RGA19)
    hmma_latency: u64 = 12,
    /// last registers of an HMMA.1688 with f32 accumulators
    hmma_1688_f32_latency: u64 = 0,
    /// and with f16 accumulators
    hmma_1688_f16_latency: u64 = 0,
    /// last register of an IMMA.8816 of sm_75
    imma_8816_latency: u64 = 0,
    /// R2UR of sm_75, from a thread's register to a uniform one
    r2ur_latency: u64 = 0,
    /// MOVM, assumed: as a shuffle
    movm_latency: u64 = 22,
    /// (GPGPU) sfu latency 20 (trace config); (Jia18) does not list it
    xu_latency: u64 = 20,
    /// FP64 instructions that use a scoreboard (GPGPU: 8)
    fp64_latency: u64 = 8,
    /// shared-memory load, no conflict (Jia18: 19)
    lds_latency: u64 = 19,
    /// warp shuffle, assumed
    shfl_latency: u64 = 22,
    /// S2R, assumed
    s2r_latency: u64 = 22,
    /// LDC indexed constant, cache hit, assumed (Jia18: L1.5 constant ~27..89)
    ldc_latency: u64 = 27,
    /// L1 hit (Jia18: 28)
    l1_latency: u64 = 28,
    /// L2 hit (Jia18: 193; 1Cat: a chain of `ld.global.cg` takes 210.7 cycles for each load and its address)
    l2_latency: u64 = 208,
    /// DRAM (Jia18: ~375..1029 depending on TLB; GPGPU ~430)
    dram_latency: u64 = 430,
    /// atomics on global memory, added to the L2 latency, assumed
    atom_extra: u64 = 20,
    /// cycles from address generation to the data stage, assumed
    mio_delay: u64 = 4,
    /// cycles a sub-partition's 8 load/store lanes (WP) are busy per warp memory instruction
    agu_cycles: u64 = 4,
    /// pending memory instructions per sub-partition before issue stalls, assumed
    mio_queue: usize = 8,
    /// cycles after the start of a memory instruction until its sources may be overwritten, assumed
    rd_release: u64 = 6,
    /// cycles that 128 bytes of shared memory or L1 take of the SM's data stage: 128 B/clk (Jia18)
    wavefront_cycles: u64 = 1,
    /// further cycles of the data stage that an instruction takes to store to shared memory
    sts_extra_cycles: u64 = 0,
    /// from the last arrival at BAR.SYNC to the next issue of the released warps, assumed
    bar_latency: u64 = 16,
    /// minimum issue distance after a taken branch, assumed
    branch_cycles: u64 = 8,
    /// CTA launch: cycles from a free slot to the first issue, assumed
    cta_launch: u64 = 200,
    /// minimum and maximum us of a kernel launch, which simulated times leave out (1Cat: times against work have an intercept of 16 to 27
    /// us; the simulation explains 5 to 8 of them)
    launch_us: [f64; 2] = [10.0, 20.0],

    // --- bandwidth, bytes per cycle for one SM -------------------------------------------
    /// where all SMs are equally busy (Jia18): 2155 GB/s over 80 SMs at 1.53 GHz
    l2_bytes_per_clk: f64 = 17.6,
    /// where other SMs are idle, at most (GPGPU: a port of the crossbar takes a flit of 40 bytes, 32 of data, per cycle). DRAM's share
    /// grows by the same factor, 1.8. An H200's SM has 1.6 to 1.9 times its share if a quarter of the SMs work, and 3.4 to 4.2 alone.
    l2_port_bytes_per_clk: f64 = 32.0,
    /// GB/s of the card's DRAM that kernels attain: 0.87 of the peak (1Cat: a GEMM that reads 624 MB; Jia18: 750 of 900)
    dram_gb_per_s: f64 = 783.0,
    /// L2 capacity, in bytes (WP)
    l2_bytes: u64 = 6 << 20,

    // --- instruction supply -----------------------------------------------------------------
    /// model the L0 instruction caches (one per sub-partition)
    icache: bool = true,
    /// L0 capacity, in bytes (Jia18: 12 KiB)
    l0_bytes: u32 = 12 * 1024,
    /// bytes of the L1.5 that the sub-partitions share; 0: not modeled, as on Volta, whose 128 KiB (Jia18) hold any kernel here
    l15_bytes: u32 = 0,
    /// cycles between two lines that the L1.5 gets from L2
    l15_line_cycles: u64 = 0,
    /// cycles in which the L1.5 delivers a line (128 bytes, 8 instructions) to an L0: fitted to three kernels, README "Instruction cache"
    l0_line_cycles: u64 = 10,
    /// latency of such a fetch, assumed
    l0_miss_latency: u64 = 30,
    /// lines fetched ahead of the demanded one, assumed (HSG25 assumes a stream buffer of 8 on Ampere)
    l0_prefetch: u32 = 2,
    /// the L0 replaces a random line (fitted, see README "Instruction cache"), not the one unused for longest
    l0_random: bool = true,

    /// 3 distinct source registers in one of the two 64-bit banks cost a cycle (Jia18)
    reg_banks: bool = true,
}

impl Default for Machine {
    fn default() -> Self {
        Machine::v100()
    }
}

/// CTAs and warps of a kernel that are resident on an SM, what limits the CTAs, and how many each resource allows.
#[derive(Clone, Debug, Serialize)]
pub struct Occupancy {
    pub ctas: u32,
    pub warps: u32,
    pub limit: &'static str,
    pub by_regs: u32,
    pub by_smem: u32,
    pub by_warps: u32,
}

/// The GPUs there are descriptions of.
const MACHINES: [fn() -> Machine; 5] = [Machine::v100, Machine::pg503, Machine::t4, Machine::rtx2080ti, Machine::titanrtx];

impl Machine {
    /// Returns the constants of a GPU: `v100`, `pg503`, `t4`, `rtx2080ti` or `titanrtx`.
    pub fn named(name: &str) -> Option<Machine> {
        MACHINES.iter().map(|m| m()).find(|m| m.name == name)
    }

    pub fn names() -> Vec<String> {
        MACHINES.iter().map(|m| m().name).collect()
    }

    /// Returns the first GPU that runs code for this architecture.
    pub fn of_sm(sm: u32) -> Option<Machine> {
        MACHINES.iter().map(|m| m()).find(|m| m.sm == sm)
    }

    /// Tesla PG503-216, the card of most of 1Cat's measurements: a GV100 with 72 SMs and faster memory. Its application clock; other
    /// measurements ran at 1200 MHz (`set("clock_mhz", "1200")`).
    pub fn pg503() -> Machine {
        Machine {
            name: "pg503".into(),
            clock_mhz: 1312.0,
            sms: 72,
            dram_gb_per_s: 983.0, // 0.87 of 1130, the peak that ncu's shares of it give (1Cat)
            ..Machine::v100()
        }
    }

    /// Tesla T4. Constants that are not here are the V100's. (PG) has the same throughputs for both. Equality is assumed of latencies that
    /// are not published, the MIO queue, the L0's refill and prefetching, and the L2 port.
    pub fn t4() -> Machine {
        Machine {
            name: "t4".into(),
            sm: 75,
            clock_mhz: 1590.0,            // boost (TWP); 70 W rarely allow it for long: a share of the pipe says more
            sms: 40,                      // (TWP)
            max_warps: 32,                // (PG)
            max_ctas: 16,                 // (PG)
            smem_per_sm: 64 * 1024,       // (PG)
            l1_smem_total: 96 * 1024,     // (TWP)
            smem_carve_kib: vec![32, 64], // (PG)
            fp64_cycles: 64,              // 2 lanes an SM (TWP)
            hmma_1688_f32_cycles: 8,      // 1024 FLOP/clk/SM (TWP: 65 TFLOP/s); (PTXAS) 8
            hmma_1688_f16_cycles: 8,      // (Yan20) 8.06; the same peak (TWP)
            imma_8816_cycles: 4,          // 2048 operations/clk/SM (TWP: T4 130, RTX 2080 Ti 215 TOPS)
            uniform_cycles: 2,            // (PTXAS): two that do not depend on each other are placed 2 apart
            hmma_1688_f32_latency: 18,    // assumed: 4 more than with f16 accumulators, for twice the registers
            hmma_1688_f16_latency: 14,    // (Yan20): 10 to the first register, 14 to the second
            imma_8816_latency: 12,        // assumed: as HMMA.884; 8 and 20 change the int8 forward kernel by 2%
            r2ur_latency: 12,             // assumed
            lds_latency: 23,              // (SJF)
            l1_latency: 32,               // (SJF)
            l2_latency: 236,              // (SJF)
            dram_latency: 500,            // assumed: (SJF) has over 1000 with misses in the TLB
            agu_cycles: 2,                // (Yan20): one warp issues LDS.32 every 2.1 clk
            wavefront_cycles: 2,          // 64 B/clk: (Jia19) attains 58.8, (Yan20) all of it with LDS.64 and LDS.128; LDSM as
            // LDS: assumed, (PTXAS) spaces the two alike
            sts_extra_cycles: 2,    // (Yan20): STS.32, .64 and .128 every 4.06, 6 and 10 clk
            l2_bytes_per_clk: 20.0, // derived: about 1.3 TB/s over 40 SMs, from alexarmbr's GEMM study
            dram_gb_per_s: 220.0,   // of 320 (Jia19); (Yan20) has 240
            l2_bytes: 4 << 20,      // (TWP)
            l0_bytes: 16 * 1024,    // (CC)
            l15_bytes: 46 * 1024,   // (CC)
            l15_line_cycles: 7,     // a line at l2_bytes_per_clk: assumed
            ..Machine::v100()
        }
    }

    /// GeForce RTX 2080 Ti: a T4's SM with half the rate of f32 accumulation.
    pub fn rtx2080ti() -> Machine {
        Machine {
            name: "rtx2080ti".into(),
            clock_mhz: 1545.0,         // boost (TWP)
            sms: 68,                   // (TWP)
            hmma_1688_f32_cycles: 16,  // (HHC): 511.7 FLOP/clk/SM with f32, 1022 with f16 accumulators
            hmma_1688_f32_latency: 26, // assumed: 8 more than on a T4, as the issue takes 8 clk more
            dram_gb_per_s: 493.0,      // 616 GB/s (TWP), 0.8 of it attained: assumed, near V100's 0.83 (Jia18)
            l2_bytes: 11 << 19,        // 5.5 MB (TWP)
            ..Machine::t4()
        }
    }

    /// Titan RTX: a T4's SM, with f32 accumulation at the full rate (TWP: 130.5 TFLOP/s).
    pub fn titanrtx() -> Machine {
        Machine {
            name: "titanrtx".into(),
            clock_mhz: 1770.0,    // boost (TWP)
            sms: 72,              // (TWP)
            dram_gb_per_s: 538.0, // 672 GB/s (TWP), 0.8 of it attained: assumed, as of the RTX 2080 Ti
            l2_bytes: 6 << 20,    // (TWP)
            ..Machine::t4()
        }
    }

    /// Sets the constant `name` to a value given as JSON text: `set("icache", "false")`.
    ///
    /// # Errors
    /// Unknown name, or a value of the wrong type. The text says what was expected: the caller writes "expected" before it.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let fail = |e: serde_json::Error| Error::from(format!("a value of {name} as JSON ({e})"));
        let mut all = serde_json::to_value(&*self).map_err(fail)?;
        let names = || all.as_object().map(|all| all.keys().map(String::as_str).collect::<Vec<_>>().join(", ")).unwrap_or_default();
        if all.get(name).is_none() {
            return Err(format!("a machine constant: {}", names()).into());
        }
        let slot = &mut all[name];
        *slot = serde_json::from_str(value).map_err(fail)?;
        *self = serde_json::from_value(all).map_err(fail)?;
        Ok(())
    }

    /// Returns one SM's share of the DRAM rate in bytes per cycle, where all SMs are equally busy.
    pub(crate) fn dram_bytes_per_clk(&self) -> f64 {
        self.dram_gb_per_s * 1e3 / (f64::from(self.sms) * self.clock_mhz)
    }

    /// Returns an error for constants that the model cannot work with.
    pub fn check(&self) -> Result<()> {
        let minima = [
            ("clock_mhz", self.clock_mhz, f64::MIN_POSITIVE),
            ("sms", self.sms.into(), 1.0),
            ("subs", self.subs.into(), 1.0),
            ("reg_gran", self.reg_gran.into(), 1.0),
            ("smem_gran", self.smem_gran.into(), 1.0),
            ("l1_smem_total", self.l1_smem_total.into(), self.smem_per_sm.into()),
            ("mio_queue", self.mio_queue as f64, 1.0),
            ("l0_bytes", self.l0_bytes.into(), 128.0),
        ];
        let latencies = [
            ("lds_latency", self.lds_latency),
            ("shfl_latency", self.shfl_latency),
            ("movm_latency", self.movm_latency),
            ("ldc_latency", self.ldc_latency),
            ("l1_latency", self.l1_latency),
            ("l2_latency", self.l2_latency),
            ("dram_latency", self.dram_latency),
        ];
        // timing/memory.rs subtracts mio_delay from these, so they must not be less
        let latencies = latencies.iter().map(|&(name, x)| (name, x as f64, self.mio_delay as f64));
        if let Some((name, x, min)) = minima.into_iter().chain(latencies).find(|&(_, x, min)| x.is_nan() || x < min) {
            return Err(format!("machine constant {name} is {x}, but at least {min} is needed").into());
        }
        // the model and the plans for a GPU have memory for each of these
        let maxima =
            [("sms", self.sms, 1024), ("subs", self.subs, 64), ("max_warps", self.max_warps, 1024), ("max_ctas", self.max_ctas, 1024)];
        match maxima.into_iter().find(|&(_, n, max)| n > max) {
            Some((name, n, max)) => Err(format!("machine constant {name} is {n}, but at most {max} is possible").into()),
            None => Ok(()),
        }
    }

    /// Resident CTAs per SM of a kernel with `regs` registers per thread, `smem` bytes of shared memory and `threads` threads per CTA.
    pub fn occupancy(&self, regs: u32, smem: u32, threads: u32) -> Occupancy {
        let warps = threads.div_ceil(32).max(1);
        let per_warp = (regs.max(1) * 32).div_ceil(self.reg_gran) * self.reg_gran;
        // warps are allocated per sub-partition, which owns a quarter of the registers
        let warps_by_regs = (self.regs_per_sm / self.subs / per_warp) * self.subs;
        let by_regs = warps_by_regs / warps;
        let s = smem.div_ceil(self.smem_gran) * self.smem_gran;
        let by_smem = self.smem_per_sm.checked_div(s).unwrap_or(self.max_ctas);
        let by_warps = self.max_warps / warps;
        let ctas = by_regs.min(by_smem).min(by_warps).min(self.max_ctas);
        let limit = if ctas == by_regs {
            "registers"
        } else if ctas == by_smem {
            "shared memory"
        } else if ctas == by_warps {
            "warps"
        } else {
            "CTA slots"
        };
        Occupancy { ctas, warps: ctas * warps, limit, by_regs, by_smem, by_warps }
    }
}

/// Returns the lanes of 128 bytes, which an access of `bytes` per lane takes together: 32 lanes, 16 with 8 bytes each, or 8 with 16.
pub(crate) fn lanes_per_group(bytes: u32) -> usize {
    (128 / bytes as usize).min(32)
}

/// Returns the values in ascending order, each once.
pub(crate) fn sorted_set(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut found: Vec<u64> = values.collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Shared-memory wavefronts of one warp access of `bytes` per lane (32 banks of 4 bytes). 32-bit and narrower: all lanes together;
/// 64-bit: half-warps; 128-bit: quarter-warps. Inside a group, lanes that read the same word share it.
pub(crate) fn smem_wavefronts(addr: &[u64; 32], mask: u32, bytes: u32) -> u32 {
    let group = lanes_per_group(bytes);
    let of_group = |g: usize| {
        let lanes = (g * group..(g + 1) * group).filter(|l| mask >> l & 1 != 0);
        let words = sorted_set(lanes.flat_map(|l| (0..(bytes / 4).max(1) as u64).map(move |k| addr[l] / 4 + k)));
        let mut per_bank = [0; 32];
        words.iter().for_each(|w| per_bank[(w & 31) as usize] += 1);
        per_bank.into_iter().max().unwrap_or(0)
    };
    (0..32 / group).map(of_group).sum::<u32>().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    /// Wavefronts of an access of `bytes` per lane, at address `f(lane)`.
    fn w(f: impl Fn(u64) -> u64, bytes: u32) -> u32 {
        smem_wavefronts(&std::array::from_fn(|l| f(l as u64)), !0, bytes)
    }
    #[test]
    fn bank_conflicts_take_more_wavefronts() {
        assert_eq!(w(|l| l * 4, 4), 1);
        assert_eq!(w(|_| 64, 4), 1);
        assert_eq!(w(|l| l * 8, 4), 2);
        assert_eq!(w(|l| l * 128, 4), 32);
        assert_eq!(w(|l| l * 132, 4), 1);
        assert_eq!(w(|l| l * 8, 8), 2);
        assert_eq!(w(|l| l * 16, 16), 4);
        assert_eq!(w(|l| l * 256, 16), 32);
        assert_eq!(w(|_| 0, 16), 4);
        assert_eq!(w(|l| l * 2, 2), 1);
    }
    #[test]
    fn registers_and_shared_memory_limit_occupancy() {
        let m = Machine::default();
        assert_eq!(m.occupancy(128, 0, 128).ctas, 4);
        assert_eq!(m.occupancy(32, 49152, 256).ctas, 2);
        assert_eq!(m.occupancy(168, 0, 128).ctas, 3);
        assert_eq!(m.occupancy(255, 0, 256).ctas, 1);
    }
}
