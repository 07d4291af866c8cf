//! Rules of quantized KV caches: their dtypes, which decide the format, and their scales. cache.rs and cached.rs call them.
//!
//! int8 and int4 have a scale (int4 also a zero point) for each token and head, which an append writes. fp8 has a scale ("descale") for
//! each head, which the caller gives. A pair is a format whose keys and values have different formats (int8 keys, int4 values). The rows of
//! src/kernels/formats.rs say all that. Sizes that are symbolic (torch.compile's dynamic shapes) are [`UNKNOWN`]; checks leave them out.

use super::attention::Cache;
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::kernels::{FormatInfo, ScaleGranularity, FORMATS};
use crate::options::{scale_of_latents, UNKNOWN};
use crate::params::CacheFormat;

/// Returns the format that the dtype of keys, or of latents (`volta_fa::fwd_mla`), means.
pub fn key_format(name: &str, cache: &TensorDesc, q: &TensorDesc, has_latents: bool) -> Result<CacheFormat> {
    // the values decide about pairs (cache_format); no two other formats have one dtype
    let is_allowed = |row: &&FormatInfo| row.pair.is_none() && (row.of_latents || !has_latents);
    let quantized = || CacheFormat::quantized().map(CacheFormat::info).filter(is_allowed);
    let dtype = cache.dtype.to_string();
    match quantized().find(|row| row.dtype == dtype) {
        Some(row) => Ok(row.format),
        None if cache.dtype == q.dtype => Ok(CacheFormat::Unquantized),
        None => {
            let listed: Vec<_> = quantized().map(shown).collect();
            let allowed = format!("{}, that of q, or of a quantized cache {}", q.dtype, listed.join(", "));
            Err(Error::value(name, format!("dtype {dtype}"), allowed))
        }
    }
}

/// Returns the format of a cache whose keys have the format `keys`, by the dtype of its values: that format, or its pair with theirs.
pub fn cache_format(keys: CacheFormat, k_cache: &TensorDesc, v_cache: &TensorDesc) -> Result<CacheFormat> {
    if v_cache.dtype == k_cache.dtype {
        return Ok(keys);
    }
    let dtype = v_cache.dtype.to_string();
    let pairs = || FORMATS.iter().filter_map(|row| row.pair.map(|[k, v]| (k, v.info(), row.format))).filter(|(k, ..)| *k == keys);
    match pairs().find(|(_, values, _)| values.dtype == dtype) {
        Some((.., format)) => Ok(format),
        None => {
            let others: String = pairs().map(|(_, values, _)| format!(", or {}", shown(values))).collect();
            Err(Error::value("v_cache", format!("dtype {dtype}"), format!("{}, that of k_cache{others}", k_cache.dtype)))
        }
    }
}

/// Returns a format's dtype for an error, with its name if several columns share an element, which the dtype does not show.
fn shown(row: &FormatInfo) -> String {
    match row.columns() {
        1 => row.dtype.to_string(),
        _ => format!("{} ({})", row.dtype, row.name),
    }
}

impl CacheFormat {
    /// Returns the columns that this many elements of a head hold: two in an int4 byte, else one.
    pub fn columns(self, elements: i64) -> i64 {
        if elements == UNKNOWN {
            return elements;
        }
        elements.saturating_mul(self.info().columns())
    }

    /// Returns true if each token and head has a scale, which an append writes.
    pub fn has_scales(self) -> bool {
        self.info().scale == ScaleGranularity::Token
    }
}

/// Checks all scales and zero points of a cache. With `has_latents` (`fwd_mla`), latent_scale and latent_descale have the places of k_scale
/// and k_descale, and are named in errors; the options for values do not exist.
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
    let [keys, values] = format.parts();
    let own = if name.starts_with("v_") { values } else { keys };
    let is_wanted = if name.ends_with("zero_point") { own.info().has_zero_point } else { own.has_scales() };
    let Some(d) = given else {
        if !is_wanted {
            return Ok(());
        }
        let (sizes, caches) = (listed(&sizes), described(format));
        return Err(Error::value(name, "None", format!("a tensor of shape {sizes}, one for each token and head: the caches are {caches}")));
    };
    reject_if!(!is_wanted, name, "a tensor", format!("None: the caches are {}", described(format)));
    check_dtype(name, d, DType::Float)?;
    check_device(name, d, q)?;
    if !same_sizes(&d.sizes, &sizes) {
        return Err(Error::value(name, shape(d), format!("shape {}, one for each token and head of the caches", listed(&sizes))));
    }
    Ok(())
}

/// Checks a scale per head, or one for all, of an fp8 cache.
fn check_descale(name: &str, d: &TensorDesc, format: CacheFormat, [batch, nheads_k]: [i64; 2], q: &TensorDesc) -> Result<()> {
    let has_descales = format.info().scale == ScaleGranularity::Head;
    reject_if!(!has_descales, name, "a tensor", format!("None: the caches are {}", described(format)));
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

/// Names a format for an error: `int8 (torch.int8)`.
fn described(format: CacheFormat) -> String {
    let [keys, values] = format.parts().map(|part| part.info().dtype);
    match format.is_quantized() {
        true if format.is_pair() => format!("{} (k_cache {keys}, v_cache {values})", format.name()),
        true => format!("{} ({keys})", format.name()),
        false => "not quantized".into(),
    }
}
