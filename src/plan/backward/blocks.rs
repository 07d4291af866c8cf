//! Divides the key blocks of a backward pass among launches.

use crate::kernels::{Kernels, Variant};
use crate::plan::choose::of_all_sizes;
use crate::plan::device::DeviceLimits;
use crate::plan::kernel::rows_and_heads;
use crate::problem::{Attention, Window};

/// Time of a tail of one wave of small blocks, relative to a wave of large blocks: 0.4 to 0.66 (docs/design/volta-backward.md).
pub(super) const TAIL: f64 = 0.67;

/// Returns the key blocks of a head that fit one wave less than all blocks need, and a smaller variant that computes the rest in one wave.
///
/// None if there is no such variant, and under a causal mask, because its last blocks are short.
pub(super) fn blocks_before_tail(
    kernels: Kernels,
    main: &'static Variant,
    a: &Attention,
    d: &DeviceLimits,
) -> Option<(u64, &'static Variant)> {
    let (rows, heads) = rows_and_heads(main, a);
    let heads = (heads * a.batch) as u64;
    let blocks = (rows as u64).div_ceil(main.block_rows.into());
    let before = ((blocks * heads).div_ceil(d.resident_blocks(main)) - 1) * d.resident_blocks(main) / heads;
    let left = (rows as u64).saturating_sub(before * u64::from(main.block_rows));
    let fits = |v: &Variant| v.block_rows < main.block_rows && left.div_ceil(v.block_rows.into()) * heads <= d.resident_blocks(v);
    if before == 0 || a.window.right.is_some() {
        return None;
    }
    of_all_sizes(kernels, main, d).find(|v| fits(v)).map(|v| (before, v))
}

/// Returns the least time of the launches of a deterministic main kernel, and the key blocks of a head in each of them. A head has `blocks`
/// large blocks, and then `tail` small blocks in a tail.
///
/// Each block of a launch adds to its own accumulator, and launches run in order, so the order of every sum is fixed. More accumulators fill
/// the GPU, but zeroing and adding them takes time. The unit of time is that of one block. An accumulator is written and read once, 8 bytes
/// per element. A block computes 10 * block_rows flops for each element of its rows of dq. On a V100 (docs/design/volta-backward.md) kernels
/// compute 76 TFLOP/s, and memory transfers 0.83 TB/s.
pub(super) fn blocks_of_launch(main: &Variant, blocks: u64, tail: u64, a: &Attention, d: &DeviceLimits) -> Option<(f64, u32)> {
    const FLOPS_A_BYTE: f64 = 76.0 / 0.83;
    // accumulators are fp32: 16 times the memory of q
    const MAX_SPLITS: u64 = 8;
    let (_, heads) = rows_and_heads(main, a);
    let (heads, resident_blocks) = ((heads * a.batch) as u64, d.resident_blocks(main));
    let block_times = |blocks: u64| (blocks * heads).div_ceil(resident_blocks) as f64;
    let block_rows = f64::from(main.block_rows);
    let met = match a.window {
        Window { left: Some(left), right: Some(right) } => ((left + right) as f64 + block_rows).min(a.seqlen_q as f64),
        _ => a.seqlen_q as f64,
    };
    // 0.8: 8 bytes beside 10 flops, as above
    let per_accumulator = 0.8 * FLOPS_A_BYTE / block_rows * (a.seqlen_q as f64 / met) * (heads as f64 / resident_blocks as f64);
    let of_tail = if tail > 0 { TAIL } else { 0.0 };
    let cost =
        |sums: u64| (blocks / sums) as f64 * block_times(sums) + block_times(blocks % sums) + of_tail + sums as f64 * per_accumulator;
    // a tail begins where a launch ends, and needs an accumulator for each of its blocks
    let possible = (1..=blocks.min(MAX_SPLITS)).filter(|&sums| tail == 0 || (blocks % sums == 0 && tail <= sums));
    let best = possible.min_by(|&a, &b| cost(a).total_cmp(&cost(b)))?;
    Some((cost(best), best as u32))
}

/// Returns the time of the kernels that compute dq separately, in times of a block of `main`: seven products instead of five, in one launch,
/// without accumulators.
pub(super) fn separate_time(main: &Variant, a: &Attention, d: &DeviceLimits) -> f64 {
    const PRODUCTS: f64 = 7.0 / 5.0;
    let (rows, heads) = rows_and_heads(main, a);
    let blocks = (rows as u64).div_ceil(main.block_rows.into()) * (heads * a.batch) as u64;
    PRODUCTS * blocks.div_ceil(d.resident_blocks(main)) as f64
}
