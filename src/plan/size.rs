//! Block sizes: where smaller blocks than the cheapest kernel's are faster.

use super::device::DeviceLimits;
use super::grid::rows_and_heads;
use super::kernel::Reason;
use crate::kernels::{Kernels, Variant};
use crate::problem::Attention;

/// Variants that differ in the size of blocks alone.
pub(super) fn of_all_sizes(kernels: Kernels, large: &'static Variant, d: &DeviceLimits) -> impl Iterator<Item = &'static Variant> {
    let d = *d;
    kernels
        .of(&large.family, large.pass)
        .filter(|v| (v.features, v.headdim, v.headdim_v) == (large.features, large.headdim, large.headdim_v))
        .filter(move |v| v.shared_bytes <= d.shared_bytes_per_block && !d.tuning.is_some_and(|t| t.has_failed(v)))
}

/// The variant of the same headdims with smaller blocks, where its grid
/// - is resident on the GPU all at once: then it takes one block's time, and a smaller block takes less. One
///   block too many and it takes two, which is what the large block takes for the same rows;
/// - or has no more blocks than the large one's (all rows fit one block): half of those rows were padding;
/// - or runs in rounds of so many fewer rows at once that it pays for what smaller blocks lose: a family with three sizes;
/// - or would, under a mask that makes blocks uneven, be resident in large blocks, of which the longest then decides, while more warps share a row of the
///   small ones: these end sooner.
///
/// Figures: `docs/design/volta-forward.md`, `docs/design/volta-backward.md`, `docs/design/turing-forward.md`.
pub(super) fn smaller(kernels: Kernels, large: &'static Variant, a: &Attention, d: &DeviceLimits) -> Option<(&'static Variant, Reason)> {
    let blocks = |v: &Variant| {
        let (rows, heads) = rows_and_heads(v, a);
        (rows as u64).div_ceil(v.block_rows as u64) * (heads * a.batch) as u64
    };
    // rows that an SM has worked on when it is done, side by side and one after the other
    let rows = |v: &Variant| {
        let at_once = u64::from(v.blocks_per_sm).min(blocks(v).div_ceil(d.sms.into()));
        blocks(v).div_ceil(u64::from(d.sms * v.blocks_per_sm)) * at_once * u64::from(v.block_rows)
    };
    // 32 rows a warp instead of 48 are 10% slower, 16 are 25 to 30%
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

/// Whether the mean row sees at most three quarters of the keys that the last one sees, which is all of them: causal masks of about as many
/// keys as queries. (Row i sees seqlen_k - seqlen_q + i + right keys, on the mean seqlen_k - seqlen_q / 2 + right.) A chunk of a prompt
/// behind many tokens is even, and so is a window.
pub(super) fn is_uneven(a: &Attention) -> bool {
    let is_window = a.window.left.is_some_and(|left| left < a.seqlen_k);
    !is_window && a.window.right.is_some_and(|right| right.saturating_mul(4).saturating_add(a.seqlen_k) <= 2 * a.seqlen_q)
}
