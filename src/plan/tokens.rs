//! Plans kernels without attention: merging states (results of attention over parts of the keys), appending to a KV cache, dequantizing it,
//! casting bf16 or fp32 to fp16, and listing the tokens of sparse attention. A kernel serves all headdims. `choose` takes it from the
//! preferred family of kernels by a [`Shape`] (sizes and cache format), and `on_grid` gives it a block for `block_rows` rows of each head.

use super::choose::choose;
use super::device::{cached_plan, DeviceLimits, PlanCache}; // cached_plan: the thread's last plan, if key, device and tuning are the same
use super::kernel::{on_grid, PlannedKernel};
use crate::error::Result;
use crate::kernels::{CacheFormat, FeatureSet, Pass, COMPILED};
use crate::problem::{Attention, DType, MergedStates};
use crate::tuning::Shape;
use std::cell::Cell;

/// Plans the merge of non-empty states. Its kernel takes any headdim.
pub fn merge(m: &MergedStates, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(*COMPILED, [Pass::Merge], &Shape::of_states(m), FeatureSet::NONE, d)?;
    Ok(on_grid(kernel, m.seqlen_q, m.nheads))
}

/// Plans the kernel that appends `rows` tokens to each of `nheads_k` heads of a KV cache. It takes any headdim.
pub fn append(rows: i64, nheads_k: i64, cache: CacheFormat, d: &DeviceLimits) -> Result<PlannedKernel> {
    thread_local!(static LAST: PlanCache<(i64, i64, CacheFormat), PlannedKernel> = const { Cell::new(None) });
    cached_plan(&LAST, (rows, nheads_k, cache), d, || {
        let [kernel] = choose(*COMPILED, [Pass::Append], &Shape { cache, ..of_tokens(rows, nheads_k) }, FeatureSet::NONE, d)?;
        Ok(on_grid(kernel, rows, nheads_k))
    })
}

/// Plans the kernel that dequantizes `rows` tokens of each of `nheads_k` heads of a KV cache. It takes any headdim and format.
pub fn dequantize(rows: i64, nheads_k: i64, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(*COMPILED, [Pass::Dequantize], &of_tokens(rows, nheads_k), FeatureSet::NONE, d)?;
    Ok(on_grid(kernel, rows, nheads_k))
}

/// Plans the kernel that casts the rows of `heads` heads of q, k and v to fp16, `rows` of each. It takes any headdim.
pub fn cast(rows: i64, heads: i64, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(*COMPILED, [Pass::Cast], &of_tokens(rows, heads), FeatureSet::NONE, d)?;
    Ok(on_grid(kernel, rows, heads))
}

/// Plans the kernel before sparse MLA, for `queries` of the problem's queries: one block lists a query's tokens, others cast its heads, if
/// they are bf16, to fp16.
pub fn sparse_select(a: &Attention, queries: i64, d: &DeviceLimits) -> Result<PlannedKernel> {
    let [kernel] = choose(*COMPILED, [Pass::SparseSelect], &of_tokens(queries, 1), FeatureSet::NONE, d)?;
    // a warp for each head
    let blocks_of_heads = if a.dtype == DType::BFloat16 { (a.nheads as u64).div_ceil(u64::from(kernel.variant.threads / 32)) } else { 0 };
    Ok(on_grid(kernel, queries, 1 + blocks_of_heads as i64))
}

/// Returns the shape of a pass over `rows` tokens of `nheads_k` heads, for any headdim and format.
fn of_tokens(rows: i64, nheads_k: i64) -> Shape {
    Shape { seqlen_q: rows, seqlen_k: rows, rows: rows.saturating_mul(nheads_k), ..Shape::ANY }
}
