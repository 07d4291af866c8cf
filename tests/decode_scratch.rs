//! Tests, in the simulator, that a decode kernel's results do not depend on what its scratch memory held before the launch.
//!
//! Blocks that share a sequence write partial results (`partials`, fp32) and increment semaphores. The last block to arrive combines them.
//! A semaphore is `launch_id << 16 | blocks that arrived`: a value with another launch's id counts as 0, so memory needs no initialization.
//! The last block resets it to 0, because a replay of a CUDA graph has the same memory and id.
#![cfg(feature = "sim")]

use volta_fa::kernels::{image, CacheFormat};
use volta_fa::launch::bytes_of;
use volta_fa::params::{DecodeParams, Divisor, Operand, Output};
use volta_fa::plan::{self, DecodePlan, DeviceLimits};
use volta_fa::problem::{Attention, Cache, CacheLayout, Keys};
use volta_sim::{Extent, Launch, Module, Schedule};

const TOKENS: i64 = 3000;
const HEADS: i64 = 8;
const HEADDIM: i64 = 64;

/// Returns the bits of random fp16 numbers in [0.5, 1) and (-1, -0.5]: exponent bits of 0.5, random mantissa (10 bits) and sign. The
/// generator is Knuth's linear congruential one (MMIX).
fn numbers(count: i64, seed: u64) -> Vec<u16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = (state >> 40) as u16;
        0x3800 | (x & 0x3ff) | ((x & 0x400) << 5)
    };
    (0..count).map(|_| next()).collect()
}

/// One query of eight heads over a sequence of 3000 tokens, which many blocks share. Scratch memory stays from run to run.
struct Call {
    plan: DecodePlan,
    module: Module,
    q: Vec<u16>,
    k: Vec<u16>,
    v: Vec<u16>,
    partials: Vec<f32>,
    semaphores: Vec<u64>,
}

impl Call {
    fn new() -> Call {
        let a = attention();
        let plan = plan::decode(&a, false, &DeviceLimits::V100).unwrap(); // false: no sequence is left to a prefill kernel
        let module = Module::load(&image(plan.kernel.variant).cubin().unwrap()).unwrap();
        Call {
            module,
            q: numbers(HEADS * HEADDIM, 1),
            k: numbers(TOKENS * HEADDIM, 2),
            v: numbers(TOKENS * HEADDIM, 3),
            partials: vec![f32::NAN; plan.partials as usize],
            semaphores: vec![u64::MAX; plan.semaphores as usize],
            plan,
        }
    }

    /// Runs the call and returns the bits of out and softmax_lse. `quantum`: instructions that a warp executes before the next one runs.
    fn run(&mut self, launch_id: u64, quantum: u32) -> (Vec<u16>, Vec<u32>) {
        let (mut out, mut lse) = (vec![u16::MAX; self.q.len()], vec![u32::MAX; HEADS as usize]);
        // strides in elements
        let cache = |x: &[u16]| Operand { ptr: x.as_ptr(), batch_stride: TOKENS * HEADDIM, row_stride: HEADDIM, head_stride: HEADDIM };
        // SAFETY: numbers and pointers; null means absent.
        let mut p: DecodeParams = unsafe { std::mem::zeroed() };
        p.q = Operand { ptr: self.q.as_ptr(), batch_stride: HEADS * HEADDIM, row_stride: HEADS * HEADDIM, head_stride: HEADDIM };
        p.out = Output { ptr: out.as_mut_ptr(), batch_stride: HEADS * HEADDIM, row_stride: HEADS * HEADDIM, head_stride: HEADDIM };
        p.softmax_lse = lse.as_mut_ptr().cast();
        (p.cache.k, p.cache.v, p.cache.entries, p.cache.rows) = (cache(&self.k), cache(&self.v), 1, TOKENS as i32);
        p.problem = plan::problem_block(&attention(), 1); // of one batch entry
        p.group = Divisor::new(HEADS as i32); // all query heads share the one KV head
        p.max_rows = i32::MAX; // no sequence has too many query rows, which a prefill kernel would take
        (p.partials, p.semaphores, p.launch_id) = (self.partials.as_mut_ptr(), self.semaphores.as_mut_ptr(), launch_id);
        // exchanged (CTAs read what others of the launch wrote) matters for times alone
        let extent = |name, ptr: *mut u8, len, read_only| Extent { name, ptr, len, read_only, exchanged: false };
        let read = |name, x: &[u16]| extent(name, x.as_ptr() as *mut u8, size_of_val(x), true);
        let extents = [
            read("q", &self.q),
            read("k_cache", &self.k),
            read("v_cache", &self.v),
            extent("out", out.as_mut_ptr().cast(), size_of_val(&out[..]), false),
            extent("softmax_lse", lse.as_mut_ptr().cast(), size_of_val(&lse[..]), false),
            extent("partials", self.partials.as_mut_ptr().cast(), size_of_val(&self.partials[..]), false),
            extent("semaphores", self.semaphores.as_mut_ptr().cast(), size_of_val(&self.semaphores[..]), false),
        ];
        let v = self.plan.kernel.variant;
        let launch = Launch {
            grid: [self.plan.kernel.blocks[0], 1, 1],
            block: [v.threads, 1, 1],
            dynamic_smem: v.shared_bytes,
            params: bytes_of(&p),
            extents: &extents,
        };
        // SAFETY: the extents cover all memory that the kernel may access, and this function owns it.
        unsafe { self.module.run(v.name, &launch, &Schedule { quantum, threads: 2 }) }.unwrap(); // threads of the simulator
        (out, lse)
    }
}

fn attention() -> Attention {
    let cache = Cache { layout: CacheLayout::Entries, entries: 1, rows: TOKENS, format: CacheFormat::Unquantized };
    let (keys, softmax_scale) = (Keys::Cache(cache), (HEADDIM as f64).powf(-0.5));
    let sizes = Attention { batch: 1, seqlen_q: 1, seqlen_k: TOKENS, nheads: HEADS, nheads_k: 1, ..Attention::default() };
    Attention { headdim: HEADDIM, headdim_v: HEADDIM, softmax_scale, keys, ..sizes }
}

/// Returns true if no fp16 number has all exponent bits set, as infinities and NaN have.
fn is_finite(out: &[u16]) -> bool {
    out.iter().all(|x| x & 0x7c00 != 0x7c00)
}

/// A replay has the launch's memory and id. Each quantum lets other blocks arrive last.
#[test]
fn graph_replays_give_identical_results() {
    let mut call = Call::new();
    let first = call.run(7, 20_000);
    assert!(is_finite(&first.0));
    assert!(call.semaphores.contains(&0), "blocks shared the sequence, and the last one reset its semaphore");
    for i in 0..60 {
        assert_eq!(call.run(7, [20_000, 1, 37][i % 3]), first, "replay {i}");
    }
}

/// Results do not depend on semaphores of the call before (its id, any count of blocks), nor on its partial results.
#[test]
fn used_scratch_memory_does_not_change_results() {
    let mut call = Call::new();
    let first = call.run(1, 20_000);
    assert!(is_finite(&first.0));
    for launch_id in 2..40_u64 {
        for (i, x) in call.semaphores.iter_mut().enumerate() {
            *x = ((launch_id - 1) << 16) | (i as u64 % 30);
        }
        call.partials.fill(f32::INFINITY);
        assert_eq!(call.run(launch_id, 500), first, "launch {launch_id}");
    }
}
