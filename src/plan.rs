//! Planning: which kernels run a problem, on which grid, with which parameter block.
//!
//! Pure functions of the problem and the device's limits.

use crate::error::{Error, Result};
use crate::kernels::{self, Family, Flavor, Pass, Variant};
use crate::params;
use crate::problem::Attention;

/// What a plan may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// compute capability (major, minor)
    pub capability: (i32, i32),
    pub sms: u32,
    /// dynamic shared memory that a block may opt in to
    pub shared_bytes_per_block: u32,
}

impl DeviceLimits {
    /// Tesla V100: what the simulator stands for.
    pub const V100: DeviceLimits = DeviceLimits { capability: (7, 0), sms: 80, shared_bytes_per_block: 96 * 1024 };
}

/// A kernel and the grid it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub variant: &'static Variant,
    /// blocks of rows, heads; the third axis is the batch, see [`batch_chunks`]
    pub blocks: [u32; 2],
}

/// How a backward pass differs from others of the same problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardMode {
    pub deterministic: bool,
    /// dq, dk and dv leave the kernels as bf16 instead of fp16
    pub bf16_gradients: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlan {
    pub prepare: Step,
    /// dk and dv, and dq into its accumulator
    pub main: Step,
    /// dq from its accumulator, or, deterministic, computed without one
    pub finish: Step,
    /// rows of an entry in dq's accumulator and in the row statistics; of all entries together where packed
    pub scratch_rows: i64,
    /// columns of dq's accumulator; 0: there is none
    pub headdim_rounded: i64,
}

/// Query rows of the backward pass' scratch are a multiple of this, which every variant's step divides.
const QUERY_ROUNDING: i64 = 32;

/// The largest grid in y and z that CUDA allows.
const MAX_GRID_Z: i64 = 65535;

fn family(d: &DeviceLimits) -> Result<Family> {
    let (major, minor) = d.capability;
    kernels::family_for(d.capability).ok_or_else(|| {
        Error::unsupported(format!("this GPU has compute capability {major}.{minor}; volta_fa's kernels need 7.0 (Volta) or newer"))
    })
}

/// The least that a kernel of this pass has to be prepared for.
fn flavor(pass: Pass, a: &Attention) -> Flavor {
    // these two never see a score
    let rows_only = matches!(pass, Pass::BackwardPrepare | Pass::BackwardFinish);
    // a sink joins a finished row, which ragged kernels do too, and backward finds all that it did in softmax_lse
    let ragged = a.is_ragged() || pass == Pass::Forward && a.features.sinks;
    match (a.features.change_scores() && !rows_only, ragged) {
        (true, _) => Flavor::General,
        (false, true) => Flavor::Ragged,
        (false, false) => Flavor::Plain,
    }
}

/// The cheapest variant that holds the problem: one that is prepared for no more than it needs, and since padding is
/// computed on, the least padded. Of several, the first in the table, which has the larger blocks.
fn choose(pass: Pass, a: &Attention, least: Flavor, d: &DeviceLimits) -> Result<&'static Variant> {
    let holds = |v: &&Variant| v.flavor >= least && v.headdim as i64 >= a.headdim && v.headdim_v as i64 >= a.headdim_v;
    let family = family(d)?;
    let fits = |v: &&Variant| v.shared_bytes <= d.shared_bytes_per_block;
    kernels::of(family, pass).filter(holds).filter(fits).min_by_key(|v| (v.flavor, v.headdim + v.headdim_v)).ok_or_else(|| {
        Error::unsupported(format!(
            "no {} kernel for headdim {} and headdim_v {} fits this GPU's {} bytes of shared memory a block",
            family.name, a.headdim, a.headdim_v, d.shared_bytes_per_block
        ))
    })
}

fn step(variant: &'static Variant, rows: i64, heads: i64) -> Step {
    Step { variant, blocks: [(rows as u64).div_ceil(variant.block_rows as u64) as u32, heads as u32] }
}

/// The variant of the same headdims with smaller blocks, where its grid
/// - is resident on the GPU all at once: then it takes one block's time, and a smaller block takes less. One
///   block too many and it takes two, which is what the large block takes for the same rows;
/// - or has no more blocks than the large one's (seqlen_q fits one block): half of those rows were padding.
///
/// Figures: `docs/forward-kernel.md`.
fn smaller(large: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<&'static Variant> {
    let blocks = |v: &Variant| (a.seqlen_q as u64).div_ceil(v.block_rows as u64) * (a.nheads * a.batch) as u64;
    kernels::of(large.family, large.pass).find(|v| {
        (v.flavor, v.headdim, v.headdim_v) == (large.flavor, large.headdim, large.headdim_v)
            && v.block_rows < large.block_rows
            && v.shared_bytes <= d.shared_bytes_per_block
            && (blocks(v) <= (d.sms * v.blocks_per_sm) as u64 || blocks(v) <= blocks(large))
    })
}

/// Plan the forward pass of a non-empty problem.
pub fn forward(a: &Attention, d: &DeviceLimits) -> Result<Step> {
    let large = choose(Pass::Forward, a, flavor(Pass::Forward, a), d)?;
    Ok(step(smaller(large, a, d).unwrap_or(large), a.seqlen_q, a.nheads))
}

/// Plan the backward pass of a non-empty problem. The main kernel adds to dq by atomics, in any order; where
/// that has to be deterministic, a kernel of its own computes S and dP again for dq.
pub fn backward(a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Result<BackwardPlan> {
    // plain kernels write fp16 only
    let least = if mode.bf16_gradients { Flavor::Ragged } else { Flavor::Plain };
    let writer = |pass| choose(pass, a, flavor(pass, a).max(least), d);
    let (main, finish) = match mode.deterministic {
        false => (Pass::Backward, Pass::BackwardFinish),
        true => (Pass::BackwardKeys, Pass::BackwardQueries),
    };
    let (main, finish) = (writer(main)?, writer(finish)?);
    let rounded = |rows: i64| (rows + QUERY_ROUNDING - 1) / QUERY_ROUNDING * QUERY_ROUNDING;
    // A packed sequence begins at (its first row + its number * QUERY_ROUNDING), rounded down (csrc/sequence.cuh):
    // that leaves each of them room for its own rounding.
    let scratch_rows = a.packed.map_or(rounded(a.seqlen_q), |p| rounded(p.total_q + a.batch * QUERY_ROUNDING));
    Ok(BackwardPlan {
        prepare: step(choose(Pass::BackwardPrepare, a, flavor(Pass::BackwardPrepare, a), d)?, rounded(a.seqlen_q), a.nheads),
        main: step(main, a.seqlen_k, a.nheads_k),
        finish: step(finish, a.seqlen_q, a.nheads),
        scratch_rows,
        headdim_rounded: if mode.deterministic { 0 } else { main.headdim as i64 },
    })
}

/// (first batch, batches) of each launch: the batch lies on the grid's z axis.
pub fn batch_chunks(batch: i64) -> impl Iterator<Item = (i64, i64)> {
    (0..batch).step_by(MAX_GRID_Z as usize).map(move |first| (first, MAX_GRID_Z.min(batch - first)))
}

/// The part of the parameter block that the passes share.
pub fn problem_block(a: &Attention, batches: i64) -> params::Problem {
    let unbounded = a.seqlen_q + a.seqlen_k;
    let side = |w: Option<i64>| w.map_or(unbounded, |w| w.min(unbounded)) as i32;
    // A zero scale makes every visible key equal; so does a tiny one, and the kernels may divide by it.
    const TINY: f32 = 1e-30;
    let scale = (a.softmax_scale as f32).abs().max(TINY);
    params::Problem {
        batch: batches as i32,
        nheads: a.nheads as i32,
        nheads_k: a.nheads_k as i32,
        seqlen_q: a.seqlen_q as i32,
        seqlen_k: a.seqlen_k as i32,
        headdim: a.headdim as i32,
        headdim_v: a.headdim_v as i32,
        window_left: side(a.window.left),
        window_right: side(a.window.right),
        scale,
        scale_log2: scale * std::f32::consts::LOG2_E,
        sign_flip: if a.softmax_scale < 0.0 { 0x8000_8000 } else { 0 },
    }
}
