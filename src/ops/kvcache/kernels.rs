//! Launches the kernels for a KV cache: append (writes new keys and values), decode (few queries a sequence), prefill (forward tiles for
//! more) and dequantize (copies a quantized cache as fp16 or bf16). mod.rs calls it. Rows are queries of all heads of a KV head.
//! A tree mask says which draft tokens of speculative decoding each query sees. Latents are vectors that are key and value at once.

use super::{gather, selection};
use crate::error::Result;
use crate::launch::{bytes_of, Launcher, SCRATCH};
use crate::limits::MAX_DECODE_ROWS; // 64
use crate::log;
use crate::ops;
use crate::ops::blocks::{self, at, Blocks}; // at: address of an element of an fp32 tensor
use crate::ops::device::launch_forward; // a forward kernel, perhaps on a stream-K grid
use crate::ops::inputs::Inputs;
// launch_id: 48 bits that no other call has, so that semaphores need no zeroing
use crate::ops::launches::{fake_arrivals, launch_id, Launches};
use crate::ops::stream_k; // grids whose blocks share the keys of some row tiles
use crate::params::{AppendParams, CacheFormat, CacheScales, DecodeParams, DequantizeParams, Divisor, ElementType, Problem};
use crate::plan::{self, DecodePlan, DeviceLimits, PlannedKernel};
use crate::problem::{Attention, CachedSequence, DType};
use crate::tensor::{self, is_readable, operand, output, without_padding};
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// Computes `volta_fa::fwd_kvcache` on kernels: (out, softmax_lse). `seqlen_k`: keys of the longest sequence, or the most that the cache
/// can hold. `sequences`: their lengths, if the call checked them.
pub fn append_and_attend(
    inputs: &Inputs,
    a: &Attention,
    seqlen_k: i64,
    sequences: Option<&[CachedSequence]>,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor)> {
    let route = plan_before_append(inputs, a, seqlen_k, launcher)?;
    let rotated = append(inputs, a, launcher)?;
    let inputs = rotated.as_ref().unwrap_or(inputs);
    match route {
        _ if a.has_no_output() => gather::no_output(inputs, a),
        Route::InPlace(plans) => attend_with(plans, inputs, a, launcher),
        Route::Copy(None) => gather::attend(inputs, a, seqlen_k),
        Route::Copy(Some(planned)) => {
            let keys = dequantize(&planned, inputs, &Attention { seqlen_k, ..*a }, sequences, launcher)?;
            gather::attend_to(&inputs.q, inputs, a, keys, seqlen_k)
        }
    }
}

/// The decode and the prefill kernel over a cache that they read in place; None: the call does not need it.
type Plans = (Option<DecodePlan>, Option<PlannedKernel>);

/// How a call attends to its cache.
enum Route {
    /// Kernels read the cache.
    InPlace(Plans),
    /// `fwd` reads a copy, which the kernel of this plan dequantizes; None: ATen makes the copy.
    Copy(Option<PlannedKernel>),
}

/// Plans the kernels that attend to the cache, before the append: a call must not write and then raise. A copy has `seqlen_k` keys a
/// sequence, and `fwd` has kernels for it.
fn plan_before_append(inputs: &Inputs, a: &Attention, seqlen_k: i64, launcher: &dyn Launcher) -> Result<Route> {
    if a.is_empty() {
        return Ok(Route::Copy(None));
    }
    let limits = &launcher.limits()?;
    if reads_in_place(inputs, a) {
        return plans(&a.padded(), limits).map(Route::InPlace);
    }
    // The dequantize kernel leaves tokens before a window unwritten. Beside a tree mask a window counts a token's ancestors, and reaches
    // further back for some queries than for others.
    let is_tree_in_window = a.features.tree && a.window.left.is_some();
    let dequantizes = a.cache_format() != CacheFormat::Unquantized && seqlen_k > 0 && !is_tree_in_window;
    let dequantize = dequantizes.then(|| plan::dequantize(seqlen_k, a.nheads_k, limits)).transpose()?;
    ops::check_forward_plan(&gather::dense(a, seqlen_k), limits)?;
    Ok(Route::Copy(dequantize))
}

/// Checks that kernels exist for the selected tokens of a call with `kv_indices`, then appends, as [`append`].
pub fn append_before_selection(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<Option<Inputs>> {
    if inputs.appended.is_some() {
        let selected = selection::problem(inputs, a);
        plan_before_append(inputs, &selected, selected.seqlen_k, launcher)?;
    }
    append(inputs, a, launcher)
}

/// Plans a call over a cache that kernels read in place. `a` has padded headdims.
fn plans(a: &Attention, limits: &DeviceLimits) -> Result<Plans> {
    let has_long = a.has_prefill();
    // The host does not know the lengths of packed queries: each of the two kernels skips the other's sequences.
    let has_short = !has_long || a.total_q().is_some();
    let decode = if has_short { Some(plan::decode(a, has_long, limits)?) } else { None };
    let prefill = if has_long { Some(plan::prefill(a, limits)?) } else { None };
    Ok((decode, prefill))
}

/// Writes k and v after cache_seqlens in one launch, rotated if requested. Returns the inputs with q rotated, if it was.
///
/// Token i after cache_seqlens has position cache_seqlens + i, and k is rotated by it. Row i of q has the same position under a mask, else
/// the first one, as in flash-attn. Rotations are computed in fp32 and rounded once.
fn append(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<Option<Inputs>> {
    let (Inputs { q, options: o, .. }, Some([k, v])) = (inputs, &inputs.appended) else { return Ok(None) };
    let rotates = a.appended.rotary.dim > 0 && !a.has_no_output();
    // here rows are tokens of a sequence: new ones, and queries to rotate
    let rows = a.appended.seqlen.max(if rotates { a.seqlen_q } else { 0 });
    if [a.batch, rows, a.nheads_k].contains(&0) {
        return Ok(None);
    }
    let planned = plan::append(rows, a.nheads_k, a.cache_format(), &launcher.limits()?)?;
    log::append(a, rows, &planned)?;
    let rotated = if rotates { tensor::empty(&q.size(), q.kind(), launcher)? } else { q.shallow_clone() };
    let mut launches = Launches::begin(inputs, a, launcher, [("q, rotated", rotates.then_some(&rotated))]);
    // the launch writes the caches and the scales of their tokens, and keeps what else they hold; None: no further tensor
    launches.also_write(&a.key_names(), None);
    launches.also_write(&o.token_scales().map(|(name, _)| name), None);
    let table = |t: &Option<Tensor>| t.as_ref().map_or((null(), 0), |t| (t.data_ptr() as *const u16, t.stride()[0]));
    let ((rotary_cos, rotary_cos_stride), (rotary_sin, rotary_sin_stride)) = (table(&o.rotary_cos), table(&o.rotary_sin));
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, cache, problem, lengths, scales, element, .. } = Blocks::new(inputs, a, (first, batches));
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
            element,
            scales,
            rotary_element: o.rotary_cos.as_ref().map_or(ElementType::Float, tensor::element_type),
        };
        launches.run(&planned, batches, bytes_of(&params))?;
    }
    Ok(rotates.then(|| Inputs { q: rotated, ..inputs.share() }))
}

/// Returns true if kernels read the caches in place: all rows begin on 16-byte boundaries and have whole groups of 16 bytes. Only decode
/// kernels read caches that are not fp16, and they read quantized ones beside fp16 queries. With a tree mask they take any number of rows.
fn reads_in_place(inputs: &Inputs, a: &Attention) -> bool {
    let has_kernel = match (a.dtype, a.cache_format()) {
        // decode kernels take any number of rows of these calls, in which a row's bits depend on no other row
        _ if a.features.batch_invariant => a.dtype == DType::Half || a.cache_format() == CacheFormat::Unquantized,
        (DType::Half, _) | (DType::BFloat16, CacheFormat::Unquantized) if a.features.tree => true,
        (DType::Half, CacheFormat::Unquantized) => true,
        (DType::Half, _) | (DType::BFloat16, CacheFormat::Unquantized) => a.rows_per_kv_head() <= MAX_DECODE_ROWS,
        _ => false,
    };
    has_kernel && [&inputs.k, &inputs.v].into_iter().all(is_readable)
}

/// Attends to a cache that kernels can read in place: (out, softmax_lse). Sequences of few rows run on decode kernels, others on forward
/// tiles. Caches of latents and calls with a tree mask have decode kernels alone, for any number of rows.
pub fn attend(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    attend_with(plans(&a.padded(), &launcher.limits()?)?, inputs, a, launcher)
}

/// Attends as [`attend`] does, with these plans.
fn attend_with(
    (decode_plan, prefill_plan): Plans,
    inputs: &Inputs,
    given: &Attention,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor)> {
    let a = &given.padded();
    let converted = blocks::readable(inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(inputs);
    let q = &inputs.q;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    let (out, softmax_lse) = (empty(&a.query_shape(a.headdim_v), q.kind())?, empty(&a.lse_shape(), Kind::Float)?);
    // one allocation: partials are pairs of floats or more, so the semaphores after them are aligned
    let scratch = decode_plan.map(|plan| empty(&[plan.partials + 2 * plan.semaphores], Kind::Float)).transpose()?;
    let stream_k = prefill_plan.as_ref().and_then(|planned| Some((planned, planned.stream_k?)));
    let stream_k = stream_k.map(|(planned, plan)| stream_k::Launch::new(planned, plan, launcher)).transpose()?;
    let splits = stream_k.as_ref().map(stream_k::Launch::scratch);
    let written = [("out", Some(&out)), ("softmax_lse", Some(&softmax_lse)), (SCRATCH, scratch.as_ref()), (SCRATCH, splits)];
    let launches = Launches::begin(inputs, a, launcher, written);
    if prefill_plan.is_some() {
        // prefill writes nothing for sequences with invalid lengths or pages
        for t in [&out, &softmax_lse] {
            let _ = t.shallow_clone().f_fill_(f64::NAN)?;
        }
    }
    if let (Some(plan), Some(scratch)) = (&decode_plan, &scratch) {
        decode(plan, inputs, a, [&out, &softmax_lse, scratch], &launches)?;
    }
    if let Some(planned) = &prefill_plan {
        log::forward("prefill", a, planned)?;
        let min_rows = MAX_DECODE_ROWS as i32 + 1; // decode kernels take sequences of fewer
        launch_forward((planned, stream_k.as_ref()), inputs, a, [&out, &softmax_lse], min_rows, &launches)?;
    }
    Ok((without_padding(out, given.headdim_v)?, softmax_lse))
}

/// Launches a decode kernel. `scratch`: partial results of splits, then semaphores.
fn decode(plan: &DecodePlan, inputs: &Inputs, a: &Attention, [out, softmax_lse, scratch]: [&Tensor; 3], launches: &Launches) -> Result<()> {
    log::decode(a, plan)?;
    let launch_id = launch_id();
    if !launches.launcher.runs_all_blocks() {
        // a simulator that times one SM's blocks: their semaphores count the others as arrived
        fake_arrivals(plan, scratch, launch_id)?;
    }
    let Blocks { q, cache, problem, lengths, score_options, scales, .. } = Blocks::new(inputs, a, (0, a.batch));
    let params = DecodeParams {
        q,
        out: output(out, 0),
        softmax_lse: at(softmax_lse, 0),
        cache,
        problem,
        group: Divisor::new(problem.nheads / problem.nheads_k), // factor and shift that replace a division
        lengths,
        score_options,
        max_rows: plan.max_rows.min(i64::from(i32::MAX)) as i32,
        num_splits: plan.num_splits.clamp(0, i64::from(i32::MAX)) as i32,
        partials: at(scratch, 0),
        semaphores: at(scratch, plan.partials).cast(),
        launch_id,
        scales,
    };
    // the grid's blocks share the work of all sequences, so it has no batch axis
    launches.run(&plan.kernel, 1, bytes_of(&params))
}

/// Dequantizes the tokens that queries see, each once, for the forward kernels. Returns keys and values of each sequence, (batch,
/// seqlen_k, nheads_k, headdim), from its first token on, and (batch,) int32 key counts. Tokens that no query sees stay unwritten. The
/// kernel computes the counts unless the sequences are `known`, with -1 for invalid lengths or pages. a.seqlen_k and the cache's size are
/// not 0. Keys and values of different formats have a launch each, in which the other has headdim 0.
fn dequantize(
    planned: &PlannedKernel,
    inputs: &Inputs,
    a: &Attention,
    known: Option<&[CachedSequence]>,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor, Tensor)> {
    log::dequantize(a, planned)?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    let kind = if a.dtype == DType::BFloat16 { Kind::BFloat16 } else { Kind::Half };
    let values = |headdim| empty(&[a.batch, a.seqlen_k, a.nheads_k, headdim], kind);
    let (k, v) = (values(a.headdim)?, values(a.headdim_v)?);
    let counts = match known {
        Some(all) => {
            let lengths: Vec<_> = all.iter().map(|sequence| sequence.seqlen_k() as i32).collect();
            Tensor::f_from_slice(&lengths)?.f_to_device(launcher.device())?
        }
        None => empty(&[a.batch], Kind::Int)?,
    };
    let counted = Some(&counts).filter(|_| known.is_none());
    let written = [("k_cache, dequantized", Some(&k)), ("v_cache, dequantized", Some(&v)), ("seqlens_k", counted)];
    let launches = Launches::begin(inputs, a, launcher, written);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { cache, problem, lengths, scales, element, .. } = Blocks::new(inputs, a, (first, batches));
        let params = DequantizeParams {
            cache,
            k: output(&k, first),
            v: output(&v, first),
            seqlens_k_out: if known.is_some() { null_mut() } else { at(&counts, first).cast() }, // int32, as wide as the fp32 of `at`
            problem,
            lengths,
            scales,
            element,
        };
        if !a.cache_format().is_pair() {
            launches.run(planned, batches, bytes_of(&params))?;
            continue;
        }
        let [keys, values] = a.cache_format().parts();
        for (format, headdim, headdim_v) in [(keys, problem.headdim, 0), (values, 0, problem.headdim_v)] {
            let problem = Problem { headdim, headdim_v, ..problem };
            let part = DequantizeParams { problem, scales: CacheScales { format, ..scales }, ..params };
            launches.run(planned, batches, bytes_of(&part))?;
        }
    }
    Ok((k, v, counts))
}
