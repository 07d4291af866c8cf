//! Rules of quantized KV caches: their dtypes, and the scales that belong to them.

use super::attention::Cache;
use super::checks::*;
use super::tensor::{DType, TensorDesc};
use super::Options;
use crate::error::{Error, Result};
use crate::options::{scale_of_latents, UNKNOWN};
use crate::params::CacheFormat;

/// Returns the format that the dtype of a cache means. Latents have no int4 format.
pub fn cache_format(name: &str, cache: &TensorDesc, q: &TensorDesc, has_latents: bool) -> Result<CacheFormat> {
    Ok(match cache.dtype {
        DType::Int8 => CacheFormat::Int8,
        DType::Uint8 if !has_latents => CacheFormat::Int4,
        DType::Float8E5m2 => CacheFormat::E5m2,
        DType::Float8E4m3 => CacheFormat::E4m3,
        own if own == q.dtype => CacheFormat::Unquantized,
        other => {
            let int4 = if has_latents { "" } else { " torch.uint8 (int4)," };
            let quantized = format!("torch.int8,{int4} torch.float8_e5m2 or torch.float8_e4m3fn");
            let allowed = format!("{}, that of q, or of a quantized cache {quantized}", q.dtype);
            return Err(Error::value(name, format!("dtype {other}"), allowed));
        }
    })
}

impl CacheFormat {
    /// Columns that this many elements of a head hold.
    pub fn columns(self, elements: i64) -> i64 {
        match self {
            CacheFormat::Int4 if elements != UNKNOWN => elements.saturating_mul(2),
            _ => elements,
        }
    }

    /// Returns true if each token and head has a scale, which an append writes.
    pub fn has_scales(self) -> bool {
        matches!(self, CacheFormat::Int8 | CacheFormat::Int4)
    }

    /// Returns true for the fp8 formats, whose scales the caller gives.
    fn has_descales(self) -> bool {
        matches!(self, CacheFormat::E5m2 | CacheFormat::E4m3)
    }
}

/// Checks the scales and zero points of a cache.
pub fn check_scales(o: &Options, cache: &Cache, nheads_k: i64, batch: i64, q: &TensorDesc, has_latents: bool) -> Result<()> {
    let named = |name: &'static str| if has_latents { scale_of_latents(name) } else { Some(name) };
    let sizes = [cache.entries, cache.rows, nheads_k];
    for (name, given) in o.token_scales() {
        if let Some(name) = named(name) {
            check_token_scale(name, given.as_ref(), cache.format, sizes, q)?;
        }
    }
    for (name, given) in [("k_descale", &o.k_descale), ("v_descale", &o.v_descale)] {
        if let (Some(name), Some(d)) = (named(name), given) {
            check_descale(name, d, cache.format, [batch, nheads_k], q)?;
        }
    }
    Ok(())
}

/// Checks a scale or zero point per token and head.
fn check_token_scale(name: &str, given: Option<&TensorDesc>, format: CacheFormat, sizes: [i64; 3], q: &TensorDesc) -> Result<()> {
    let is_wanted = if name.ends_with("zero_point") { format == CacheFormat::Int4 } else { format.has_scales() };
    let Some(d) = given else {
        if !is_wanted {
            return Ok(());
        }
        let (sizes, caches) = (listed(&sizes), described(format));
        return Err(Error::value(name, "None", format!("a tensor of shape {sizes}, one for each token and head: the caches are {caches}")));
    };
    if !is_wanted {
        return Err(Error::value(name, "a tensor", format!("None: the caches are {}", described(format))));
    }
    check_dtype(name, d, DType::Float)?;
    check_device(name, d, q)?;
    if !same_sizes(&d.sizes, &sizes) {
        return Err(Error::value(name, shape(d), format!("shape {}, one for each token and head of the caches", listed(&sizes))));
    }
    Ok(())
}

/// Checks a scale of an fp8 cache.
fn check_descale(name: &str, d: &TensorDesc, format: CacheFormat, [batch, nheads_k]: [i64; 2], q: &TensorDesc) -> Result<()> {
    if !format.has_descales() {
        return Err(Error::value(name, "a tensor", format!("None: the caches are {}", described(format))));
    }
    check_dtype(name, d, DType::Float)?;
    check_device(name, d, q)?;
    let fits = match d.sizes[..] {
        [] => true,
        [n] => n == 1 || same_size(n, nheads_k),
        [sequences, heads] => same_size(sequences, batch) && same_size(heads, nheads_k),
        _ => false,
    };
    if !fits {
        let (heads, both) = (listed(&[nheads_k]), listed(&[batch, nheads_k]));
        let allowed = format!("shape (1,), (nheads_k,) or (batch, nheads_k), here (1,), {heads} or {both}");
        return Err(Error::value(name, shape(d), allowed));
    }
    Ok(())
}

fn described(format: CacheFormat) -> String {
    let dtype = match format {
        CacheFormat::Int8 => DType::Int8,
        CacheFormat::Int4 => DType::Uint8,
        CacheFormat::E5m2 => DType::Float8E5m2,
        CacheFormat::E4m3 => DType::Float8E4m3,
        CacheFormat::Unquantized | CacheFormat::Bf16 => return "not quantized".into(),
    };
    format!("{} ({dtype})", format.name())
}
