//! Tests the library's interface (`Module::run`, `Module::time`): results, errors, that timing writes nothing, and prefetches. Runs the
//! prebuilt kernels of fixtures/saxpy.cu and prefetch.cu. Needs nvdisasm (`$VOLTA_SIM_NVDISASM` or `PATH`).

use std::sync::LazyLock;
use volta_sim::{Dispatch, Extent, Launch, Machine, Module, Schedule, TimingOptions};

static MODULE: LazyLock<Module> = LazyLock::new(|| {
    Module::load(include_bytes!("fixtures/saxpy.cubin"))
        .unwrap_or_else(|e| panic!("cannot load the test kernels: {e}\nthese tests need nvdisasm: set VOLTA_SIM_NVDISASM"))
});

/// Elements of the vectors, and the factor of y = A x + y.
const N: usize = 1000;
const A: f32 = 0.5;
/// Their indices in [`Data::extents`].
const X: usize = 1;
const Y: usize = 3;

/// The vectors of a launch, which are separate allocations. `params` is the kernels' struct, with `n` as its last field.
struct Data {
    x: Vec<f32>,
    y: Vec<f32>,
}

impl Data {
    fn new() -> Self {
        Data { x: (0..N).map(|i| i as f32).collect(), y: (0..N).map(|i| 1.0 - i as f32).collect() }
    }
    fn params(&self, n: usize) -> Vec<u8> {
        let mut p: Vec<u8> = [&self.x, &self.y].into_iter().flat_map(|v| (v.as_ptr() as u64).to_le_bytes()).collect();
        p.extend(A.to_le_bytes());
        p.extend((n as i32).to_le_bytes());
        p
    }
    /// The memory that a kernel may access, and two extents that are ignored. `exchanged` matters for times only.
    fn extents(&mut self) -> [Extent<'static>; 4] {
        let nothing = Extent { name: "null", ptr: std::ptr::null_mut(), len: 64, read_only: false, exchanged: false };
        [
            nothing,
            Extent { name: "x", ptr: self.x.as_mut_ptr().cast(), len: 4 * N, read_only: true, exchanged: false },
            Extent { name: "empty", ptr: self.y.as_mut_ptr().cast(), len: 0, read_only: false, exchanged: false },
            Extent { name: "y", ptr: self.y.as_mut_ptr().cast(), len: 4 * N, read_only: false, exchanged: false },
        ]
    }
    fn expected(&self) -> Vec<f32> {
        self.x.iter().zip(&self.y).map(|(x, y)| A.mul_add(*x, *y)).collect()
    }
}

fn launch<'a>(params: &'a [u8], extents: &'a [Extent<'a>]) -> Launch<'a> {
    Launch { grid: [3, 1, 1], block: [128, 1, 1], dynamic_smem: 0, params, extents }
}

/// Returns the number of executed warp instructions, or the error.
fn run(kernel: &str, l: &Launch, schedule: &Schedule) -> Result<u64, String> {
    // SAFETY: the extents belong to the calling test, which waits.
    unsafe { MODULE.run(kernel, l, schedule) }.map(|f| f.warp_insts).map_err(|e| e.to_string())
}

fn assert_error(result: Result<u64, String>, parts: &[&str]) {
    let e = result.expect_err("an error was expected");
    for p in parts {
        assert!(e.contains(p), "`{p}` is missing in: {e}");
    }
}

#[test]
fn results_do_not_depend_on_the_schedule() {
    for (quantum, threads) in [(20_000, 1), (20_000, 3), (1, 1), (1, 2)] {
        let mut d = Data::new();
        let expected = d.expected();
        let (params, extents) = (d.params(N), d.extents());
        let insts = run("saxpy", &launch(&params, &extents), &Schedule { quantum, threads }).unwrap();
        assert!(insts > 12 * 20); // 12 warps
        assert_eq!(d.y, expected, "quantum {quantum}, {threads} threads");
    }
}

#[test]
fn atomics_of_several_host_threads_add_up() {
    let mut d = Data::new();
    d.y[0] = 0.0;
    let (params, extents) = (d.params(N), d.extents());
    let l = Launch { grid: [16, 2, 1], block: [64, 1, 1], dynamic_smem: 0, params: &params, extents: &extents };
    run("count", &l, &Schedule { quantum: 20_000, threads: 4 }).unwrap();
    assert_eq!(d.y[0], A * (32 * 64) as f32);
}

#[test]
fn rejects_accesses_outside_every_extent() {
    let mut d = Data::new();
    let (params, mut extents) = (d.params(N), d.extents());
    extents[Y].len -= 8; // bytes: two elements
    let at = format!("address {:#x} (4 bytes)", d.y.as_ptr() as u64 + 4 * N as u64 - 8);
    let l = Launch { grid: [8, 1, 1], ..launch(&params, &extents) };
    let where_ = ["CTA (7,0,0)", "warp 3 lane 6", &at, "nearest buffer `y`"];
    let s = Schedule { quantum: 20_000, threads: 1 };
    assert_error(run("fill", &l, &s), &[&where_[..], &["kernel `fill`: global store outside every buffer at pc 0x", "STG"]].concat());
    assert_eq!((d.y[N - 3], d.y[N - 2]), (A, 1.0 - (N - 2) as f32));
    extents[X].len = 0;
    let l = launch(&params, &extents);
    assert_error(run("saxpy", &l, &s), &["kernel `saxpy`: global load outside every buffer at pc 0x", "LDG"]);
}

#[test]
fn rejects_stores_to_a_read_only_extent() {
    let mut d = Data::new();
    let before = d.y.clone();
    let (params, mut extents) = (d.params(N), d.extents());
    extents[Y].read_only = true;
    let result = run("saxpy", &launch(&params, &extents), &Schedule::default());
    let at = format!("{:#x}", d.y.as_ptr() as u64);
    let parts = ["kernel `saxpy`: global store to a read-only buffer at pc 0x", "STG", "warp ", "lane ", "nearest buffer `y`", "read-only"];
    assert_error(result, &parts);
    assert!(d.y == before);
    let result = run("count", &launch(&params, &extents), &Schedule::default());
    assert_error(result, &["global atomic to a read-only buffer", &at]);
    // SAFETY: the extents belong to this test.
    let timed = unsafe { MODULE.time("saxpy", &launch(&params, &extents), &TimingOptions::default()) };
    assert_error(timed.map(|_| 0).map_err(|e| e.to_string()), &["global store to a read-only buffer"]);
    assert!(d.y == before);
}

#[test]
fn rejects_launches_that_do_not_fit_the_kernel() {
    let mut d = Data::new();
    let (params, extents) = (d.params(N), d.extents());
    let l = launch(&params, &extents);
    let s = Schedule::default();
    assert_error(run("saxpy", &Launch { params: &params[1..], ..l }, &s), &["parameter 0 of `saxpy` has 24 bytes, 23 given"]);
    assert_error(run("two", &l, &s), &["takes 2 parameters, 1 given"]);
    assert_error(run("sgemm", &l, &s), &["kernel `sgemm` not found", "saxpy", "count"]);
    assert_error(run("", &l, &s), &["not unique"]);
    assert_error(run("saxpy", &Launch { block: [256, 1, 1], ..l }, &s), &["takes 1 to 128 threads"]);
    assert_error(run("saxpy", &Launch { block: [0, 1, 1], ..l }, &s), &["takes 1 to 128 threads"]);
    assert_error(run("saxpy", &Launch { grid: [0, 1, 1], ..l }, &s), &["grid"]);
    assert_error(run("saxpy", &Launch { grid: [1 << 20, 1 << 20, 1], ..l }, &s), &["grid"]);
    assert_error(run("saxpy", &Launch { dynamic_smem: u32::MAX, ..l }, &s), &["shared memory"]);
    let cubin = include_bytes!("fixtures/saxpy.cubin");
    for bad in [&b""[..], b"\x7fELF", &cubin[..200], &cubin[..cubin.len() - 1], &[0; 4096]] {
        assert!(Module::load(bad).is_err());
    }
    let no_tool = Module::load_with(cubin, Some("/nonexistent/nvdisasm".as_ref()));
    assert!(no_tool.err().is_some_and(|e| e.to_string().contains("/nonexistent/nvdisasm")));
}

#[test]
fn describes_kernels_without_running_them() {
    let m = &*MODULE;
    let mut names: Vec<&str> = m.kernel_names().collect();
    names.sort_unstable();
    assert_eq!(names, ["count", "fill", "saxpy", "two"]);
    let k = m.kernel_info("saxpy").unwrap();
    assert_eq!((k.static_smem, k.param_bytes, k.max_threads, k.frame_bytes, k.spill_insts), (512, 24, 128, 0, 0));
    assert_eq!(k.params.iter().map(|p| (p.offset, p.size)).collect::<Vec<_>>(), [(0, 24)]);
    assert!((8..64).contains(&k.registers) && k.code_bytes >= 256 && k.code_bytes % 16 == 0);
    let sass = m.sass_text("saxpy").unwrap();
    assert!(sass.contains("BAR.SYNC") && sass.contains("FFMA") && !sass.contains("RED.E.ADD"), "{sass}");
    fn shared_between_threads<T: Send + Sync>(_: &T) {}
    shared_between_threads(m);
}

#[test]
fn timing_writes_no_memory() {
    let mut d = Data::new();
    let before = (d.x.clone(), d.y.clone());
    let (params, extents) = (d.params(N), d.extents());
    let l = launch(&params, &extents);
    // SAFETY: the extents belong to this test.
    let time = |o: &TimingOptions| unsafe { MODULE.time("saxpy", &l, o) }.unwrap();
    let r = time(&TimingOptions { flops: Some(2.0 * N as f64), annotate: true, ..Default::default() });
    assert!((d.x.clone(), d.y.clone()) == before);
    let t = &r.timing;
    // one CTA, 2 or 3 rounds of DRAM latency, plus the launch
    assert!((1_000..10_000).contains(&t.cycles), "{} cycles", t.cycles);
    assert!((t.kernel_us - t.kernel_cycles / 1530.0).abs() < 1e-9); // the V100's MHz
    assert!((t.tflops.unwrap() - 2e-6 * N as f64 / t.kernel_us).abs() < 1e-9);
    assert_eq!((t.ctas_of_sm, t.ctas_simulated, r.launch.occupancy.warps), (1, 1, 64));
    let h = t.hot_loop.as_ref().unwrap();
    assert_eq!(h.code_bytes, h.last_pc - h.first_pc + 16);
    assert!(h.smem_wavefronts >= 16 && h.smem_wavefronts <= t.counters.smem_wavefronts);
    assert_eq!((h.smem_conflict_excess, t.smem_conflict_excess), (0.0, 0.0));
    assert!(t.util["fma"] > 0.0 && t.util["tensor"] == 0.0 && t.stall_fraction["long_scoreboard"] > 0.1);
    assert!(t.listing.as_ref().unwrap().contains("STG"));

    let machine = Machine { icache: false, ..Machine::default() };
    let ideal = time(&TimingOptions { machine, dispatch: Dispatch::Static, ..Default::default() });
    assert!(ideal.timing.cycles < t.cycles && ideal.timing.counters.l0_fills == 0);

    // and the launch still computes what it should
    let expected = d.expected();
    run("saxpy", &l, &Schedule::default()).unwrap();
    assert_eq!(d.y, expected);
}

#[test]
fn rejects_wrong_timing_options() {
    let mut d = Data::new();
    let (params, extents) = (d.params(N), d.extents());
    let l = launch(&params, &extents);
    // SAFETY: the extents belong to this test.
    let error = |o: TimingOptions| unsafe { MODULE.time("saxpy", &l, &o) }.expect_err("an error was expected").to_string();
    // a V100 has SMs 0 to 79
    assert!(error(TimingOptions { sm: Some(80), ..Default::default() }).contains("SM 80 of 80"));
    let mut machine = Machine::default();
    let unknown = machine.set("no_such", "1").unwrap_err().to_string();
    assert!(unknown.starts_with("a machine constant: ") && unknown.contains(", icache, "), "{unknown}");
    assert!(machine.set("sms", "\"many\"").is_err());
    machine.set("sms", "0").unwrap();
    assert!(error(TimingOptions { machine, ..Default::default() }).contains("sms"));
}

/// SMs whose CTAs have no work leave their bandwidth to the others, as far as an SM's port goes.
#[test]
fn busy_sms_share_the_bandwidth() {
    const SMS: usize = 80; // a V100's
    let mut d = Data { x: vec![1.0; 128 * SMS], y: vec![1.0; 128 * SMS] };
    let extent = |name, v: &mut Vec<f32>| Extent { name, ptr: v.as_mut_ptr().cast(), len: 4 * v.len(), read_only: false, exchanged: false };
    let extents = [extent("x", &mut d.x), extent("y", &mut d.y)];
    // cycles that a sector takes of the SM's L2 and DRAM bandwidth if `busy` CTAs of `ctas` have elements
    let cycles = |ctas: u32, busy: usize| {
        let params = d.params(128 * busy);
        let l = Launch { grid: [ctas, 1, 1], ..launch(&params, &extents) };
        // SAFETY: the extents belong to this test.
        let timing = unsafe { MODULE.time("saxpy", &l, &TimingOptions::default()) }.unwrap().timing;
        let c = timing.counters;
        [c.l2_busy / (c.l2_sectors + c.store_sectors) as f64, c.dram_busy / c.dram_sectors as f64]
    };
    let m = Machine::default();
    let (l2, dram) = (32.0 / m.l2_bytes_per_clk, 32.0 * m.clock_mhz * SMS as f64 / (1e3 * m.dram_gb_per_s)); // where all SMs are busy
    let near = |found: [f64; 2], share: f64| {
        assert!((found[0] - l2 / share).abs() + (found[1] - dram / share).abs() < 1e-6, "{found:?}, {l2}, {dram}, {share}");
    };
    near(cycles(80, 80), 1.0);
    near(cycles(80, 64), 1.25);
    let most = m.l2_port_bytes_per_clk / m.l2_bytes_per_clk;
    near(cycles(80, 8), most);
    near(cycles(8, 8), most);
}

/// A prefetch into L2 takes no time of the warp. A load right after it saves nothing; a load after DRAM's latency takes L2's alone.
#[test]
fn prefetched_sectors_arrive_when_dram_is_done() {
    let module = Module::load(include_bytes!("fixtures/prefetch.cubin")).unwrap();
    let mut d = Data::new();
    let extents = d.extents();
    let cycles = |kernel: &str, operations: usize| {
        let params = d.params(operations);
        let l = Launch { grid: [1, 1, 1], block: [32, 1, 1], dynamic_smem: 0, params: &params, extents: &extents };
        let machine = Machine { icache: false, ..Machine::default() };
        // SAFETY: the extents belong to this test.
        unsafe { module.time(kernel, &l, &TimingOptions { machine, ..Default::default() }) }.unwrap().timing.cycles as i64
    };
    let saved = |operations| cycles("loaded", operations) - cycles("prefetched", operations);
    let m = Machine::default();
    let full = (m.dram_latency - m.l2_latency) as i64;
    // up to 60 cycles for the barrier between the prefetch and the load
    assert!((0..=60).contains(&saved(0)), "at once: {}", saved(0));
    assert!((full - 40..=full).contains(&saved(400)), "after a wait: {}", saved(400));
}
