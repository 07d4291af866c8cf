//! Plans the backward pass in one kernel, for problems with few keys; mod.rs asks for it first. Tests: tests/plan/backward.rs.

use super::plan::BackwardPlan;
use crate::kernels::{Kernels, Pass, Variant, COMPILED};
use crate::plan::choose::{choose, sized}; // choose: the tuned or cheapest kernel; sized: with smaller blocks where faster
use crate::plan::device::DeviceLimits;
use crate::plan::features::{features, BackwardMode}; // features: those of problem and mode, which kernels need code for
use crate::plan::kernel::{planned, Reason}; // planned: a kernel on a grid of a block for each row tile and head
use crate::problem::Attention;
use crate::tuning::Shape;
use std::sync::LazyLock;

/// Plans one fused kernel if one block has all keys of a head, so no other block adds to its dq.
///
/// This saves two launches, a few microseconds, and the memory traffic of dq's accumulator. But the one block also computes the statistics
/// of all rows, at 0.01 us per row. So the plan takes it for few rows, or for enough blocks to fill the GPU with other work meanwhile.
pub(super) fn fused(kernels: Kernels, a: &Attention, mode: BackwardMode, d: &DeviceLimits) -> Option<BackwardPlan> {
    /// Query rows of a KV head, all its query heads together.
    const FEW_ROWS: i64 = 512;
    /// Waves of the grid, each as many blocks as the GPU holds at once.
    const MIN_WAVES: u64 = 2;
    // maximum keys of any fused kernel: most problems are larger, and need no search
    static MAX_KEYS: LazyLock<u32> = LazyLock::new(|| {
        let fused = COMPILED.variants().filter(|v| v.pass == Pass::BackwardFused);
        fused.map(|v| v.block_rows).max().unwrap_or(0)
    });
    if a.seqlen_k > i64::from(*MAX_KEYS) {
        return None;
    }
    let [large] = choose(kernels, [Pass::BackwardFused], &Shape::of(a), features(a, mode), d).ok()?;
    let is_tuned = large.reason == Reason::Tuned;
    // if the cheapest one failed on this GPU, or the preferred family (volta, turing) has none, separate kernels are better
    if !is_tuned && large.reason != Reason::Cheapest {
        return None;
    }
    let kernel = sized(kernels, large, a, d);
    let variant = kernel.variant;
    // separate kernels of a smaller headdim compute less padding
    let is_narrower =
        |v: &Variant| v.features == variant.features && v.headdim < variant.headdim && v.headdim as i64 >= a.headdim.max(a.headdim_v);
    if !is_tuned && kernels.of(&variant.family, Pass::Backward).any(is_narrower) {
        return None;
    }
    let rows = a.nheads / a.nheads_k * a.seqlen_q;
    let blocks = (a.nheads_k * a.batch) as u64;
    let holds_all_keys = a.seqlen_k <= i64::from(variant.block_rows);
    let pays = rows <= FEW_ROWS || blocks >= MIN_WAVES * d.resident_blocks(variant);
    (holds_all_keys && (is_tuned || pays)).then(|| BackwardPlan::new(planned(kernel, a), a))
}
