//! k and v into the cache, rotated if asked, in one launch.
//!
//! Token i behind cache_seqlens is at position cache_seqlens + i. k is rotated by its tokens' positions. Of q, row i is where a mask orders
//! the rows, and else every row by the first position, as flash-attn has it. A rotation is computed in fp32 and rounded once.

use super::{parameters, Call};
use crate::error::Result;
use crate::launch::{bytes_of, memory, Launcher};
use crate::log;
use crate::ops::device;
use crate::params::{AppendParams, ElementType};
use crate::plan;
use crate::problem::CachedAttention;
use crate::tensor::{self, memory_range, operand, output};
use std::ptr::null;
use tch::Tensor;

/// Writes k and v, where there are any, behind cache_seqlens. Returns q, rotated if asked.
pub fn run(call: &Call, a: &CachedAttention, launcher: &dyn Launcher) -> Result<Tensor> {
    let q = &call.q;
    let Some([k, v]) = &call.appended else { return Ok(q.shallow_clone()) };
    let rotates = a.rotary_dim > 0 && !a.is_empty();
    let rows = a.seqlen_new.max(if rotates { a.seqlen_q } else { 0 });
    if [a.batch, rows, a.nheads_k].contains(&0) {
        return Ok(q.shallow_clone());
    }
    let planned = plan::append(rows, a.nheads_k, a.format, &launcher.limits()?)?;
    log::append(a, rows, &planned)?;
    let rotated = match rotates {
        true => tensor::empty(&q.size(), q.kind(), q.device(), launcher.output_alignment())?,
        false => q.shallow_clone(),
    };
    if rotates {
        launcher.begin(&memory(launcher, || vec![memory_range("q, rotated", &rotated, true)]));
    }
    let o = &call.options;
    // what a quantized cache's scales are written to
    let written = o.token_scales();
    let ranges = memory(launcher, || {
        let own = [
            memory_range("q", q, false),
            memory_range("k", k, false),
            memory_range("v", v, false),
            memory_range("k_cache", &call.k_cache, true),
            memory_range("v_cache", &call.v_cache, true),
        ];
        let rotated = rotates.then(|| memory_range("q, rotated", &rotated, true));
        let read = parameters::ranges(o).filter(|range| written.iter().all(|(name, _)| range.name != *name));
        let scales = written.into_iter().filter_map(|(name, t)| Some(memory_range(name, t.as_ref()?, true)));
        own.into_iter().chain(rotated).chain(read).chain(scales).collect()
    });
    let table = |t: &Option<Tensor>| t.as_ref().map_or((null(), 0), |t| (t.data_ptr() as *const u16, t.stride()[0]));
    let ((rotary_cos, rotary_cos_stride), (rotary_sin, rotary_sin_stride)) = (table(&o.rotary_cos), table(&o.rotary_sin));
    let problem = plan::problem_block(&parameters::attention(a), 0);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let params = AppendParams {
            cache: parameters::cache([&call.k_cache, &call.v_cache], call, a, first),
            k: operand(k, first),
            v: operand(v, first),
            q: operand(q, first),
            rotated_q: output(&rotated, first),
            problem: crate::params::Problem { batch: batches as i32, headdim: a.headdim as i32, headdim_v: a.headdim_v as i32, ..problem },
            lengths: parameters::lengths(call, a, first),
            rotary_cos,
            rotary_sin,
            rotary_cos_stride,
            rotary_sin_stride,
            rotary_dim: a.rotary_dim as i32,
            rotary_rows: a.rotary_rows as i32,
            rotary_interleaved: o.rotary_interleaved as i32,
            queries_have_positions: a.queries_have_positions() as i32,
            element: tensor::element_type(q),
            scales: parameters::scales(call, a, first),
            rotary_element: o.rotary_cos.as_ref().map_or(ElementType::Float, tensor::element_type),
        };
        device::run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok(rotated)
}
