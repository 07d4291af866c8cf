//! Rules of what a `fwd_kvcache` call appends to its cache before it attends: k, v and the tables of a rotary embedding. cached.rs calls
//! [`check`]. Packed tensors have the rows of all sequences one after the other; unknown sizes pass.

use super::attention::{Appended, Rotary};
use super::cache::CacheShape;
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::lengths::check_lengths_vector;
use super::operands::{self, Packing, Sizes}; // Since(argument): packed, because it is given; Needs(argument): dense, without it
use super::tensor::{Backend, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// The cache that k and v are appended to.
pub struct Target<'a> {
    pub cache: &'a CacheShape,
    pub batch: i64,
    /// Queries of the longest sequence.
    pub seqlen_q: i64,
    /// Most keys that the cache can hold for a sequence.
    pub seqlen_k: i64,
    /// Sizes of q.
    pub queries: &'a Sizes,
}

/// Checks k and v to append, and the rotary tables. `packing`: whether q is packed, and by which argument.
pub fn check(
    appended: Option<[&TensorDesc; 2]>,
    o: &Options,
    q: &TensorDesc,
    to: &Target<'_>,
    packing: Packing<'_>,
    backend: Backend,
) -> Result<Appended> {
    let rotary = check_rotary(o, q, to.cache.headdim, appended.is_some())?;
    let Some([k, v]) = appended else {
        return match &o.cu_seqlens_k_new {
            Some(_) => Err(Error::value("cu_seqlens_k_new", "a tensor", "None: there are no k and v to append")),
            None => Ok(Appended { rotary, ..Appended::default() }),
        };
    };
    let packing = if o.cu_seqlens_k_new.is_some() { Packing::Since("cu_seqlens_k_new") } else { packing };
    let ks = operands::check_operand("k", k, q, packing, backend)?;
    let vs = operands::check_operand("v", v, q, packing, backend)?;
    if !same_sizes(&v.sizes[..v.sizes.len() - 1], &k.sizes[..k.sizes.len() - 1]) {
        return Err(Error::value("v", shape(v), format!("{}, that of k, but for the headdim", shape(k))));
    }
    for (name, sizes, headdim, cache) in [("k", &ks, to.cache.headdim, "k_cache"), ("v", &vs, to.cache.headdim_v, "v_cache")] {
        check_same_size(name, "nheads", sizes.nheads, cache, to.cache.nheads_k)?;
        check_same_size(name, "headdim", sizes.headdim, cache, headdim)?;
    }
    reject_if!(o.cache_seqlens.is_none(), "cache_seqlens", "None", "a tensor: k and v are appended after these lengths");
    let (seqlen, total) = check_lengths(o, q, &ks, to, packing)?;
    Ok(Appended { seqlen, total, rotary })
}

/// Checks the lengths of k. Returns the most tokens of a sequence and the rows of a packed k.
fn check_lengths(o: &Options, q: &TensorDesc, ks: &Sizes, to: &Target<'_>, packing: Packing<'_>) -> Result<(i64, Option<i64>)> {
    if let Some(cu) = &o.cu_seqlens_k_new {
        let count = if to.batch == UNKNOWN { UNKNOWN } else { to.batch + 1 };
        check_lengths_vector("cu_seqlens_k_new", cu, q, Some(count), "(batch + 1,)")?;
        return Ok((ks.rows, Some(ks.rows))); // no argument tells the longest sequence: at most all rows
    }
    if packing.is_packed() {
        check_same_size("k", "total", ks.rows, "q, since cu_seqlens_k_new is not given", to.queries.rows)?;
        return Ok((to.seqlen_q, Some(ks.rows)));
    }
    check_same_size("k", "batch", ks.batch, "q", to.batch)?;
    if ks.rows != UNKNOWN && to.seqlen_k != UNKNOWN && ks.rows > to.seqlen_k {
        let allowed = format!("at most {}, the room of a sequence", to.seqlen_k);
        return Err(Error::value("k", format!("seqlen {}", ks.rows), allowed));
    }
    Ok((ks.rows, None))
}

/// Checks the rotary tables: cosines and sines, with a row for each position and a column for each pair of rotated columns.
fn check_rotary(o: &Options, q: &TensorDesc, headdim: i64, appends: bool) -> Result<Rotary> {
    let (cos, sin) = match (&o.rotary_cos, &o.rotary_sin) {
        (None, None) => return Ok(Rotary::default()),
        (Some(cos), Some(sin)) => (cos, sin),
        (Some(_), None) => return Err(Error::value("rotary_sin", "None", "a tensor, since rotary_cos is given")),
        (None, Some(_)) => return Err(Error::value("rotary_cos", "None", "a tensor, since rotary_sin is given")),
    };
    reject_if!(!appends, "rotary_cos", "a tensor", "None: there are no k and v to append, by whose positions q is rotated");
    for (name, d) in [("rotary_cos", cos), ("rotary_sin", sin)] {
        check_dtype_of_q_or_fp32(name, d, q)?;
        check_device(name, d, q)?;
    }
    let is_too_wide = |n: i64| n != UNKNOWN && headdim != UNKNOWN && (n < 1 || 2 * n > headdim);
    let (rows, half) = match cos.sizes[..] {
        [rows, half] if !is_too_wide(half) => (rows, half),
        _ => {
            let allowed = format!("shape (seqlen_rotary, rotary_dim / 2) with rotary_dim at most headdim {}", number(headdim));
            return Err(Error::value("rotary_cos", shape(cos), allowed));
        }
    };
    reject_if!(sin.dtype != cos.dtype, "rotary_sin", format!("dtype {}", sin.dtype), format!("{}, that of rotary_cos", cos.dtype));
    reject_if!(!same_sizes(&sin.sizes, &cos.sizes), "rotary_sin", shape(sin), format!("{}, that of rotary_cos", shape(cos)));
    check_contiguous_last("rotary_cos", cos)?;
    check_contiguous_last("rotary_sin", sin)?;
    Ok(Rotary { dim: if half == UNKNOWN { UNKNOWN } else { 2 * half }, rows })
}
