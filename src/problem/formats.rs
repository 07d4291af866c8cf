//! Rules of quantized KV caches: their dtypes, and the scales that belong to them.

use super::attention::Cache;
use super::checks::*;
use super::tensor::{DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::kernels::{FormatInfo, ScaleGranularity};
use crate::options::{scale_of_latents, UNKNOWN};
use crate::params::CacheFormat;

/// Returns the format that the dtype of a cache means. Formats of one dtype differ by their scales: only a format with
/// scales of tokens needs some, so they decide.
pub fn cache_format(name: &str, cache: &TensorDesc, q: &TensorDesc, o: &Options, has_latents: bool) -> Result<CacheFormat> {
    let quantized = || CacheFormat::quantized().map(CacheFormat::info).filter(|row| row.of_latents || !has_latents);
    let dtype = cache.dtype.to_string();
    let given = if o.k_scale.is_some() { ScaleGranularity::Token } else { ScaleGranularity::Head };
    match quantized().filter(|row| row.dtype == dtype).min_by_key(|row| row.scale != given) {
        Some(row) => Ok(row.format),
        None if cache.dtype == q.dtype => Ok(CacheFormat::Unquantized),
        None => {
            // a dtype of whole bytes does not show that several columns share one
            let shown = |row: &FormatInfo| match row.columns() {
                1 => row.dtype.to_string(),
                _ => format!("{} ({})", row.dtype, row.name),
            };
            let listed: Vec<_> = quantized().map(shown).collect();
            let allowed = format!("{}, that of q, or of a quantized cache {}", q.dtype, listed.join(", "));
            Err(Error::value(name, format!("dtype {dtype}"), allowed))
        }
    }
}

impl CacheFormat {
    /// Columns that this many elements of a head hold.
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

    /// Returns true if the caller gives a scale for each head.
    fn has_descales(self) -> bool {
        self.info().scale == ScaleGranularity::Head
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
    let is_wanted = if name.ends_with("zero_point") { format.info().has_zero_point } else { format.has_scales() };
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
    match format.is_quantized() {
        true => format!("{} ({})", format.name(), format.info().dtype),
        false => "not quantized".into(),
    }
}
