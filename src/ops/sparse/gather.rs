//! Computes sparse MLA (`volta_fa::fwd_sparse_mla`) with ATen, in fp32, or fp64 for fp64 queries: on the CPU, and on a GPU for caches that
//! kernels cannot read (no tokens, or rows off 16-byte boundaries).
//!
//! Each query has a list of tokens of one cache (`call.own`), and may have one of a second (`call.extra`) in the same softmax. A token is a
//! latent: one vector, the key of all heads and, in its first 512 columns, the value. In [`Attention`] each query is a batch entry, and
//! seqlen_k the length of both lists.

use super::call::{Call, ChosenTokens, Found};
use crate::error::Result;
use crate::params::CacheFormat;
use crate::problem::Attention;
use crate::tensor::{compute_kind, copied};
use tch::{Kind, Tensor};

/// Most bytes of copied tokens that exist at a time.
const COPY_BYTES: i64 = 256 << 20;
/// The last columns of a row, which encode positions: 16-bit numbers in fp8 formats too.
const TAIL: i64 = 64;

/// Computes out (queries, nheads, 512) of q's type, softmax_lse and max_logits, both fp32 (queries, nheads), some queries at a time.
pub fn forward(call: &Call, a: &Attention) -> Result<Found> {
    // 16 bytes for each column of a chosen token: room for about four fp32 copies
    let at_once = (COPY_BYTES / (16 * a.seqlen_k * a.headdim)).clamp(1, a.batch);
    let mut parts: [Vec<Tensor>; 3] = Default::default();
    for first in (0..a.batch).step_by(at_once as usize) {
        let rows = at_once.min(a.batch - first);
        let q = call.q.f_narrow(0, first, rows)?;
        let mut chosen = vec![read(&call.own.narrow(first, rows)?, call, a)?];
        if let Some(extra) = &call.extra {
            chosen.push(read(&extra.narrow(first, rows)?, call, a)?);
        }
        let (tokens, missing): (Vec<_>, Vec<_>) = chosen.into_iter().unzip();
        let found = attend(&q, &Tensor::f_cat(&tokens, 1)?, &Tensor::f_cat(&missing, 1)?, call, a)?;
        for (part, found) in parts.iter_mut().zip(found) {
            part.push(found);
        }
    }
    let [out, lse, max_logits] = parts.map(|part| Tensor::f_cat(&part, 0));
    Ok([out?, lse?, max_logits?])
}

/// Returns the chosen tokens of a cache (queries, topk, headdim), 0 where an index is no token, and where that is, bool (queries, topk).
fn read(tokens: &ChosenTokens, call: &Call, a: &Attention) -> Result<(Tensor, Tensor)> {
    let ChosenTokens { cache, indices, lengths } = tokens;
    let [pages, page_size] = [cache.size()[0], cache.size()[1]];
    let index = indices.f_to_kind(Kind::Int64)?;
    let mut missing = index.f_lt(0)?.f_logical_or(&index.f_ge(pages * page_size)?)?;
    if let Some(lengths) = lengths {
        let number = Tensor::f_arange(index.size()[1], (Kind::Int64, index.device()))?;
        missing = missing.f_logical_or(&number.f_ge_tensor(&lengths.f_to_kind(Kind::Int64)?.f_unsqueeze(1)?)?)?;
    }
    if pages * page_size == 0 {
        let zeros = Tensor::f_zeros([index.size()[0], index.size()[1], a.headdim], (compute_kind(call.q.kind()), index.device()))?;
        return Ok((zeros, missing));
    }
    let index = index.f_masked_fill(&missing, 0)?;
    let place = [index.f_floor_divide_scalar(page_size)?, index.f_remainder(page_size)?];
    let at = |t: &Tensor| -> Result<Tensor> { Ok(t.f_index(&[Some(&place[0]), Some(&place[1])])?) };
    let rows = match a.cache_format() {
        CacheFormat::Unquantized => at(&cache.f_select(2, 0)?)?.f_to_kind(compute_kind(call.q.kind()))?,
        _ => dequantized(&cache.f_view_dtype(Kind::Uint8)?, &at, call, a)?,
    };
    Ok((rows.f_masked_fill(&missing.f_unsqueeze(-1)?, 0.0)?, missing))
}

/// Dequantizes tokens of an fp8 cache, given as bytes. `at` takes the chosen tokens from a tensor (pages, rows, ...).
///
/// A row of headdim 576 has 512 codes, four fp32 scales of 128 codes each, and 64 16-bit columns. Of headdim 512: 448 codes and 64 16-bit
/// columns; after all rows of a page come eight bytes for each, whose first seven are exponents of scales, of 64 codes each.
fn dequantized(cache: &Tensor, at: &dyn Fn(&Tensor) -> Result<Tensor>, call: &Call, a: &Attention) -> Result<Tensor> {
    let kind = compute_kind(call.q.kind());
    let [pages, page_size] = [cache.size()[0], cache.size()[1]];
    let codes = a.headdim - TAIL;
    let has_scales_at_end = a.headdim == 512;
    let (rows, scales) = if has_scales_at_end {
        let page = page_size * cache.size()[3];
        let flat = cache.f_as_strided([pages, page].as_slice(), [cache.stride()[0], 1].as_slice(), None)?;
        let of_rows = page_size * (codes + 2 * TAIL);
        let rows = flat.f_narrow(1, 0, of_rows)?.f_unflatten(1, [page_size, -1].as_slice())?;
        let exponents = at(&flat.f_narrow(1, of_rows, page - of_rows)?.f_unflatten(1, [page_size, -1].as_slice())?)?;
        // 2^(e - 127) has e in the exponent bits of fp32; 0 stands for 2^-127, and 255 for NaN
        let exponents = exponents.f_narrow(-1, 0, codes / 64)?.f_to_kind(Kind::Int)?;
        let powers = exponents.f_mul_scalar(1 << 23)?.f_clamp_min(1 << 22)?.f_view_dtype(Kind::Float)?;
        (at(&rows)?, powers.f_masked_fill(&exponents.f_eq(255)?, f64::NAN)?)
    } else {
        let rows = at(&cache.f_select(2, 0)?)?;
        let scales = rows.f_narrow(-1, codes, 16)?.f_contiguous()?.f_view_dtype(Kind::Float)?;
        (rows, scales)
    };
    let tail_kind = if call.has_fp16_positions { Kind::Half } else { Kind::BFloat16 };
    let bytes = rows.size()[rows.dim() - 1];
    let tail = rows.f_narrow(-1, bytes - 2 * TAIL, 2 * TAIL)?.f_contiguous()?.f_view_dtype(tail_kind)?.f_to_kind(kind)?;
    let values = rows.f_narrow(-1, 0, codes)?.f_contiguous()?.f_view_dtype(Kind::Float8e4m3fn)?.f_to_kind(Kind::Float)?.f_to_kind(kind)?;
    let tiles = scales.size()[scales.dim() - 1]; // runs of codes with one scale
    let values = values.f_unflatten(-1, [tiles, -1].as_slice())?.f_mul(&scales.f_to_kind(kind)?.f_unsqueeze(-1)?)?;
    let mut sizes = rows.size();
    *sizes.last_mut().expect("rows have dimensions") = codes;
    Ok(Tensor::f_cat(&[values.f_reshape(sizes.as_slice())?, tail], -1)?)
}

/// Attends from q (queries, nheads, headdim) to tokens (queries, tokens, headdim), except those that `missing` (queries, tokens) marks.
/// max_logits has largest scaled scores, softmax_lse natural logarithms. Sinks change out, but not softmax_lse. A query without tokens gets
/// out 0, softmax_lse +inf and max_logits -inf.
fn attend(q: &Tensor, tokens: &Tensor, missing: &Tensor, call: &Call, a: &Attention) -> Result<Found> {
    let kind = compute_kind(call.q.kind());
    let scores = q.f_to_kind(kind)?.f_contiguous()?.f_bmm(&tokens.f_transpose(1, 2)?)?.f_mul_scalar(a.softmax_scale)?;
    let scores = scores.f_masked_fill(&missing.f_unsqueeze(1)?, f64::NEG_INFINITY)?;
    let max_logits = scores.f_amax([-1_i64].as_slice(), true)?;
    let reference = max_logits.f_masked_fill(&max_logits.f_eq(f64::NEG_INFINITY)?, 0.0)?;
    let p = scores.f_sub(&reference)?.f_exp()?;
    let sum = p.f_sum_dim_intlist([-1_i64].as_slice(), true, kind)?;
    let is_empty = sum.f_eq(0.0)?;
    let mut whole = sum.shallow_clone();
    if let Some(sinks) = &call.sinks {
        whole = whole.f_add(&sinks.f_to_kind(kind)?.f_view([1, -1, 1])?.f_sub(&reference)?.f_exp()?)?;
    }
    let values = p.f_bmm(&tokens.f_narrow(-1, 0, a.headdim_v)?)?;
    let out = values.f_div(&whole)?.f_masked_fill(&is_empty, 0.0)?.f_to_kind(q.kind())?;
    let lse = copied(&sum, kind)?.f_log_()?.f_add(&reference)?.f_masked_fill(&is_empty, f64::INFINITY)?;
    let of_row = |t: &Tensor| -> Result<Tensor> { Ok(t.f_squeeze_dim(-1)?.f_to_kind(Kind::Float)?) };
    Ok([out, of_row(&lse)?, of_row(&max_logits)?])
}
