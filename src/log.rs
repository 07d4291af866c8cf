//! `VOLTA_FA_LOG=1`: prints the kernels of a call on standard error, with their grids, why the planner chose them, and the problem. Later
//! calls with the same kernels and reasons print nothing. src/ops/ calls a function of this module for each pass that it has planned.

use crate::error::Result;
use crate::kernels::Feature;
use crate::launch::flag; // an environment variable that is 0 or 1; None: not set
use crate::plan::{self, BackwardMode, BackwardPlan, DecodePlan, FastPlan, PlannedKernel};
use crate::problem::{Attention, CacheLayout, Indexer, MergedStates, Window};
use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, OnceLock};

/// Kernels and reasons that were printed. Shapes are not part of it, so a server with ever new lengths fills neither memory nor log.
static PRINTED: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);

/// Returns true if `VOLTA_FA_LOG` is 1; false if it is 0, empty or unset. Reads the environment once.
fn enabled() -> Result<bool> {
    static ENABLED: OnceLock<Result<bool>> = OnceLock::new();
    ENABLED.get_or_init(|| Ok(flag("VOLTA_FA_LOG")?.unwrap_or(false))).clone()
}

/// Prints the line of a pass and its plan, unless it printed one with the same kernels and reasons. Fails for another value than 0 or 1.
fn log_kernels(pass: &str, kernels: &[PlannedKernel], line: impl FnOnce() -> String) -> Result<()> {
    if !enabled()? {
        return Ok(());
    }
    let chosen: Vec<_> = kernels.iter().map(|k| format!("{} ({})", k.variant.name, k.reason)).collect();
    let mut printed = PRINTED.lock().unwrap_or_else(|e| e.into_inner());
    if printed.insert(format!("{pass}: {}", chosen.join(", "))) {
        eprintln!("volta_fa: {pass}, {}", line());
    }
    Ok(())
}

/// Logs one kernel, whose grid divides `batch` entries, with a description of the problem.
fn log_kernel(pass: &str, planned: &PlannedKernel, batch: i64, what: impl FnOnce() -> String) -> Result<()> {
    log_kernels(pass, &[*planned], || format!("{}: {}", what(), kernel(planned, batch)))
}

/// Describes a kernel on its grid for this many batch entries (1: the grid divides all itself): `NAME on 16 x 32 x 2 blocks (REASON)`.
fn kernel(k: &PlannedKernel, batch: i64) -> String {
    let [x, y, z] = k.grid(batch);
    format!("{} on {x} x {y} x {z} blocks ({})", k.variant.name, k.reason)
}

fn grids(kernels: &[PlannedKernel], batch: i64) -> String {
    kernels.iter().map(|k| kernel(k, batch)).collect::<Vec<_>>().join(", ")
}

/// Describes a problem: `batch 2, seqlen 1000 x 1000, 32 heads on 8, headdim 128 / 128, causal, with sinks`.
fn problem(a: &Attention, mode: BackwardMode) -> String {
    let side = |n: Option<i64>| n.map_or("all".into(), |n| n.to_string());
    let window = match a.window {
        Window::FULL => String::new(),
        Window::CAUSAL => ", causal".into(),
        Window { left, right } => format!(", window {}:{}", side(left), side(right)),
    };
    let features: Vec<_> = plan::features(a, mode).iter().map(Feature::name).collect();
    let features = if features.is_empty() { String::new() } else { format!(", with {}", features.join(", ")) };
    let Attention { batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, .. } = a;
    format!(
        "batch {batch}, seqlen {seqlen_q} x {seqlen_k}, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}{window}{features}"
    )
}

/// Logs a kernel of forward passes: `forward`, or `prefill` over a KV cache.
pub fn forward(pass: &str, a: &Attention, planned: &PlannedKernel) -> Result<()> {
    log_kernel(pass, planned, a.batch, || problem(a, BackwardMode::default()))
}

/// Logs the kernels of `fwd_fast` in one line. `forward_only`: nothing is left to prepare, so the prepare kernel does not run.
pub fn fast(a: &Attention, planned: &FastPlan, forward_only: bool) -> Result<()> {
    let kernels = &[planned.prepare, planned.forward][usize::from(forward_only)..];
    log_kernels("fast forward", kernels, || format!("{}: {}", problem(a, BackwardMode::default()), grids(kernels, a.batch)))
}

/// Logs the kernel of `prepare_fast`, which quantizes K. There are no queries.
pub fn fast_prepare(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    let Attention { batch, seqlen_k, nheads_k, headdim, headdim_v, .. } = a;
    let what = || format!("batch {batch}, seqlen {seqlen_k}, {nheads_k} heads, headdim {headdim} / {headdim_v}");
    log_kernel("fast prepare", planned, *batch, what)
}

/// Logs the kernels of a backward pass in one line.
pub fn backward(a: &Attention, mode: BackwardMode, planned: &BackwardPlan) -> Result<()> {
    // before it describes the plan: most calls log nothing
    if !enabled()? {
        return Ok(());
    }
    let (pass, launches) = match planned {
        BackwardPlan { preprocess: None, .. } => ("backward in one kernel", String::new()),
        // probabilities and gradients of scores go through memory
        BackwardPlan { stored: Some(_), .. } => {
            ("backward without atomics", format!("scores and gradients in launches: {}, ", planned.all_main_launches(a.batch)))
        }
        // no accumulator of dq: a kernel of its own computes dq
        BackwardPlan { dq_accum_splits: 0, .. } => ("backward without atomics", String::new()),
        BackwardPlan { deterministic: true, main_launches, .. } => {
            ("deterministic backward", format!("main in launches: {main_launches}, "))
        }
        _ => ("backward", String::new()),
    };
    let kernels: Vec<_> = planned.kernels().collect();
    log_kernels(pass, &kernels, || format!("{launches}{}: {}", problem(a, mode), grids(&kernels, planned.launch_entries(a.batch))))
}

pub fn merge(m: &MergedStates, planned: &PlannedKernel) -> Result<()> {
    let MergedStates { batch, seqlen_q, nheads, headdim_v } = m;
    log_kernel("merge", planned, *batch, || format!("batch {batch}, seqlen {seqlen_q}, {nheads} heads, headdim_v {headdim_v}"))
}

pub fn decode(a: &Attention, planned: &DecodePlan) -> Result<()> {
    log_kernels("decode", &[planned.kernel], || {
        let Attention { batch, seqlen_q, nheads, nheads_k, headdim, headdim_v, .. } = a;
        let keys = a.cache().map_or(String::new(), |cache| match cache.layout {
            CacheLayout::Pages { .. } => format!("keys in pages of {}, ", cache.rows),
            CacheLayout::Entries => format!("keys in entries of {}, ", cache.rows),
        });
        // 0: no limit
        let splits = if planned.num_splits > 0 { format!(", at most {} splits", planned.num_splits) } else { String::new() };
        let (name, reason, blocks) = (planned.kernel.variant.name, planned.kernel.reason, planned.kernel.blocks[0]);
        format!(
            "batch {batch}, seqlen_q {seqlen_q}, {keys}{nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}{splits}: \
             {name} on {blocks} blocks ({reason})"
        )
    })
}

/// Logs the kernels of `fwd_sparse_mla` in one line.
pub fn sparse_mla(a: &Attention, select: &PlannedKernel, planned: &DecodePlan) -> Result<()> {
    let Attention { batch, seqlen_k, nheads, headdim, dtype, .. } = a;
    let kernels = [*select, planned.kernel];
    let what = || format!("{dtype}, {batch} queries of at most {seqlen_k} tokens, {nheads} heads, headdim {headdim}");
    log_kernels("sparse MLA", &kernels, || format!("{}: {}", what(), grids(&kernels, 1)))
}

pub fn indexer(x: &Indexer, planned: &PlannedKernel) -> Result<()> {
    log_kernel("indexer", planned, 1, || {
        let Indexer { batch, seqlen_q, nheads, columns, page_size, .. } = x;
        let keys = page_size.map_or("in one tensor".into(), |rows| format!("in pages of {rows}"));
        format!("batch {batch}, seqlen {seqlen_q} x {columns}, {nheads} heads, keys {keys}")
    })
}

/// Logs a kernel that appends at most `rows` tokens to each sequence of a KV cache.
pub fn append(a: &Attention, rows: i64, planned: &PlannedKernel) -> Result<()> {
    log_kernel("append", planned, a.batch, || {
        let Attention { batch, nheads, nheads_k, headdim, headdim_v, .. } = a;
        let rotary_dim = a.appended.rotary.dim;
        let rotated = if rotary_dim > 0 { format!(", rotated in {rotary_dim}") } else { String::new() };
        format!("batch {batch}, {rows} tokens, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}{rotated}")
    })
}

pub fn cast(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    let Attention { dtype, batch, nheads, nheads_k, headdim, headdim_v, .. } = a;
    log_kernel("cast", planned, *batch, || format!("{dtype}, batch {batch}, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}"))
}

pub fn dequantize(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    let Attention { batch, nheads_k, headdim, headdim_v, .. } = a;
    let format = a.cache_format().name();
    log_kernel("dequantize", planned, *batch, || format!("{format}, batch {batch}, {nheads_k} heads, headdim {headdim} / {headdim_v}"))
}
