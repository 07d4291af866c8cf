//! Tests that simulated cycles are within 5% of those that real cards take, on the prebuilt probes of fixtures/probe.cu: kernels that time
//! 32 dependent steps by the clock register. The measured figures here are cycles of one step, from the sources in
//! benchmarks/validation.csv. Also tests what generic loads read, and the constants of one card. Needs nvdisasm (`$VOLTA_SIM_NVDISASM` or
//! `PATH`).

use std::sync::LazyLock;
use volta_sim::{Extent, Launch, Machine, Module, Schedule, TimingOptions};

static SM70: LazyLock<Module> = LazyLock::new(|| load(include_bytes!("fixtures/probe_sm70.cubin")));
static SM75: LazyLock<Module> = LazyLock::new(|| load(include_bytes!("fixtures/probe_sm75.cubin")));

/// Calls `f` with a launch of one warp on a probe's two buffers: words, zeros at first, and the result. Returns the words too.
fn launch<T>(f: impl FnOnce(&Launch) -> T) -> (T, Vec<u32>) {
    let mut buffers = [vec![0u32; 64], vec![0u32; 64]];
    let params: Vec<u8> = buffers.iter().flat_map(|b| (b.as_ptr() as u64).to_le_bytes()).collect();
    // `exchanged`: other CTAs wrote it just before
    let extent = |b: &mut Vec<u32>| Extent { name: "probe", ptr: b.as_mut_ptr().cast(), len: 256, read_only: false, exchanged: false };
    let extents = buffers.each_mut().map(extent);
    let found = f(&Launch { grid: [1, 1, 1], block: [32, 1, 1], dynamic_smem: 0, params: &params, extents: &extents });
    let [words, _] = buffers;
    (found, words)
}

fn load(cubin: &[u8]) -> Module {
    Module::load(cubin).unwrap_or_else(|e| panic!("cannot load the probes: {e}\nthese tests need nvdisasm: set VOLTA_SIM_NVDISASM"))
}

/// Cycles between the two reads of the clock, with a perfect instruction cache. `gpu`: a name of [`Machine::names`].
fn cycles(module: &Module, gpu: &str, kernel: &str) -> f64 {
    let machine = Machine { icache: false, ..Machine::named(gpu).unwrap() };
    // SAFETY: the extents live in launch().
    let (report, _) = launch(|l| unsafe { module.time(kernel, l, &TimingOptions { machine, ..Default::default() }) });
    report.unwrap().timing.clocked_cycles.unwrap() as f64
}

fn assert_near(what: &str, found: f64, measured: f64) {
    assert!((found / measured - 1.0).abs() < 0.05, "{what}: {found:.2} cycles simulated, {measured:.2} measured");
}

/// An HMMA (matrix product of halves) does not wait for the accumulators of the HMMA before it; other instructions do. A step of the chain
/// takes 8.66 cycles. With an FADD between, it takes longer by at least the difference of the two latencies, less a tolerance of 4 cycles.
#[test]
fn accumulators_are_forwarded_to_the_next_hmma() {
    assert_eq!(cycles(&SM70, "v100", "hmma_chain"), 277.0); // 32 x 8.656: the measured cycles
    assert_near("four chains of m8n8k4", cycles(&SM70, "v100", "hmma_chains") / 128.0, 8.383);
    let machine = Machine::default(); // a V100
    let waiting = cycles(&SM70, "v100", "hmma_fadd_chain") / 32.0 - 8.66;
    assert!(waiting > (machine.hmma_latency - machine.hmma_forward) as f64 - 4.0, "{waiting} cycles for FADD");
}

#[test]
fn shared_memory_takes_the_measured_cycles() {
    assert_near("dependent LDS", cycles(&SM70, "v100", "lds_chain") / 32.0, 26.44);
    assert_near("STS, LDS and a warp's barrier", cycles(&SM70, "v100", "shared_roundtrip") / 32.0, 33.56);
}

/// L1 serves neither `ld.global.cg` nor volatile loads: both take L2's latency.
#[test]
fn strong_loads_go_to_l2() {
    assert_near("dependent LDG.STRONG.GPU", cycles(&SM70, "v100", "ldcg_chain") / 32.0, 210.69);
    assert_near("dependent LDG.STRONG.SYS", cycles(&SM70, "v100", "volatile_chain") / 32.0, 210.69);
}

#[test]
fn turing_takes_the_measured_cycles() {
    assert_near("dependent HMMA.1688.F16", cycles(&SM75, "t4", "hmma_f16_chain") / 32.0, 14.0);
    assert_near("dependent LDG.STRONG, L2 hit", cycles(&SM75, "t4", "ldcg_chain") / 32.0, 236.0);
}

/// Generic addresses reach shared memory, in its time.
#[test]
fn generic_loads_reach_shared_memory() {
    for (module, gpu) in [(&SM70, "v100"), (&SM75, "t4")] {
        assert_near("dependent LD of shared memory", cycles(module, gpu, "generic_chain"), cycles(module, gpu, "lds_chain"));
        // SAFETY: the extents live in launch().
        let (ran, words) = launch(|l| unsafe { module.run("generic_chain", l, &Schedule::default()) });
        ran.unwrap();
        // each lane's link is to itself
        assert_eq!(words[..32], (0..32).collect::<Vec<u32>>());
    }
}

/// The Tesla PG503 is a GV100 with 72 SMs. Per SM and cycle it has 1.63 times the DRAM bytes of a V100, and 1.78 times at 1200 MHz.
#[test]
fn pg503_differs_from_v100_in_sms_clock_and_memory() {
    // DRAM GB/s of an SM, per MHz
    let rate = |m: &Machine| m.dram_gb_per_s / f64::from(m.sms) / m.clock_mhz;
    let (v100, mut pg503) = (Machine::named("v100").unwrap(), Machine::named("pg503").unwrap());
    assert_eq!((pg503.sms, pg503.clock_mhz), (72, 1312.0));
    assert!(rate(&pg503) / rate(&v100) > 1.6);
    pg503.set("clock_mhz", "1200").unwrap();
    assert!(rate(&pg503) / rate(&v100) > 1.7);
}
