//! Validation of `fwd_sparse_mla`: queries, caches of latents and the tokens that each query chose. A latent is one vector per token, which
//! is key and value of all heads. A second cache (`extra`) shares the softmax: DeepSeek V4 has a cache of a window of tokens and a
//! compressed one. src/ops/sparse.rs calls it.

use super::attention::{Attention, Cache, CacheLayout, Keys, Queries};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{Backend, DType, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{LATENT_HEADDIMS, MAX_HEADS, MAX_SEQLEN}; // 512, then 64 columns; 65535; 2^29 - 1
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)
use crate::params::CacheFormat;

/// Descriptions of a cache and of the tokens of it that each query chose, for checks; a second one may have neither.
pub struct DescribedTokens<'a> {
    /// (pages, page_size, 1, columns)
    pub cache: Option<&'a TensorDesc>,
    /// int32 (total_q, topk)
    pub indices: Option<&'a TensorDesc>,
    /// int32 (total_q): indices of each query that count, from the first on; None: all
    pub lengths: Option<&'a TensorDesc>,
}

/// Headdims, and bytes of a row of an fp8 cache: one-byte codes, scales (four fp32, or eight bytes of exponents), 64 columns of 16 bits.
const FP8_ROW_BYTES: [(i64, i64); 2] = [(576, 512 + 4 * 4 + 64 * 2), (512, 448 + 8 + 64 * 2)];

/// Checks a call. Returns its problem, in which each query is a batch entry, with as many keys as it has indices.
pub fn validate_sparse(
    q: &TensorDesc,
    own: &DescribedTokens,
    extra: &DescribedTokens,
    sinks: Option<&TensorDesc>,
    softmax_scale: Option<f64>,
    backend: Backend,
) -> Result<Attention> {
    check_compute_dtype("q", q, backend)?;
    let &[total_q, nheads, headdim] = &q.sizes[..] else {
        return Err(Error::value("q", rank(q), "rank 3, (total_q, nheads, headdim)"));
    };
    check_contiguous_last("q", q)?;
    check_at_most("q", "total_q", total_q, MAX_SEQLEN)?;
    check_at_most("q", "nheads", nheads, MAX_HEADS)?;
    if headdim != UNKNOWN && FP8_ROW_BYTES.iter().all(|(known, _)| *known != headdim) {
        return Err(Error::value("q", format!("headdim {headdim}"), "576 (DeepSeek V3.2) or 512 (V4)"));
    }
    if let (None, Some((name, _))) = (extra.cache, given(extra, "extra_indices", "extra_topk_length")) {
        return Err(Error::value("extra_cache", "None", format!("a cache, since {name} is given")));
    }
    // None: this cache decides the format
    let (format, topk) = check_tokens(["cache", "indices", "topk_length"], own, q, None)?;
    let (_, extra_topk) = match extra.cache {
        Some(_) => check_tokens(["extra_cache", "extra_indices", "extra_topk_length"], extra, q, Some(format))?,
        None => (format, 0),
    };
    let topk = if topk == UNKNOWN || extra_topk == UNKNOWN { UNKNOWN } else { topk + extra_topk };
    check_at_most("indices", "topk", topk, MAX_SEQLEN)?;
    if let Some(d) = sinks {
        check_dtype("sinks", d, DType::Float)?;
        check_device("sinks", d, q)?;
        check_length("sinks", d, nheads, "nheads")?;
    }
    // UNKNOWN is negative
    let softmax_scale = softmax_scale.unwrap_or((headdim.max(1) as f64).powf(-0.5));
    reject_if!(!(softmax_scale as f32).is_finite(), "softmax_scale", softmax_scale, "a number that is finite in float32");
    let cache = Cache { layout: CacheLayout::Entries, entries: total_q, rows: topk, format };
    Ok(Attention {
        batch: total_q,
        seqlen_q: 1,
        seqlen_k: topk,
        nheads,
        nheads_k: 1,
        headdim,
        headdim_v: LATENT_HEADDIMS[0], // 512: the values of a latent
        dtype: q.dtype,
        queries: Queries::Dense,
        keys: Keys::Latents(cache),
        softmax_scale,
        ..Attention::default() // no window, no other options
    })
}

/// Returns the first tensor that is given of these two.
fn given<'a>(tokens: &DescribedTokens<'a>, indices: &'static str, lengths: &'static str) -> Option<(&'static str, &'a TensorDesc)> {
    tokens.indices.map(|d| (indices, d)).or(tokens.lengths.map(|d| (lengths, d)))
}

/// Checks a cache, its indices and lengths, whose arguments have these names. Returns the format and the most tokens of a query.
/// `expected`: the format, if another cache decides it.
fn check_tokens(names: [&str; 3], tokens: &DescribedTokens, q: &TensorDesc, expected: Option<CacheFormat>) -> Result<(CacheFormat, i64)> {
    let [cache, indices, lengths] = names;
    let format = check_cache(cache, tokens.cache.expect("the caller has checked it"), q)?;
    if expected.is_some_and(|other| other != format) {
        let given = format!("{} elements", if format == CacheFormat::E4m3 { "fp8" } else { "16-bit" });
        return Err(Error::value(cache, given, "the format of cache"));
    }
    let none = || Error::value(indices, "None", format!("int32 (total_q, topk), since {cache} is given"));
    let d = tokens.indices.ok_or_else(none)?;
    let topk = d.sizes.get(1).copied().unwrap_or(UNKNOWN);
    check_dtype(indices, d, DType::Int32)?;
    check_device(indices, d, q)?;
    if !same_sizes(&d.sizes, &[q.sizes[0], topk]) {
        return Err(Error::value(indices, shape(d), format!("shape (total_q, topk), here ({}, topk)", number(q.sizes[0]))));
    }
    if let Some(d) = tokens.lengths {
        check_dtype(lengths, d, DType::Int32)?;
        check_device(lengths, d, q)?;
        check_length(lengths, d, q.sizes[0], "total_q")?;
    }
    Ok((format, topk))
}

/// Checks a cache and returns the format of its elements.
fn check_cache(name: &str, d: &TensorDesc, q: &TensorDesc) -> Result<CacheFormat> {
    let &[pages, page_size, heads, columns] = &d.sizes[..] else {
        return Err(Error::value(name, rank(d), "rank 4, (pages, page_size, 1, columns)"));
    };
    check_device(name, d, q)?;
    check_contiguous_last(name, d)?;
    let headdim = q.sizes[2];
    let is_fp8 = matches!(d.dtype, DType::Float8E4m3 | DType::Uint8 | DType::Int8);
    let row = if is_fp8 { FP8_ROW_BYTES.iter().find(|(known, _)| *known == headdim).map_or(UNKNOWN, |(_, bytes)| *bytes) } else { headdim };
    if !is_fp8 && d.dtype != q.dtype {
        let allowed = format!("{}, q's, or torch.float8_e4m3fn (torch.uint8, torch.int8) for rows of {} bytes", q.dtype, number(row));
        return Err(Error::value(name, format!("dtype {}", d.dtype), allowed));
    }
    if !same_size(heads, 1) || !same_size(columns, row) {
        let what = if is_fp8 { "bytes" } else { "columns" };
        let allowed =
            format!("shape (pages, page_size, 1, {}), {what} of a row beside queries of headdim {}", number(row), number(headdim));
        return Err(Error::value(name, shape(d), allowed));
    }
    if is_fp8 && page_size > 1 && !same_size(d.strides[1], row) {
        let given = format!("stride {} between rows", number(d.strides[1]));
        return Err(Error::value(name, given, format!("{}: the bytes of a page lie together", number(row))));
    }
    if pages != UNKNOWN && page_size != UNKNOWN {
        check_at_most(name, "tokens", pages.saturating_mul(page_size), i64::from(i32::MAX))?;
    }
    Ok(if is_fp8 { CacheFormat::E4m3 } else { CacheFormat::Unquantized })
}
