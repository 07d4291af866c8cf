//! The kernels beside a cache: append, decode, prefill and dequantize.

use crate::error::Result;
use crate::launch::{bytes_of, memory, KernelLaunch, Launcher, MemoryRange};
use crate::limits::MAX_DECODE_ROWS;
use crate::log;
use crate::ops::blocks::{self, at, lse_at, Blocks};
use crate::ops::inputs::Inputs;
use crate::ops::launches::{launch_id, run};
use crate::params::{AppendParams, DecodeParams, DequantizeParams, ElementType, FwdParams};
use crate::plan;
use crate::problem::{Attention, CachedSequence};
use crate::tensor::{self, memory_range, operand, output, without_padding};
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// Writes k and v after cache_seqlens in one launch, rotated if requested. Returns q if the launch rotated it.
///
/// Token i after cache_seqlens has position cache_seqlens + i, and k is rotated by it. Row i of q has the same position under a mask, else
/// the first one, as in flash-attn. Rotations are computed in fp32 and rounded once.
pub fn append(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<Option<Tensor>> {
    let (Inputs { q, options: o, .. }, Some([k, v])) = (inputs, &inputs.appended) else { return Ok(None) };
    let rotates = a.appended.rotary.dim > 0 && !a.has_no_output();
    let rows = a.appended.seqlen.max(if rotates { a.seqlen_q } else { 0 });
    if [a.batch, rows, a.nheads_k].contains(&0) {
        return Ok(None);
    }
    let planned = plan::append(rows, a.nheads_k, a.cache_format(), &launcher.limits()?)?;
    log::append(a, rows, &planned)?;
    let rotated = match rotates {
        true => tensor::empty(&q.size(), q.kind(), q.device(), launcher.output_alignment())?,
        false => q.shallow_clone(),
    };
    if rotates {
        launcher.begin(&memory(launcher, || vec![memory_range("q, rotated", &rotated, true)]));
    }
    let ranges = memory(launcher, || append_ranges(inputs, a, [k, v], rotates.then_some(&rotated)));
    let table = |t: &Option<Tensor>| t.as_ref().map_or((null(), 0), |t| (t.data_ptr() as *const u16, t.stride()[0]));
    let ((rotary_cos, rotary_cos_stride), (rotary_sin, rotary_sin_stride)) = (table(&o.rotary_cos), table(&o.rotary_sin));
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, cache, problem, lengths, scales, .. } = Blocks::new(inputs, a, (first, batches));
        let params = AppendParams {
            cache,
            k: operand(k, first),
            v: operand(v, first),
            q,
            rotated_q: output(&rotated, first),
            problem,
            lengths,
            rotary_cos,
            rotary_sin,
            rotary_cos_stride,
            rotary_sin_stride,
            rotary_dim: a.appended.rotary.dim as i32,
            rotary_rows: a.appended.rotary.rows as i32,
            rotary_interleaved: o.rotary_interleaved as i32,
            queries_have_positions: a.queries_have_positions() as i32,
            element: tensor::element_type(&inputs.q),
            scales,
            rotary_element: o.rotary_cos.as_ref().map_or(ElementType::Float, tensor::element_type),
        };
        run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok(rotates.then_some(rotated))
}

/// Returns the memory of an append: it writes the caches and the scales of their tokens.
fn append_ranges(inputs: &Inputs, a: &Attention, [k, v]: [&Tensor; 2], rotated: Option<&Tensor>) -> Vec<MemoryRange> {
    let scales = inputs.options.token_scales().map(|(name, _)| name);
    let is_written = |name| a.key_names().contains(&name) || scales.contains(&name);
    let own = blocks::ranges(inputs, a).map(|range| MemoryRange { writable: is_written(range.name), ..range });
    let new = [memory_range("k", k, false), memory_range("v", v, false)];
    own.chain(new).chain(rotated.map(|t| memory_range("q, rotated", t, true))).collect()
}

/// Attends to a cache that kernels can read in place: (out, softmax_lse). Sequences of few rows run on decode kernels, others on forward
/// tiles. Caches of latents have decode kernels alone, for any number of rows.
pub fn attend(inputs: &Inputs, given: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let a = &given.padded();
    let converted = blocks::readable(inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(inputs);
    let q = &inputs.q;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let (out, softmax_lse) = (empty(&a.query_shape(a.headdim_v), q.kind())?, empty(&a.lse_shape(), Kind::Float)?);
    let has_long = a.rows_per_kv_head() > MAX_DECODE_ROWS && !a.has_latents();
    if has_long {
        // prefill writes nothing for sequences with invalid lengths or pages
        for t in [&out, &softmax_lse] {
            let _ = t.shallow_clone().f_fill_(f64::NAN)?;
        }
    }
    // The host does not know the lengths of packed queries: each of the two kernels skips the other's sequences.
    if !has_long || a.total_q().is_some() {
        decode(inputs, a, has_long, [&out, &softmax_lse], launcher)?;
    }
    if has_long {
        prefill(inputs, a, [&out, &softmax_lse], launcher)?;
    }
    Ok((without_padding(out, given.headdim_v)?, softmax_lse))
}

/// Launches a decode kernel. `has_long`: prefill computes sequences of many rows.
fn decode(inputs: &Inputs, a: &Attention, has_long: bool, [out, softmax_lse]: [&Tensor; 2], launcher: &dyn Launcher) -> Result<()> {
    let plan = plan::decode(a, has_long, &launcher.limits()?)?;
    log::decode(a, &plan)?;
    // one allocation: partials are pairs of floats or more, so the semaphores after them are aligned
    let floats = plan.partials + 2 * plan.semaphores;
    let scratch = tensor::empty(&[floats], Kind::Float, out.device(), launcher.output_alignment())?;
    let written = [("out", out), ("softmax_lse", softmax_lse), ("scratch", &scratch)];
    let ranges = memory(launcher, || blocks::ranges(inputs, a).chain(written.map(|(name, t)| memory_range(name, t, true))).collect());
    launcher.begin(&ranges);
    let Blocks { q, cache, problem, lengths, score_options, scales, .. } = Blocks::new(inputs, a, (0, a.batch));
    let params = DecodeParams {
        q,
        out: output(out, 0),
        softmax_lse: at(softmax_lse, 0),
        cache,
        problem,
        lengths,
        score_options,
        max_rows: plan.max_rows.min(i64::from(i32::MAX)) as i32,
        num_splits: a.num_splits.clamp(0, i64::from(i32::MAX)) as i32,
        partials: at(&scratch, 0),
        semaphores: at(&scratch, plan.partials).cast(),
        launch_id: launch_id(),
        scales,
    };
    let [blocks, _] = plan.kernel.blocks;
    launcher.launch(&KernelLaunch { variant: plan.kernel.variant, grid: [blocks, 1, 1], params: bytes_of(&params), ranges: &ranges })
}

/// Launches forward tiles for sequences with more rows than decode kernels take.
fn prefill(inputs: &Inputs, a: &Attention, [out, softmax_lse]: [&Tensor; 2], launcher: &dyn Launcher) -> Result<()> {
    let planned = plan::prefill(a, &launcher.limits()?)?;
    log::prefill(a, &planned)?;
    let written = [("out", out), ("softmax_lse", softmax_lse)];
    let ranges = memory(launcher, || blocks::ranges(inputs, a).chain(written.map(|(name, t)| memory_range(name, t, true))).collect());
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, k, v, problem, lengths, score_options, cache, .. } = Blocks::new(inputs, a, (first, batches));
        let (out, softmax_lse) = (output(out, first), lse_at(softmax_lse, a, first));
        let min_rows = MAX_DECODE_ROWS as i32 + 1;
        let params = FwdParams { q, k, v, out, softmax_lse, problem, lengths, score_options, cache, min_rows };
        run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok(())
}

/// Dequantizes the tokens that queries see, each once, for the forward kernels. Returns keys and values of each sequence, (batch,
/// seqlen_k, nheads_k, headdim), from its first token on, and (batch,) int32 key counts. Tokens that no query sees stay unwritten. The
/// kernel computes the counts unless the sequences are `known`, with -1 for invalid lengths or pages. a.seqlen_k and the cache's size are
/// not 0.
pub fn dequantize(
    inputs: &Inputs,
    a: &Attention,
    known: Option<&[CachedSequence]>,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor, Tensor)> {
    let q = &inputs.q;
    let planned = plan::dequantize(a.seqlen_k, a.nheads_k, &launcher.limits()?)?;
    log::dequantize(a, &planned)?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let values = |headdim| empty(&[a.batch, a.seqlen_k, a.nheads_k, headdim], q.kind());
    let (k, v) = (values(a.headdim)?, values(a.headdim_v)?);
    let counts = match known {
        Some(all) => {
            let lengths: Vec<_> = all.iter().map(|sequence| sequence.seqlen_k() as i32).collect();
            Tensor::f_from_slice(&lengths)?.f_to_device(q.device())?
        }
        None => empty(&[a.batch], Kind::Int)?,
    };
    let ranges = memory(launcher, || {
        let own = [memory_range("k_cache, dequantized", &k, true), memory_range("v_cache, dequantized", &v, true)];
        let counted = known.is_none().then(|| memory_range("seqlens_k", &counts, true));
        own.into_iter().chain(counted).chain(blocks::ranges(inputs, a)).collect()
    });
    launcher.begin(&ranges);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { cache, problem, lengths, scales, .. } = Blocks::new(inputs, a, (first, batches));
        let params = DequantizeParams {
            cache,
            k: output(&k, first),
            v: output(&v, first),
            seqused_k: if known.is_some() { null_mut() } else { at(&counts, first).cast() }, // as wide
            problem,
            lengths,
            scales,
            element: tensor::element_type(q),
        };
        run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok((k, v, counts))
}
