//! Plans the forward pass over dense keys, packed keys or (prefill) a KV cache: a kernel and its grid. The usual grid has one block per row
//! tile (the rows of one block) and head. A stream-K grid divides the keys of the last row tiles evenly among blocks. A
//! tuning has choices of kernels that were measured on the GPU. Tests: tests/plan/, tests/test_stream_k.py.

// choose: tuned or cheapest kernels; sized: with smaller blocks where faster; is_uneven: late rows see many more keys than early ones
use super::choose::{choose, is_uneven, sized};
use super::device::{cached_plan, DeviceLimits, PlanCache}; // cached_plan: the thread's last plan, if key, device and tuning are the same
use super::features::{features, BackwardMode};
use super::kernel::{planned, usual_blocks, ChosenKernel, PlannedKernel, Reason}; // planned: on the usual grid; usual_blocks: its blocks
use super::stream_k::StreamKPlan;
use crate::error::Result;
use crate::kernels::{FeatureSet, Kernels, Pass, Variant, COMPILED};
use crate::limits::MAX_GRID_YZ; // 65535
use crate::problem::{Attention, Keys, Queries};
use crate::tuning::Shape;
use std::cell::Cell;

/// Plans the forward pass of a non-empty problem.
pub fn forward(a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    forward_among(*COMPILED, a, d)
}

/// Plans the forward pass with these kernels to choose from. Tests give kernels of their own.
pub fn forward_among(kernels: Kernels, a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    // the default mode adds no feature: modes are of backward passes
    forward_pass(kernels, Pass::Forward, a, features(a, BackwardMode::default()), d)
}

/// Plans the forward pass of fp32 tensors in full precision.
pub fn forward_split(a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(*COMPILED, [Pass::ForwardSplit], &Shape::of(a), features(a, BackwardMode::default()), d)?;
    Ok(stream_k(*COMPILED, Pass::ForwardSplit, kernel, a, d).unwrap_or_else(|| planned(kernel, a)))
}

/// Plans a pass with the block size, or the stream-K grid, that suits the problem.
fn forward_pass(kernels: Kernels, pass: Pass, a: &Attention, features: FeatureSet, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [large] = choose(kernels, [pass], &Shape::of(a), features, d)?;
    let kernel = sized(kernels, large, a, d);
    // A stream-K grid has large blocks. Where smaller ones are faster, it is taken only if the tuning chooses it.
    let replaces = |k: &PlannedKernel| kernel == large || k.reason == Reason::Tuned;
    Ok(stream_k(kernels, pass, large, a, d).filter(replaces).unwrap_or_else(|| planned(kernel, a)))
}

/// Plans a stream-K grid of the same tiles as `usual`, if every row tile takes about the same time and the estimate is faster, or if it is
/// tuned. Row tiles take the same time without a mask, and in a chunk of a prompt after many tokens. Over a KV cache, whose lengths the
/// host does not know, the estimate assumes the longest sequence.
fn stream_k(kernels: Kernels, pass: Pass, usual: ChosenKernel, a: &Attention, d: &DeviceLimits) -> Option<PlannedKernel> {
    let shape = Shape::of(a); // is_causal: None for a window
    let (stream_k, is_possible, is_even) = match pass {
        // a larger batch takes several launches
        Pass::Forward | Pass::ForwardSplit => {
            let is_dense = (a.queries, a.keys) == (Queries::Dense, Keys::Dense);
            let stream_k = if pass == Pass::Forward { Pass::ForwardStreamK } else { Pass::ForwardSplitStreamK };
            (stream_k, is_dense && a.batch <= MAX_GRID_YZ, shape.is_causal.is_some() && !is_uneven(a))
        }
        // over a cache, these grids are for one sequence (csrc/forward/tile_split.cuh)
        _ => (Pass::PrefillStreamK, a.batch == 1, !is_uneven(a)),
    };
    // a tuned kernel on the usual grid was measured as the fastest
    if !is_possible || usual.reason == Reason::Tuned {
        return None;
    }
    let [ChosenKernel { variant, reason }] = choose(kernels, [stream_k], &shape, features(a, BackwardMode::default()), d).ok()?;
    let tile_of = |v: &Variant| (v.family.name, v.required_features, v.headdim, v.headdim_v, v.block_rows);
    let is_tuned = reason == Reason::Tuned;
    if !is_tuned && (!is_even || tile_of(variant) != tile_of(usual.variant)) {
        return None;
    }
    let row_tiles = usual_blocks(variant, a);
    // with a window over a KV cache, the keys that a row tile sees
    let of_window = a.window.left.filter(|_| pass == Pass::Prefill).map(|left| left + i64::from(variant.block_rows));
    let keys = of_window.map_or(a.seqlen_k, |keys| keys.min(a.seqlen_k));
    let (keys, step, blocks_per_sm) = (keys as u32, variant.step, variant.blocks_per_sm);
    type Key = (u64, u32, u32, u32);
    thread_local!(static LAST: PlanCache<Key, Option<(StreamKPlan, bool)>> = const { Cell::new(None) });
    let of_grid = || Ok(StreamKPlan::of(row_tiles, keys, step, d.sms, blocks_per_sm));
    let (plan, pays) = cached_plan(&LAST, (row_tiles, keys, step, blocks_per_sm), d, of_grid).ok()??;
    if !is_tuned && !pays {
        return None;
    }
    let reason = if is_tuned { reason } else { Reason::StreamK };
    Some(PlannedKernel { stream_k: Some(plan), ..PlannedKernel::new(ChosenKernel { variant, reason }, [plan.blocks(), 1]) })
}

/// Plans the forward kernel over a KV cache for a call that is not empty. The headdims of `a` are multiples of 8.
pub fn prefill(a: &Attention, d: &DeviceLimits) -> Result<PlannedKernel> {
    forward_pass(*COMPILED, Pass::Prefill, a, features(a, BackwardMode::default()).union(FeatureSet::PAGED), d)
}
