//! `VOLTA_FA_LOG=1`: prints each kernel once for each reason it was chosen for, on standard error, with the first problem.

use crate::error::{Error, Result};
use crate::kernels::Feature;
use crate::plan::{self, BackwardMode, BackwardPlan, DecodePlan, FastPlan, PlannedKernel};
use crate::problem::{Attention, CacheLayout, Indexer, MergedStates, Window};
use std::collections::HashSet;
use std::sync::{Mutex, OnceLock};

const VARIABLE: &str = "VOLTA_FA_LOG";

/// Kernels and reasons that were printed. Shapes are not part of it, so a server with new lengths in each step fills neither
/// memory nor its log.
static PRINTED: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Returns true if plans are logged. Reads the environment once.
fn enabled() -> Result<bool> {
    static ENABLED: OnceLock<std::result::Result<bool, String>> = OnceLock::new();
    let read = || match std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy().as_ref() {
        "" | "0" => Ok(false),
        "1" => Ok(true),
        other => Err(other.to_string()),
    };
    ENABLED.get_or_init(read).clone().map_err(|other| Error::value(VARIABLE, format!("`{other}`"), "0 or 1"))
}

/// Prints the line of a pass and its plan, unless one with the same kernels and reasons was printed.
fn once(pass: &str, kernels: &[PlannedKernel], line: String) {
    let chosen: Vec<_> = kernels.iter().map(|k| format!("{} ({})", k.variant.name, k.reason)).collect();
    let mut printed = PRINTED.lock().unwrap_or_else(|e| e.into_inner());
    if printed.get_or_insert_with(HashSet::new).insert(format!("{pass}: {}", chosen.join(", "))) {
        eprintln!("volta_fa: {pass}, {line}");
    }
}

fn kernel(k: &PlannedKernel, batch: i64) -> String {
    let [x, y, z] = k.grid(batch);
    format!("{} on {x} x {y} x {z} blocks ({})", k.variant.name, k.reason)
}

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

/// Logs a forward kernel.
///
/// # Errors
/// An invalid value of the variable, as for the other functions.
pub fn forward(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        once("forward", &[*planned], format!("{}: {}", problem(a, BackwardMode::default()), kernel(planned, a.batch)));
    }
    Ok(())
}

/// Logs the kernels of a fast forward in one line.
pub fn fast(a: &Attention, planned: &FastPlan, forward_only: bool) -> Result<()> {
    if enabled()? {
        let kernels = [planned.prepare, planned.forward];
        let kernels = &kernels[usize::from(forward_only)..];
        let grids: Vec<_> = kernels.iter().map(|k| kernel(k, a.batch)).collect();
        once("fast forward", kernels, format!("{}: {}", problem(a, BackwardMode::default()), grids.join(", ")));
    }
    Ok(())
}

/// Logs the kernel of `prepare_fast`. The problem's queries are its keys.
pub fn fast_prepare(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let Attention { batch, seqlen_k, nheads_k, headdim, headdim_v, .. } = a;
        let what = format!("batch {batch}, seqlen {seqlen_k}, {nheads_k} heads, headdim {headdim} / {headdim_v}");
        once("fast prepare", &[*planned], format!("{what}: {}", kernel(planned, *batch)));
    }
    Ok(())
}

/// Logs the kernels of a backward pass in one line.
pub fn backward(a: &Attention, mode: BackwardMode, planned: &BackwardPlan) -> Result<()> {
    if enabled()? {
        let (pass, launches) = match planned {
            BackwardPlan { prepare: None, .. } => ("backward in one kernel", String::new()),
            BackwardPlan { stored: Some(_), .. } => {
                ("backward without atomics", format!("scores and gradients in launches: {}, ", planned.all_main_launches(a.batch)))
            }
            BackwardPlan { dq_accum_splits: 0, .. } => ("backward without atomics", String::new()),
            BackwardPlan { deterministic: true, main_launches, .. } => {
                ("deterministic backward", format!("main in launches: {main_launches}, "))
            }
            _ => ("backward", String::new()),
        };
        let kernels: Vec<_> = planned.kernels().collect();
        let grids: Vec<_> = kernels.iter().map(|k| kernel(k, planned.launch_entries(a.batch))).collect();
        once(pass, &kernels, format!("{launches}{}: {}", problem(a, mode), grids.join(", ")));
    }
    Ok(())
}

/// Logs a merge kernel.
pub fn merge(m: &MergedStates, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let MergedStates { batch, seqlen_q, nheads, headdim_v } = m;
        let what = format!("batch {batch}, seqlen {seqlen_q}, {nheads} heads, headdim_v {headdim_v}");
        once("merge", &[*planned], format!("{what}: {}", kernel(planned, *batch)));
    }
    Ok(())
}

/// Logs a decode kernel.
pub fn decode(a: &Attention, planned: &DecodePlan) -> Result<()> {
    if enabled()? {
        let Attention { batch, seqlen_q, nheads, nheads_k, headdim, headdim_v, .. } = a;
        let cache = a.cache().map_or(String::new(), |cache| match cache.layout {
            CacheLayout::Pages { .. } => format!("in pages of {}", cache.rows),
            CacheLayout::Entries => format!("in entries of {}", cache.rows),
        });
        let splits = if planned.num_splits > 0 { format!(", at most {} splits", planned.num_splits) } else { String::new() };
        let (v, blocks) = (planned.kernel.variant, planned.kernel.blocks[0]);
        let line = format!(
            "batch {batch}, seqlen_q {seqlen_q}, keys {cache}, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}{splits}: \
             {} on {blocks} blocks ({})",
            v.name, planned.kernel.reason
        );
        once("decode", &[planned.kernel], line);
    }
    Ok(())
}

/// Logs the kernels of sparse latent attention.
pub fn sparse_mla(a: &Attention, select: &PlannedKernel, planned: &DecodePlan) -> Result<()> {
    if enabled()? {
        let Attention { batch, seqlen_k, nheads, headdim, dtype, .. } = a;
        let what = format!("{dtype}, {batch} queries of at most {seqlen_k} tokens, {nheads} heads, headdim {headdim}");
        let line = format!("{what}: {}, {}", kernel(select, 1), kernel(&planned.kernel, 1));
        once("sparse MLA", &[*select, planned.kernel], line);
    }
    Ok(())
}

/// Logs the indexer's kernel.
pub fn indexer(x: &Indexer, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let Indexer { batch, seqlen_q, nheads, columns, page_size, .. } = x;
        let keys = page_size.map_or("in one tensor".into(), |rows| format!("in pages of {rows}"));
        let what = format!("batch {batch}, seqlen {seqlen_q} x {columns}, {nheads} heads, keys {keys}");
        once("indexer", &[*planned], format!("{what}: {}", kernel(planned, 1)));
    }
    Ok(())
}

/// Logs a forward kernel of a KV cache.
pub fn prefill(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        once("prefill", &[*planned], format!("{}: {}", problem(a, BackwardMode::default()), kernel(planned, a.batch)));
    }
    Ok(())
}

/// Logs an append kernel.
pub fn append(a: &Attention, rows: i64, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let Attention { batch, nheads, nheads_k, headdim, headdim_v, .. } = a;
        let rotary_dim = a.appended.rotary.dim;
        let rotated = if rotary_dim > 0 { format!(", rotated in {rotary_dim}") } else { String::new() };
        let what = format!("batch {batch}, {rows} tokens, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}{rotated}");
        once("append", &[*planned], format!("{what}: {}", kernel(planned, *batch)));
    }
    Ok(())
}

/// Logs a cast kernel.
pub fn cast(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let Attention { dtype, batch, nheads, nheads_k, headdim, headdim_v, .. } = a;
        let what = format!("{dtype}, batch {batch}, {nheads} heads on {nheads_k}, headdim {headdim} / {headdim_v}");
        once("cast", &[*planned], format!("{what}: {}", kernel(planned, *batch)));
    }
    Ok(())
}

/// Logs a dequantize kernel.
pub fn dequantize(a: &Attention, planned: &PlannedKernel) -> Result<()> {
    if enabled()? {
        let Attention { batch, nheads_k, headdim, headdim_v, .. } = a;
        let format = a.cache_format().name();
        let what = format!("{format}, batch {batch}, {nheads_k} heads, headdim {headdim} / {headdim_v}");
        once("convert", &[*planned], format!("{what}: {}", kernel(planned, *batch)));
    }
    Ok(())
}
