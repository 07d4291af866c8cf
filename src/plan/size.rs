//! Chooses block sizes: smaller blocks than the cheapest kernel's where they are faster.

use super::device::DeviceLimits;
use super::kernel::rows_and_heads;
use super::kernel::Reason;
use crate::kernels::{Kernels, Variant};
use crate::problem::Attention;

/// Returns the variants that differ from `large` in block size alone, fit the device and did not fail.
pub(super) fn of_all_sizes(kernels: Kernels, large: &'static Variant, d: &DeviceLimits) -> impl Iterator<Item = &'static Variant> {
    let d = *d;
    kernels
        .of(&large.family, large.pass)
        .filter(|v| (v.features, v.headdim, v.headdim_v) == (large.features, large.headdim, large.headdim_v))
        .filter(move |v| v.shared_bytes <= d.shared_bytes_per_block && !d.tuning.is_some_and(|t| t.has_failed(v)))
}

/// Returns the variant of the same headdims with smaller blocks in one of these cases:
/// - All its blocks are resident at once. The grid takes one block's time, and a smaller block takes less. One more block
///   doubles the time, to that of a large block for the same rows.
/// - Its grid has no more blocks than that of large blocks. All rows fit one block, and half of the large block's rows were padding.
/// - Its waves compute enough fewer rows to pay for the lower speed of smaller blocks. This applies to families with three sizes.
/// - A mask makes blocks uneven and all large blocks are resident at once, so the longest block decides. Small blocks
///   with more warps per row end sooner.
///
/// Figures: `docs/design/volta-forward.md`, `docs/design/volta-backward.md`, `docs/design/turing-forward.md`.
pub(super) fn smaller(kernels: Kernels, large: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(&'static Variant, Reason)> {
    let blocks = |v: &Variant| {
        let (rows, heads) = rows_and_heads(v, a);
        (rows as u64).div_ceil(v.block_rows as u64) * (heads * a.batch) as u64
    };
    // rows that an SM computes in all waves
    let rows = |v: &Variant| {
        let at_once = u64::from(v.blocks_per_sm).min(blocks(v).div_ceil(d.sms.into()));
        blocks(v).div_ceil(u64::from(d.sms * v.blocks_per_sm)) * at_once * u64::from(v.block_rows)
    };
    // 32 rows per warp instead of 48 are 10% slower, 16 are 25 to 30% slower
    const WORTH_IT: (u64, u64) = (7, 10);
    of_all_sizes(kernels, large, d).fold(None, |best: Option<(&'static Variant, Reason)>, v| {
        let now = best.map_or(large, |(now, _)| now);
        let reason = if v.block_rows >= now.block_rows {
            None
        } else if blocks(v) <= (d.sms * v.blocks_per_sm) as u64 {
            Some(Reason::Resident)
        } else if blocks(v) <= blocks(now) {
            Some(Reason::NoMoreBlocks)
        } else if rows(v) * WORTH_IT.1 <= rows(now) * WORTH_IT.0 {
            Some(Reason::FewerRows)
        } else if is_uneven(a) && v.threads > now.threads && blocks(now) <= u64::from(d.sms * now.blocks_per_sm) {
            Some(Reason::ShorterLongest)
        } else {
            None
        };
        reason.map(|reason| (v, reason)).or(best)
    })
}

/// Returns true if the mean row sees at most three quarters of all keys: causal masks with about as many keys as queries.
///
/// Row i sees seqlen_k - seqlen_q + i + right keys, the mean row seqlen_k - seqlen_q / 2 + right. A chunk of a prompt after many tokens is
/// even, and so is a window.
pub(super) fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}
