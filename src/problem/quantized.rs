//! The rules of quantized KV caches: what their types are, and what scales belong to them.

use super::kvcache::CacheOptions;
use super::*;
use crate::options::scale_of_latents;
use crate::params::CacheFormat;

/// What the elements of a cache are: its type says it. Latents are not kept in int4.
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
    /// Columns of a head, where so many elements of the tensor are theirs.
    pub fn columns(self, elements: i64) -> i64 {
        match self {
            CacheFormat::Int4 if elements != UNKNOWN => elements.saturating_mul(2),
            _ => elements,
        }
    }

    /// Whether each token and head has a scale, which appending writes.
    pub fn has_scales(self) -> bool {
        matches!(self, CacheFormat::Int8 | CacheFormat::Int4)
    }
}

/// The scales and zero points of caches of `sizes`: entries (pages), rows of each, nheads_k.
pub fn check_scales(o: &CacheOptions, format: CacheFormat, sizes: [i64; 3], batch: i64, q: &TensorDesc, has_latents: bool) -> Result<()> {
    let named = |name: &'static str| if has_latents { scale_of_latents(name) } else { Some(name) };
    let float = |name: &str, d: &TensorDesc| {
        if d.dtype != DType::Float {
            return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.float32"));
        }
        check_same(name, "device", d.device, "q", q.device)
    };
    let cache = match format {
        CacheFormat::Unquantized => "not quantized".into(),
        quantized => format!("{} ({})", quantized.name(), quantized_dtype(quantized)),
    };
    for (name, given) in o.token_scales() {
        let Some(name) = named(name) else { continue };
        let wanted = if name.ends_with("zero_point") { format == CacheFormat::Int4 } else { format.has_scales() };
        match (given, wanted) {
            (None, false) => {}
            (Some(_), false) => return Err(Error::value(name, "a tensor", format!("None: the caches are {cache}"))),
            (None, true) => {
                let allowed = format!("a tensor of shape {}, one for each token and head: the caches are {cache}", listed(&sizes));
                return Err(Error::value(name, "None", allowed));
            }
            (Some(d), true) => {
                float(name, d)?;
                if !same_sizes(&d.sizes, &sizes) {
                    let allowed = format!("shape {}, one for each token and head of the caches", listed(&sizes));
                    return Err(Error::value(name, shape(d), allowed));
                }
            }
        }
    }
    for (name, given) in [("k_descale", &o.k_descale), ("v_descale", &o.v_descale)] {
        let (Some(name), Some(d)) = (named(name), given) else { continue };
        if !matches!(format, CacheFormat::E5m2 | CacheFormat::E4m3) {
            return Err(Error::value(name, "a tensor", format!("None: the caches are {cache}")));
        }
        float(name, d)?;
        let nheads_k = sizes[2];
        let fits = match d.sizes[..] {
            [] => true,
            [n] => n == 1 || same_size(n, nheads_k),
            [entries, heads] => same_size(entries, batch) && same_size(heads, nheads_k),
            _ => false,
        };
        if !fits {
            let allowed = format!(
                "shape (1,), (nheads_k,) or (batch, nheads_k), here (1,), {} or {}",
                listed(&[nheads_k]),
                listed(&[batch, nheads_k])
            );
            return Err(Error::value(name, shape(d), allowed));
        }
    }
    Ok(())
}

fn quantized_dtype(format: CacheFormat) -> DType {
    match format {
        CacheFormat::Int8 => DType::Int8,
        CacheFormat::Int4 => DType::Uint8,
        CacheFormat::E5m2 => DType::Float8E5m2,
        CacheFormat::E4m3 => DType::Float8E4m3,
        CacheFormat::Unquantized | CacheFormat::Bf16 => unreachable!("not quantized"),
    }
}
