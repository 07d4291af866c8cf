//! The kernels that attend to a cache: decode, and, for sequences of many rows, prefill.

use super::{parameters, prefill, Call};
use crate::error::Result;
use crate::launch::{bytes_of, memory, KernelLaunch, Launcher};
use crate::log;
use crate::ops::device::{at, launch_id};
use crate::params::{CacheFormat, DecodeParams};
use crate::plan;
use crate::problem::{Attention, CachedAttention};
use crate::tensor::{self, memory_range, operand, output, padded_headdim, readable, without_padding};
use tch::{Kind, Tensor};

/// (out, softmax_lse) of `q`, which is the call's, rotated if asked, and not empty.
pub fn attend(q: &Tensor, call: &Call, a: &CachedAttention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let q = readable(q)?;
    let mut out_shape = a.out_shape();
    *out_shape.last_mut().expect("out has dimensions") = padded_headdim(a.headdim_v);
    let (out, softmax_lse) = (empty(&out_shape, q.kind())?, empty(&a.lse_shape(), Kind::Float)?);
    // Of packed queries nobody on this side knows which sequence has how many: each kernel leaves the other's alone. Of a sequence whose
    // lengths or pages cannot be, prefill writes nothing.
    let padded = parameters::attention(a);
    let prefill = plan::decode_rows(&padded) > plan::MAX_DECODE_ROWS;
    if prefill {
        for t in [&out, &softmax_lse] {
            let _ = t.shallow_clone().f_fill_(f64::NAN)?;
        }
    }
    if a.total_q.is_some() || !prefill {
        decode(&q, [&out, &softmax_lse], call, a, &padded, prefill, launcher)?;
    }
    if prefill {
        prefill::run(&q, [&call.k_cache, &call.v_cache], [&out, &softmax_lse], call, a, plan::MAX_DECODE_ROWS + 1, launcher)?;
    }
    Ok((without_padding(out, a.headdim_v)?, softmax_lse))
}

/// The same where values are the first columns of keys: decode kernels alone have such headdims, for any number of rows. The caches
/// and q are readable as they lie.
pub fn attend_to_latents(q: &Tensor, call: &Call, a: &CachedAttention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let (out, softmax_lse) = (empty(&a.out_shape(), q.kind())?, empty(&a.lse_shape(), Kind::Float)?);
    decode(q, [&out, &softmax_lse], call, a, &parameters::attention(a), false, launcher)?;
    Ok((out, softmax_lse))
}

/// `others`: whether sequences of many rows are left to another kernel.
fn decode(
    q: &Tensor,
    [out, softmax_lse]: [&Tensor; 2],
    call: &Call,
    a: &CachedAttention,
    padded: &Attention,
    others: bool,
    launcher: &dyn Launcher,
) -> Result<()> {
    let cache = if q.kind() == Kind::BFloat16 { CacheFormat::Bf16 } else { a.format };
    let plan = plan::decode(padded, cache, others, &launcher.limits()?)?;
    log::decode(a, &plan)?;
    // most calls have neither, and need no other view of their options
    let converted = if a.alibi || a.sinks { Some(parameters::readable_scores(&call.options)?) } else { None };
    let options = converted.as_ref().unwrap_or(&call.options);
    // one allocation: states and outputs are pairs of floats and more, so the semaphores behind them are aligned
    let scratch = tensor::empty(&[plan.partials + 2 * plan.semaphores], Kind::Float, q.device(), launcher.output_alignment())?;
    let ranges = memory(launcher, || {
        let own = [
            memory_range("q", q, false),
            memory_range("k_cache", &call.k_cache, false),
            memory_range("v_cache", &call.v_cache, false),
            memory_range("out", out, true),
            memory_range("softmax_lse", softmax_lse, true),
            memory_range("scratch", &scratch, true),
        ];
        own.into_iter().chain(parameters::ranges(options)).collect()
    });
    launcher.begin(&ranges);
    let params = DecodeParams {
        q: operand(q, 0),
        out: output(out, 0),
        softmax_lse: at(softmax_lse, 0),
        cache: parameters::cache([&call.k_cache, &call.v_cache], call, a, 0),
        problem: plan::problem_block(padded, a.batch),
        lengths: parameters::lengths(call, a, 0),
        score_options: parameters::score_options(options, a, 0),
        max_rows: plan.max_rows.min(i64::from(i32::MAX)) as i32,
        num_splits: a.num_splits.clamp(0, i64::from(i32::MAX)) as i32,
        partials: at(&scratch, 0),
        semaphores: at(&scratch, plan.partials).cast(),
        launch_id: launch_id(),
        scales: parameters::scales(call, a, 0),
    };
    let [blocks, _] = plan.kernel.blocks;
    launcher.launch(&KernelLaunch { variant: plan.kernel.variant, grid: [blocks, 1, 1], params: bytes_of(&params), ranges: &ranges })
}
