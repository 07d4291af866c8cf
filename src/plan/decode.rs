//! Plans attention of few queries per sequence over a KV cache, for src/ops/kvcache/kernels.rs and src/ops/sparse.rs, and
//! `volta_fa::indexer_logits`.
//!
//! The host knows the longest sequence alone, so the grid has as many blocks as the GPU holds at once, which divide the tokens on the
//! device (`csrc/decode/tile_scheduler.cuh`). Rows are queries of all heads of a KV head, and a row tile those that a block takes at once.
//! The tokens of a row tile may be split among blocks, which leave partial results. Tests: tests/plan/decode.rs.

use super::choose::{choose, is_applicable}; // choose: the tuned or cheapest kernel of each pass
use super::device::{cached_plan, DeviceLimits, PlanCache}; // cached_plan: the thread's last plan, if key, device and tuning are the same
use super::features::{features, BackwardMode};
use super::kernel::{ChosenKernel, PlannedKernel, Reason};
use crate::error::Result;
use crate::kernels::{FeatureSet, Pass, Variant, COMPILED, SPLIT_TOKENS}; // SPLIT_TOKENS: 512 tokens, a split of batch-invariant kernels
use crate::limits::MAX_DECODE_ROWS; // 64
use crate::problem::{Attention, DType, Indexer, INDEXER_HEADDIM};
use crate::tuning::Shape; // the properties of a problem that decide on its kernels; ANY: of a pass that takes any
use std::cell::Cell;

/// A decode kernel and its scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePlan {
    /// Kernel on a grid with one dimension.
    pub kernel: PlannedKernel,
    /// Maximum rows of a sequence: prefill computes those with more. [`i64::MAX`]: there are none.
    pub max_rows: i64,
    /// Floats for partial results of row tiles that several blocks compute.
    pub partials: i64,
    /// Semaphores of 8 bytes each, which count the blocks that wrote their partial results.
    pub semaphores: i64,
    /// Maximum splits of a row tile, as the kernel reads it; 0: no limit. 1: a block takes all tokens of a row tile.
    pub num_splits: i64,
}

/// Plans decoding of a problem with padded headdims. `has_long`: prefill computes sequences of more than [`MAX_DECODE_ROWS`] rows.
pub fn decode(a: &Attention, has_long: bool, d: &DeviceLimits) -> Result<DecodePlan> {
    thread_local!(static LAST: PlanCache<(Shape, Pass, FeatureSet, [i64; 2], bool), DecodePlan> = const { Cell::new(None) });
    let shape = Shape { cache: a.cache_format(), is_bf16: a.dtype == DType::BFloat16, ..Shape::of(a) };
    let pass = if a.has_latents() { Pass::DecodeMla } else { Pass::Decode };
    let features = features(a, BackwardMode::default()).intersection(pass.info().features);
    let rows = [tile_rows(a, d), a.nheads / a.nheads_k.max(1)];
    let plan = cached_plan(&LAST, (shape, pass, features, rows, has_long), d, || decode_shape(&shape, pass, features, rows, has_long, d))?;
    Ok(if a.features.batch_invariant { of_fixed_splits(plan, a) } else { DecodePlan { num_splits: a.num_splits, ..plan } })
}

/// Most memory for partial results of batch-invariant kernels, bytes. If those of all splits need more, each row tile has one block,
/// which keeps one partial result. Both give the same bits.
const MAX_SPLIT_BYTES: i64 = 256 << 20;

/// Returns the plan of a batch-invariant kernel, with scratch memory for every split that the call can have.
fn of_fixed_splits(plan: DecodePlan, a: &Attention) -> DecodePlan {
    let variant = plan.kernel.variant;
    let block_rows = i64::from(variant.block_rows);
    // of a partial result: for each row its outputs, and two states of two numbers (SplitSlots in csrc/decode/split_partials.cuh)
    let floats = a.rows_per_kv_head().min(block_rows) * (i64::from(variant.headdim_v) + 4);
    // Each sequence counts as the longest one, also if packed: wrong cu_seqlens_q may say so, and kernels must stay inside the memory.
    let tiles = a.batch.saturating_mul((a.rows_per_kv_head() as u64).div_ceil(block_rows as u64) as i64);
    let splits = (a.seqlen_k as u64).div_ceil(u64::from(SPLIT_TOKENS)).max(1) as i64;
    // places for partial results: one for each split
    let slots = tiles.saturating_mul(a.nheads_k).saturating_mul(splits);
    // num_splits 1 asks for one block for each row tile, as without batch_invariant
    match a.num_splits != 1 && slots.saturating_mul(4 * floats) <= MAX_SPLIT_BYTES {
        true => DecodePlan { partials: slots * floats, semaphores: slots, num_splits: 0, ..plan },
        false => DecodePlan { partials: i64::from(plan.kernel.blocks[0]) * floats, semaphores: 0, num_splits: 1, ..plan },
    }
}

/// Plans attention to latents that queries chose. Each query is a sequence of its own.
pub fn sparse_mla(a: &Attention, d: &DeviceLimits) -> Result<DecodePlan> {
    thread_local!(static LAST: PlanCache<(Shape, [i64; 2]), DecodePlan> = const { Cell::new(None) });
    let shape = Shape { cache: a.cache_format(), is_bf16: a.dtype == DType::BFloat16, ..Shape::of(a) };
    let rows = [tile_rows(a, d), a.nheads];
    // false: has_long
    cached_plan(&LAST, (shape, rows), d, || decode_shape(&shape, Pass::SparseMla, FeatureSet::NONE, rows, false, d))
}

/// Returns the rows that a row tile should hold: those of a sequence and KV head, but at most 16 in calls of few rows over few latents.
/// There all blocks share a few tiles, and each leaves the output of a whole tile, so combining them takes longer than the products.
/// Simulated V100, 128 heads over 4,096 tokens: 99 us in tiles of 64 rows, 49 us in tiles of 16, although these load each latent four times
/// as often. Over 32,768 tokens both take as long.
fn tile_rows(a: &Attention, d: &DeviceLimits) -> i64 {
    const FEW_ROWS: i64 = 16;
    /// Fewest SMs that share a tile of these rows: 256 rows in all on a V100's 80.
    const SMS_OF_TILE: i64 = 5;
    /// Most tokens of all sequences for each SM: 16,400 on a V100.
    const TOKENS_OF_SM: i64 = 205;
    let (rows, sms) = (a.rows_per_kv_head(), i64::from(d.sms));
    let is_small = a.batch.saturating_mul(rows) <= FEW_ROWS * sms / SMS_OF_TILE && a.batch.saturating_mul(a.seqlen_k) <= TOKENS_OF_SM * sms;
    if a.has_latents() && is_small {
        rows.min(FEW_ROWS)
    } else {
        rows
    }
}

/// Plans a kernel whose row tile should hold `rows` rows. A query has `group` rows per KV head.
fn decode_shape(
    shape: &Shape,
    pass: Pass,
    features: FeatureSet,
    [rows, group]: [i64; 2],
    has_long: bool,
    d: &DeviceLimits,
) -> Result<DecodePlan> {
    /// Most rows to fit in a batch with long sequences: prefill computes those, and most others have one query.
    const MIXED_ROWS: i64 = 32;
    // Batch-invariant calls over latents take the tile that fits the rows of one query, because their tiles have different bits.
    let wanted = match has_long {
        _ if shape.is_batch_invariant && pass == Pass::DecodeMla => group,
        _ if shape.is_batch_invariant => rows,
        true => rows.min(MIXED_ROWS),
        false => rows,
    };
    // takes the smallest row tile that fits the wanted rows, else the largest
    let kernel = on_resident_grid(pass, shape, features, d, |rows| (rows < wanted, rows.abs_diff(wanted)))?;
    let (variant, [blocks, _]) = (kernel.variant, kernel.blocks);
    // two partial results per block: of the first and the last row tile of its range of tokens, which it may share with other blocks. Each
    // level of the combine tree (csrc/decode/partials.cuh) has row states (two floats) of its own
    let splits = 2 * i64::from(blocks);
    let levels = i64::from(combine_levels(blocks));
    let rows_of_split = i64::from(variant.block_rows);
    Ok(DecodePlan {
        kernel,
        max_rows: if has_long { MAX_DECODE_ROWS } else { i64::MAX },
        partials: splits * rows_of_split * (i64::from(variant.headdim_v) + 2 * levels),
        semaphores: splits * levels,
        num_splits: 0,
    })
}

/// Plans a kernel on a grid of as many blocks as the GPU holds. Of the kernels that differ from the cheapest in rows of a tile alone, it
/// takes the one whose rows have the least `rank`, unless the tuning chose one.
fn on_resident_grid<Rank: Ord>(
    pass: Pass,
    shape: &Shape,
    features: FeatureSet,
    d: &DeviceLimits,
    rank: impl Fn(i64) -> Rank,
) -> Result<PlannedKernel> {
    let [chosen] = choose(*COMPILED, [pass], shape, features, d)?;
    let headdims = |v: &Variant| (v.headdim, v.headdim_v);
    let fits = |v: &&'static Variant| headdims(v) == headdims(chosen.variant) && is_applicable(v, shape, features, d);
    let sizes = COMPILED.of(&chosen.variant.family, pass).filter(fits);
    let best = sizes.min_by_key(|v| rank(i64::from(v.block_rows))).filter(|_| chosen.reason != Reason::Tuned);
    let variant = best.unwrap_or(chosen.variant);
    Ok(PlannedKernel::new(ChosenKernel { variant, ..chosen }, [d.sms * variant.blocks_per_sm, 1]))
}

/// Returns the levels of the tree in which blocks combine a row tile's partial results, if all blocks compute it. The device's tree joins
/// at least MIN_RADIX results in a node.
fn combine_levels(blocks: u32) -> u32 {
    const MIN_RADIX: u32 = 4;
    let (mut levels, mut nodes) = (1, blocks);
    while nodes > MIN_RADIX {
        nodes = nodes.div_ceil(MIN_RADIX);
        levels += 1;
    }
    levels
}

// ---- the indexer: scores by which queries of sparse attention choose tokens (csrc/indexer/schedule.cuh) ----

/// Rows of a sequence from which the largest tile (256 rows) is faster. Smaller ones convert keys more often, larger ones compute padding.
const LARGE_TILE_MIN_ROWS: i64 = 192;

/// Returns the base-2 logarithm of the rows that a query has in a tile, one for each head: 32 are a warp's, 64 those of two.
pub fn indexer_head_shift(nheads: i64) -> i32 {
    if nheads <= 32 {
        5
    } else {
        6
    }
}

/// Plans `volta_fa::indexer_logits`. The caller returns without a launch if the result is empty.
pub fn indexer(x: &Indexer, d: &DeviceLimits) -> Result<PlannedKernel> {
    thread_local!(static LAST: PlanCache<Indexer, PlannedKernel> = const { Cell::new(None) });
    cached_plan(&LAST, *x, d, || {
        let shape = Shape {
            headdim: INDEXER_HEADDIM,
            headdim_v: INDEXER_HEADDIM,
            seqlen_q: x.seqlen_q,
            seqlen_k: x.columns,
            rows: x.batch * x.seqlen_q * x.nheads,
            ..Shape::ANY
        };
        let is_large = x.seqlen_q << indexer_head_shift(x.nheads) >= LARGE_TILE_MIN_ROWS;
        on_resident_grid(Pass::Indexer, &shape, FeatureSet::NONE, d, |rows| if is_large { -rows } else { rows })
    })
}
