//! Compares the planner's choices for 2400 random problems with tests/golden/plans.txt, so that a refactoring changes none of them.
//!
//! The planner chooses kernels, grids and scratch memory of a call. A group is 100 problems of one call and one kind of tuning (a GPU's
//! measured choices and failed kernels). The file has a hash of each group's plans, and its first plan as text. After an intended change,
//! `VOLTA_FA_WRITE_GOLDEN=1 cargo test --release --features sim --test plan_choices` writes the file; the commit explains it.

use std::collections::BTreeMap;
use volta_fa::kernels::{variants, CacheFormat, Pass, Variant, COMPILED};
use volta_fa::plan::{self, BackwardMode, BackwardPlan, DeviceLimits, PlannedKernel};
use volta_fa::problem::{Attention, Cache, CacheLayout, DType, Keys, Queries, RequestedFeatures, ScoreFunction, Window};
use volta_fa::tuning::Tuning;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/plans.txt");
/// 100 for each of the 8 calls and 3 kinds of tuning.
const PROBLEMS: u64 = 2400;
const HEADER: &str = "\
# Plans of random problems, which tests/plan_choices.rs writes and compares. A group is a call with a kind of tuning. Its line has
# the FNV-1a hash of all its plans. Then its first problem: GPU, sizes (queries by keys), window left/right (-: none), features.
# Then that plan: kernel, [grid], reason (src/plan/kernel.rs); of a stream-K kernel the tiles, iterations and splits. Last numbers:
#   backward: main_launches dq_accum_splits scratch_rows headdim_rounded deterministic tail stored (BackwardPlan)
#   decode: max_rows partials semaphores (DecodePlan)
";
/// Kinds of calls. fp32: in full precision (each number is split into two fp16 ones). fast: the forward pass with int8 scores.
const CALLS: [&str; 8] = ["forward", "forward fp32", "fast", "prefill", "decode", "backward", "backward fp32", "deterministic backward"];
const TUNINGS: [&str; 3] = ["no tuning", "failed kernels", "tuned kernels"];

/// The random number generator SplitMix64.
struct Random(u64);

impl Random {
    /// Returns a number from 0 to n - 1.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns an element of the list.
    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// Returns a number from 1 to 2^bits, small ones as often as large ones. Half are powers of two.
    fn length(&mut self, bits: u64) -> i64 {
        let power = 1 << self.below(bits + 1);
        let length = if self.one_in(2) { power } else { self.below(power) + 1 };
        length as i64
    }

    /// Returns a length up to 16 Ki: half of them multiples of 16.
    fn seqlen(&mut self) -> i64 {
        16 * self.length(10) - self.below(2) as i64 * self.below(16) as i64
    }

    fn headdim(&mut self) -> i64 {
        match self.below(4) {
            0 => 8 * (1 + self.below(32) as i64),
            1 => 8 * (1 + self.below(64) as i64),
            _ => self.of(&[32, 64, 96, 128, 192, 256]),
        }
    }

    fn features(&mut self) -> RequestedFeatures {
        let mut f = RequestedFeatures { sinks: self.one_in(8), seqused_k: self.one_in(8), ..RequestedFeatures::default() };
        for _ in 0..self.of(&[0, 0, 1, 1, 2]) {
            match self.below(5) {
                0 => f.alibi = true,
                1 => f.score_function = Some(ScoreFunction::Softcap(30.0)),
                2 => (f.attn_bias, f.fp32_bias) = (true, self.one_in(2)),
                3 => f.dropout_p = 0.1,
                _ => f.block_mask = true,
            }
        }
        f
    }

    /// Returns a problem that the call can have.
    fn problem(&mut self, call: &str) -> Attention {
        let (nheads_k, group) = (self.length(6), self.length(4)); // group: query heads per KV head, not a Group of plans
        let headdim = self.headdim();
        let seqlen_q = self.seqlen();
        let same_length = self.one_in(2);
        let mut a = Attention {
            batch: self.length(5),
            seqlen_q,
            seqlen_k: if same_length { seqlen_q } else { self.seqlen() },
            nheads: nheads_k * group,
            nheads_k,
            headdim,
            headdim_v: if self.one_in(6) { self.headdim() } else { headdim },
            softmax_scale: 0.125,
            window: match self.below(5) {
                0 | 1 => Window::FULL,
                2 | 3 => Window::CAUSAL,
                _ => Window { left: Some(self.length(12)), right: self.of(&[Some(0), Some(64)]) },
            },
            features: self.features(),
            ..Attention::default()
        };
        match call {
            "prefill" => {
                let RequestedFeatures { alibi, sinks, score_function, .. } = a.features;
                a.features = RequestedFeatures { alibi, sinks, score_function, ..Default::default() };
                a.keys = Keys::Cache(self.cache(&a, CacheFormat::Unquantized));
            }
            "decode" => {
                let (seqlen_q, dtype) = (self.length(4), self.of(&[DType::Half, DType::BFloat16]));
                let features = RequestedFeatures { tree: self.one_in(4), ..Default::default() };
                a = Attention { seqlen_q, dtype, features, ..a };
                let quantized: Vec<_> = CacheFormat::quantized().collect();
                let format = if self.one_in(2) { CacheFormat::Unquantized } else { self.of(&quantized) };
                let cache = self.cache(&a, format);
                a.keys = Keys::Cache(cache);
                if format.is_quantized() {
                    (a.headdim, a.headdim_v, a.features.tree) = (128, 128, false);
                }
                if self.one_in(6) && format.info().of_latents {
                    let latents = Attention { nheads_k: 1, nheads: 8 * group, headdim: 576, headdim_v: 512, ..a };
                    a = Attention { keys: Keys::Latents(cache), features: Default::default(), ..latents };
                }
            }
            "fast" => {
                a.features = RequestedFeatures { attn_bias: self.one_in(3), ..Default::default() };
                (a.headdim, a.headdim_v) = (a.headdim.min(256), a.headdim_v.min(256));
            }
            _ => {}
        }
        if a.cache().is_none() && self.one_in(4) {
            let total = |longest: i64, batch: i64| longest + (batch - 1) * (longest / 2);
            a.queries = Queries::Packed { total: total(a.seqlen_q, a.batch) };
            a.keys = Keys::Packed { total: total(a.seqlen_k, a.batch) };
        }
        a
    }

    fn cache(&self, a: &Attention, format: CacheFormat) -> Cache {
        Cache { layout: CacheLayout::Entries, entries: a.batch, rows: a.seqlen_k, format }
    }

    /// Returns a V100, T4, RTX 2080 Ti, H200 or RTX 3090, some with other numbers of SMs, less shared memory, or one family alone.
    fn device(&mut self) -> DeviceLimits {
        let (capability, sms, kib) = self.of(&[((7, 0), 80, 96), ((7, 5), 40, 64), ((7, 5), 68, 64), ((9, 0), 132, 227), ((8, 6), 82, 99)]);
        let sms = if self.one_in(3) { 1 + self.below(140) as u32 } else { sms };
        let kib = if self.one_in(10) { 48 } else { kib };
        let d = DeviceLimits { capability, sms, shared_bytes_per_block: kib * 1024, only: None, tuning: None };
        let families: Vec<_> = plan::families(*COMPILED, &d).unwrap();
        DeviceLimits { only: self.one_in(5).then(|| self.of(&families).0), ..d }
    }

    /// Returns a tuning in which some of the `planned` and of all kernels failed. "tuned kernels": fewer failed, and up to 5 choices.
    fn tuning(&mut self, kind: &str, planned: &[&'static Variant], a: &Attention) -> Option<&'static Tuning> {
        if kind == "no tuning" {
            return None;
        }
        let share = if kind == "failed kernels" { 2 } else { 12 };
        let mut failed: Vec<_> = planned.iter().filter(|_| self.one_in(share)).map(|v| v.name).collect();
        failed.extend(variants().filter(|_| self.one_in(12 * share)).map(|v| v.name));
        let mut choices: Vec<String> = Vec::new();
        if kind == "tuned kernels" {
            for _ in 0..4 {
                let mut passes: Vec<_> = planned.iter().map(|v| v.pass).collect();
                passes.extend([Pass::ForwardStreamK, Pass::PrefillStreamK, Pass::FastForward]);
                passes.extend([Pass::Backward, Pass::BackwardStreamK, Pass::BackwardFused]);
                passes.extend([Pass::BackwardDkDv, Pass::BackwardDq, Pass::BackwardScores]);
                let pass = self.of(&passes);
                let fits = |v: &&Variant| v.pass == pass && i64::from(v.headdim) >= a.headdim && i64::from(v.headdim_v) >= a.headdim_v;
                let fitting: Vec<_> = variants().filter(fits).collect();
                if !fitting.is_empty() {
                    let v = self.of(&fitting);
                    choices.push(format!(r#"{{"pass": "{pass:?}", "headdim": [{}, {}], "variant": "{}"}}"#, a.headdim, a.headdim, v.name));
                }
            }
            if self.one_in(4) {
                choices.push(r#"{"pass": "Backward", "deterministic": true}"#.into());
            }
        }
        let failed: Vec<_> = failed.iter().map(|name| format!("\"{name}\"")).collect();
        let text = format!(r#"{{"format": 1, "failed": [{}], "choices": [{}]}}"#, failed.join(", "), choices.join(", "));
        Some(Box::leak(Box::new(Tuning::parse(&text, *COMPILED).unwrap())))
    }
}

/// A plan as text, and its kernels.
type Planned = (String, Vec<PlannedKernel>);

/// Returns the plan's numbers as text, and its kernels.
fn of_backward(plan: BackwardPlan) -> Planned {
    let BackwardPlan { main_launches, dq_accum_splits, scratch_rows, headdim_rounded, deterministic, tail, stored, .. } = plan;
    let tail = tail.map(|tail| tail.first_block);
    let numbers = format!("{main_launches} {dq_accum_splits} {scratch_rows} {headdim_rounded} {deterministic} {tail:?} {stored:?}");
    (numbers, plan.kernels().collect())
}

/// Returns the plan of a call, or its error, as text, and its kernels: each with grid, reason and stream-K numbers, then other numbers.
/// `flag` is the boolean argument of plan::fast (keys and values are prepared) or plan::decode (prefill computes long sequences).
fn planned(call: &str, a: &Attention, (has_dlse, fp32_gradients, flag): (bool, bool, bool), d: &DeviceLimits) -> Planned {
    let one = |k: PlannedKernel| (String::new(), vec![k]);
    let split = call == "backward fp32";
    let mode = BackwardMode { deterministic: call == "deterministic backward", fp32_gradients: fp32_gradients || split, has_dlse, split };
    let found = match call {
        "forward" => plan::forward(a, d).map(one),
        "forward fp32" => plan::forward_split(a, d).map(one),
        "fast" => plan::fast(a, flag, d).map(|plan| (String::new(), plan.into_iter().flat_map(|p| [p.prepare, p.forward]).collect())),
        "prefill" => plan::prefill(a, d).map(one),
        "decode" => plan::decode(a, flag, d).map(|p| (format!("{} {} {}", p.max_rows, p.partials, p.semaphores), vec![p.kernel])),
        _ => plan::backward(a, mode, d).map(of_backward),
    };
    let (numbers, kernels) = found.unwrap_or_else(|e| (e.message, Vec::new()));
    let one = |k: &PlannedKernel| {
        let stream_k = k.stream_k.map_or(String::new(), |s| format!(" {} of {}, {} splits", s.stream_k_tiles, s.iterations, s.splits));
        // of a backward stream-K kernel: maximum steps of a split, and the first key block that may be split
        let backward = k.backward_stream_k.map_or(String::new(), |s| format!(" limit {} from {}", s.limit, s.first_split));
        format!("{} {:?} {:?}{stream_k}{backward}", k.variant.name, k.blocks, k.reason)
    };
    let text: Vec<_> = kernels.iter().map(one).chain([numbers]).filter(|text| !text.is_empty()).collect();
    (if text.is_empty() { "none".into() } else { text.join("; ") }, kernels)
}

/// Constants of the 64-bit FNV-1a hash.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// The plans of one call and one kind of tuning.
struct Group {
    plans: usize,
    /// FNV-1a hash of all plans' texts.
    hash: u64,
    /// The first problem and its plan, as lines.
    first: String,
}

fn described(a: &Attention, d: &DeviceLimits) -> String {
    let Attention { batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, window, .. } = a;
    let features = plan::features(a, BackwardMode::default()).iter().map(|feature| format!(", {}", feature.name()));
    let side = |bound: Option<i64>| bound.map_or("-".into(), |n| n.to_string());
    let device = format!("sm_{} {} SMs", d.sm(), d.sms);
    let heads = format!("heads {nheads}/{nheads_k}, headdim {headdim}/{headdim_v}, window {}/{}", side(window.left), side(window.right));
    format!("{device}: batch {batch}, {seqlen_q} by {seqlen_k}, {heads}{}", features.collect::<String>())
}

#[test]
fn choices_match_golden_file() {
    let mut groups: BTreeMap<(&str, &str), Group> = BTreeMap::new();
    for seed in 0..PROBLEMS {
        let (call, kind) = (CALLS[seed as usize % CALLS.len()], TUNINGS[seed as usize / CALLS.len() % TUNINGS.len()]);
        let mut random = Random(seed);
        let (a, d) = (random.problem(call).padded(), random.device());
        let flags = (random.one_in(4), random.one_in(3), random.one_in(3));
        let (_, usual) = planned(call, &a, flags, &d);
        let variants: Vec<_> = usual.iter().map(|k| k.variant).collect();
        let d = DeviceLimits { tuning: random.tuning(kind, &variants, &a), ..d };
        let (text, _) = planned(call, &a, flags, &d);
        let first = || Group { plans: 0, hash: FNV_OFFSET, first: format!("  {}\n    {text}\n", described(&a, &d)) };
        let group = groups.entry((call, kind)).or_insert_with(first);
        group.plans += 1;
        group.hash = text.bytes().fold(group.hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
    }
    let of_group = |((call, kind), Group { plans, hash, first }): (&(&str, &str), &Group)| {
        format!("{call}, {kind}: {plans} plans, hash {hash:016x}\n{first}")
    };
    let found = HEADER.to_string() + &groups.iter().map(of_group).collect::<String>();
    if std::env::var_os("VOLTA_FA_WRITE_GOLDEN").is_some() {
        std::fs::write(GOLDEN, &found).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    let wrong: Vec<_> = found.lines().filter(|line| !golden.lines().any(|l| l == *line)).collect();
    assert!(wrong.is_empty(), "not in {GOLDEN}:\n{}", wrong.join("\n"));
    assert_eq!(golden, found, "{GOLDEN} has other groups or another order");
}
