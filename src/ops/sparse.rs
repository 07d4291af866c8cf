//! `volta_fa::fwd_sparse_mla`: each query attends to latents that it chose, of one cache or of two, in one softmax. A latent is one vector
//! per token: the key of all heads, and in its first 512 columns the value (DeepSeek's multi-head latent attention, MLA). On kernels, a
//! selecting kernel first lists the valid tokens of each query and casts bf16 queries to fp16; a decode kernel then attends to the lists.
//! Indices and their counts stay on the device. An index outside its cache is no token, so nothing is read outside of it.

mod call;
mod gather;

pub use call::{Call, ChosenTokens, Found};

use super::blocks::{at, Blocks}; // at: address of an element of an fp32 tensor; Blocks: parts of parameter blocks, from a call's tensors
use super::inputs::{all_are_batch_invariant, Inputs, Target}; // Target: ATen on the CPU, or kernels
use super::launches::{fake_arrivals, launch_id, Launches};
use crate::error::{Error, Result};
use crate::launch::{bytes_of, Launcher, SCRATCH};
use crate::log;
use crate::options::Options;
use crate::params::{self, CacheFormat, DecodeParams, Divisor, SparseMlaParams};
use crate::plan;
use crate::problem::{self, Attention, Backend, DType};
// operand and output: address and strides for kernels; ranges are for the simulator; Absent: NONE, a block of null pointers and zeros
use crate::tensor::{self, describe, operand, output, read_range, readable, written_range, Absent};
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// Most bytes of lists and cast queries that exist at a time. Calls that need more run some queries after the others.
const SCRATCH_BYTES: i64 = 64 << 20;

/// Computes the operator on kernels or with ATen: [out, softmax_lse, max_logits].
pub fn forward(call: &Call) -> Result<Found> {
    if all_are_batch_invariant()? {
        return Err(Error::value("VOLTA_FA_BATCH_INVARIANT", "1", "0 for fwd_sparse_mla, which has no batch-invariant kernels"));
    }
    let target = Target::of(&describe(&call.q)?, call.stream)?;
    let a = validate(call, target.backend())?;
    let tokens = || std::iter::once(&call.own).chain(&call.extra);
    match target {
        _ if a.is_empty() => without_tokens(call, &a),
        Target::Kernels(launcher) if tokens().all(|t| is_readable(t, &a)) => on_device(call, &a, &*launcher),
        _ => gather::forward(call, &a),
    }
}

/// Rejects what [`forward`] would reject, as far as sizes of meta tensors are known.
pub fn check(call: &Call) -> Result<()> {
    validate(call, Backend::Meta).map(|_| ())
}

fn validate(call: &Call, backend: Backend) -> Result<Attention> {
    let described = |t: Option<&Tensor>| t.map(describe).transpose();
    // `unused`: tensors of a second cache that the call does not give, which validation rejects
    let (own, extra, [unused_indices, unused_lengths]) = (&call.own, call.extra.as_ref(), &call.unused);
    let (q, cache, indices, lengths) =
        (describe(&call.q)?, describe(&own.cache)?, describe(&own.indices)?, described(own.lengths.as_ref())?);
    let extra_cache = described(extra.map(|t| &t.cache))?;
    let extra_indices = described(extra.map(|t| &t.indices).or(unused_indices.as_ref()))?;
    let extra_lengths = described(extra.and_then(|t| t.lengths.as_ref()).or(unused_lengths.as_ref()))?;
    let sinks = described(call.sinks.as_ref())?;
    let own = problem::DescribedTokens { cache: Some(&cache), indices: Some(&indices), lengths: lengths.as_ref() };
    let extra = problem::DescribedTokens { cache: extra_cache.as_ref(), indices: extra_indices.as_ref(), lengths: extra_lengths.as_ref() };
    problem::validate_sparse(&q, &own, &extra, sinks.as_ref(), call.softmax_scale, backend)
}

/// Returns the results of queries without tokens: out 0, softmax_lse +inf as in all operators, max_logits -inf. q is (queries, nheads,
/// headdim); `a.batch` is the number of queries.
fn without_tokens(call: &Call, a: &Attention) -> Result<Found> {
    let full = |value| Tensor::f_full([a.batch, a.nheads], value, (Kind::Float, call.q.device()));
    let out = Tensor::f_zeros([a.batch, a.nheads, a.headdim_v], (call.q.kind(), call.q.device()))?;
    Ok([out, full(f64::INFINITY)?, full(f64::NEG_INFINITY)?])
}

/// Returns the bytes between rows of a cache as kernels read them. fp8 rows of headdim 512 lie together in a page, scales at its end.
fn row_stride(t: &Tensor, a: &Attention) -> i64 {
    match (a.cache_format(), a.headdim) {
        (CacheFormat::E4m3, 512) => 448 + 64 * 2, // fp8 columns, then 16-bit ones
        _ => t.stride()[1] * t.kind().elt_size_in_bytes() as i64,
    }
}

/// Returns true if kernels can read a cache: it has tokens, and rows begin on 16-byte boundaries.
fn is_readable(tokens: &ChosenTokens, a: &Attention) -> bool {
    const ALIGNMENT: i64 = 16;
    let t = &tokens.cache;
    let page_stride = t.stride()[0] * t.kind().elt_size_in_bytes() as i64;
    let are_aligned = [t.data_ptr() as i64, page_stride, row_stride(t, a)].iter().all(|n| n % ALIGNMENT == 0);
    t.size()[0] * t.size()[1] > 0 && are_aligned
}

/// Returns the parameters of a cache and of the tokens chosen from it; None: of no cache.
fn block(tokens: Option<&ChosenTokens>, a: &Attention) -> params::ChosenTokens {
    let Some(ChosenTokens { cache, indices, lengths }) = tokens else {
        return params::ChosenTokens { page_size: 1, ..params::ChosenTokens::NONE };
    };
    let size = cache.size();
    params::ChosenTokens {
        rows: cache.data_ptr() as *const u16,
        page_stride: cache.stride()[0] * cache.kind().elt_size_in_bytes() as i64,
        row_stride: row_stride(cache, a),
        page_size: size[1] as i32,
        count: (size[0] * size[1]) as i32,
        indices: indices.data_ptr() as *const i32,
        indices_stride: indices.stride()[0],
        topk: indices.size()[1] as i32,
        lengths: lengths.as_ref().map_or(null(), |t| t.data_ptr() as *const i32),
    }
}

/// Returns the tokens with contiguous rows of indices and contiguous lengths, which kernels read; copies them if necessary.
fn with_contiguous_indices(tokens: &ChosenTokens) -> Result<ChosenTokens> {
    let ChosenTokens { cache, indices, lengths } = tokens;
    let rows_lie_together = indices.size()[1] <= 1 || indices.stride()[1] == 1;
    Ok(ChosenTokens {
        cache: cache.shallow_clone(),
        indices: if rows_lie_together { indices.shallow_clone() } else { indices.f_contiguous()? },
        lengths: lengths.as_ref().map(Tensor::f_contiguous).transpose()?,
    })
}

/// Writes what the selecting kernel would, as if every index were valid. A simulator that times a launch runs a few of its blocks only.
fn fake_selection(
    own: &ChosenTokens,
    extra: Option<&ChosenTokens>,
    q: &Tensor,
    [lists, lengths]: [&Tensor; 2],
    [q_fp16, row_scales]: [Option<&Tensor>; 2],
) -> Result<()> {
    let rows = q.size()[0];
    // token n of the second cache is ~n
    let extra = extra.map(|t| t.indices.f_neg()?.f_add_scalar(-1)).transpose()?;
    let all: Vec<_> = std::iter::once(&own.indices).chain(&extra).collect();
    lists.f_narrow(0, 0, rows)?.f_copy_(&Tensor::f_cat(&all, 1)?)?;
    let _ = lengths.shallow_clone().f_fill_(lists.size()[1])?;
    if let (Some(q_fp16), Some(row_scales)) = (q_fp16, row_scales) {
        q_fp16.f_narrow(0, 0, rows)?.f_copy_(q)?;
        let _ = row_scales.shallow_clone().f_fill_(1.0)?;
    }
    Ok(())
}

/// Computes a call that has queries and tokens on kernels, some queries at a time.
fn on_device(call: &Call, a: &Attention, launcher: &dyn Launcher) -> Result<Found> {
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    let is_bf16 = a.dtype == DType::BFloat16;
    let (own, extra) = (with_contiguous_indices(&call.own)?, call.extra.as_ref().map(with_contiguous_indices).transpose()?);
    let q = readable(&call.q)?.f_unsqueeze(1)?;
    let sinks = call.sinks.as_ref().map(Tensor::f_contiguous).transpose()?;
    let out = empty(&[a.batch, 1, a.nheads, a.headdim_v], call.q.kind())?;
    let of_rows = || empty(&[a.batch, a.nheads], Kind::Float);
    let (softmax_lse, max_logits) = (of_rows()?, of_rows()?);

    // `list`: most tokens that a query can choose. `of_query`: bytes of its list (int32) and of its bf16 rows' fp16 copies and scales
    let list = a.seqlen_k; // of both caches
    let of_query = 4 * list + if is_bf16 { a.nheads * (2 * a.headdim + 4) } else { 0 };
    let at_once = (SCRATCH_BYTES / of_query).clamp(1, a.batch); // queries
    let limits = launcher.limits()?;
    let decode = plan::sparse_mla(a, &limits)?;
    let select = plan::sparse_select(a, at_once, &limits)?;
    log::sparse_mla(a, &select, &decode)?;
    let lists = empty(&[at_once, list], Kind::Int)?;
    let lengths = empty(&[at_once], Kind::Int)?;
    let q_fp16 = if is_bf16 { Some(empty(&[at_once, 1, a.nheads, a.headdim], Kind::Half)?) } else { None };
    let row_scales = if is_bf16 { Some(empty(&[at_once, a.nheads], Kind::Float)?) } else { None };
    // the selecting kernel's copy of the sinks, at most 1e30: a sink of infinity would make the sum of a row NaN
    let finite_sinks = sinks.as_ref().map(|_| empty(&[a.nheads], Kind::Float)).transpose()?;
    let scratch = empty(&[decode.partials + 2 * decode.semaphores], Kind::Float)?;

    let mut ranges = Vec::new();
    if launcher.looks_at_memory() {
        let tokens = own.parts().chain(extra.iter().flat_map(ChosenTokens::parts));
        ranges.extend([&q].into_iter().chain(&sinks).chain(tokens).map(|t| read_range("an argument", t)));
        let written = [&out, &softmax_lse, &max_logits, &lists, &lengths];
        let cast = q_fp16.iter().chain(&row_scales).chain(&finite_sinks);
        ranges.extend(written.into_iter().chain(cast).map(|t| written_range("a result or scratch", t)));
        ranges.push(written_range(SCRATCH, &scratch));
    }
    let launches = Launches::begin_with(launcher, ranges);
    for first in (0..a.batch).step_by(at_once as usize) {
        let rows = at_once.min(a.batch - first); // queries; rows of a cache are tokens
        let given = q.f_narrow(0, first, rows)?;
        let (own, extra) = (own.narrow(first, rows)?, extra.as_ref().map(|t| t.narrow(first, rows)).transpose()?);
        // The decode kernel finds keys by the lists, and takes no k and v. `Inputs` needs both, so q fills their places.
        let operands = [q_fp16.as_ref().unwrap_or(&given); 3].map(Tensor::shallow_clone);
        let sinks_of_decode = tensor::share(&finite_sinks);
        let options = Options { cache_seqlens: Some(lengths.shallow_clone()), sinks: sinks_of_decode, ..Options::default() };
        let inputs = Inputs::new(operands, options, call.stream);
        let Blocks { q: q_block, cache, problem, lengths: no_lengths, score_options, scales, .. } = Blocks::new(&inputs, a, (0, rows));
        let launch_id = launch_id();
        let params = SparseMlaParams {
            decode: DecodeParams {
                q: q_block,
                out: output(&out, first),
                softmax_lse: at(&softmax_lse, first * a.nheads),
                cache,
                problem,
                group: Divisor::new(problem.nheads / problem.nheads_k), // factor and shift that replace a division
                lengths: no_lengths,
                score_options,
                max_rows: i32::MAX, // of a query; no prefill kernel takes the longer ones
                num_splits: 0,      // no limit
                partials: at(&scratch, 0),
                semaphores: at(&scratch, decode.partials).cast(),
                launch_id,
                scales,
            },
            own: block(Some(&own), a),
            extra: block(extra.as_ref(), a),
            q: operand(&given, 0),
            q_fp16: q_fp16.as_ref().map_or(null_mut(), |t| t.data_ptr() as *mut u16),
            row_scales: row_scales.as_ref().map_or(null_mut(), |t| at(t, 0)),
            lists: lists.data_ptr() as *mut i32,
            list_stride: list,
            lengths: lengths.data_ptr() as *mut i32,
            sinks: sinks.as_ref().map_or(null(), |t| t.data_ptr() as *const f32),
            finite_sinks: finite_sinks.as_ref().map_or(null_mut(), |t| at(t, 0)),
            max_logits: at(&max_logits, first * a.nheads),
            tail_is_bf16: i32::from(!call.has_fp16_positions), // type of the 64 columns of positions at the end of an fp8 row
        };
        // planned for `at_once` queries; the last part may have fewer
        let select = plan::PlannedKernel { blocks: [rows as u32, select.blocks[1]], ..select };
        // 1: neither grid has a batch axis
        launches.run(&select, 1, bytes_of(&params))?;
        if !launcher.runs_all_blocks() {
            fake_selection(&own, extra.as_ref(), &given, [&lists, &lengths], [q_fp16.as_ref(), row_scales.as_ref()])?;
            fake_arrivals(&decode, &scratch, launch_id)?; // the semaphores of blocks that do not run count as set
        }
        launches.run(&decode.kernel, 1, bytes_of(&params))?;
    }
    Ok([out.f_squeeze_dim(1)?, softmax_lse, max_logits])
}
