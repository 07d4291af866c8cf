//! Quantizes and dequantizes keys and values of a KV cache with ATen operations, for gather.rs: elements of a quantized cache are codes,
//! and number = (code - zero_point) * scale. Results are bitwise identical to python/volta_fa/kv_cache/formats.py.

use crate::error::Result;
use crate::params::CacheFormat;
use crate::tensor::compute_kind;
use tch::{Kind, Scalar, Tensor};

/// Quantized keys or values of some tokens: (..., nheads_k, elements of a head).
pub struct Quantized {
    /// Format of these keys or values: never unquantized, and of a pair of formats one of the two.
    pub format: CacheFormat,
    /// Bytes, in every format.
    pub data: Tensor,
    /// int8 and int4: (..., nheads_k). fp8: a tensor that broadcasts to it.
    pub scale: Option<Tensor>,
    /// int4: (..., nheads_k).
    pub zero_point: Option<Tensor>,
}

/// Returns the ATen type of the elements; of a pair, that of keys. Callers have no unquantized cache: its arm only completes the match.
fn element(format: CacheFormat) -> Kind {
    match format {
        CacheFormat::Int8 | CacheFormat::Int8Int4 => Kind::Int8,
        CacheFormat::Int4 | CacheFormat::Unquantized => Kind::Uint8,
        CacheFormat::E5m2 => Kind::Float8e5m2,
        CacheFormat::E4m3 => Kind::Float8e4m3fn,
    }
}

/// Views a cache as bytes: ATen has few operations for the formats, but indexes bytes.
pub fn bytes(cache: &Tensor, format: CacheFormat) -> Result<Tensor> {
    Ok(match format {
        CacheFormat::Unquantized => cache.shallow_clone(),
        _ => cache.f_view_dtype(Kind::Uint8)?,
    })
}

impl Quantized {
    /// Dequantizes in fp32 (fp64 for `kind` fp64) and rounds to `kind`.
    pub fn dequantize(&self, kind: Kind) -> Result<Tensor> {
        let exact = compute_kind(kind);
        let factor = |t: &Tensor| -> Result<Tensor> { Ok(t.f_to_kind(exact)?.f_unsqueeze(-1)?) };
        let mut x = match self.format {
            CacheFormat::Int4 => {
                // a byte has two columns, the first in its lower four bits
                let codes = self.data.f_to_kind(Kind::Int)?;
                let halves = [codes.f_remainder(16)?, codes.f_floor_divide_scalar(16)?];
                let mut sizes = self.data.size();
                *sizes.last_mut().expect("a cache has dimensions") *= 2;
                Tensor::f_stack(&halves, -1)?.f_reshape(sizes.as_slice())?.f_to_kind(exact)?
            }
            _ => self.data.f_view_dtype(element(self.format))?.f_to_kind(Kind::Float)?.f_to_kind(exact)?,
        };
        if let Some(zero_point) = &self.zero_point {
            x = x.f_sub(&factor(zero_point)?)?;
        }
        if let Some(scale) = &self.scale {
            x = x.f_mul(&factor(scale)?)?;
        }
        Ok(x.f_to_kind(kind)?)
    }

    /// Quantizes (..., nheads_k, headdim) numbers. fp8 takes the caller's `scale`, or 1. int8 and int4 get a scale for each token and head:
    /// int8 maps the largest magnitude to 127, int4 the range of numbers to 0 to 15. Rows with inf or NaN have scale NaN.
    pub fn new(x: &Tensor, format: CacheFormat, scale: Option<&Tensor>) -> Result<Quantized> {
        let x = x.f_to_kind(Kind::Float)?;
        let largest = f64::from(format.info().max_code);
        if !format.has_scales() {
            let scaled = match scale {
                Some(scale) => x.f_div(&scale.f_unsqueeze(-1)?)?,
                None => x,
            };
            let data = scaled.f_clamp(-largest, largest)?.f_to_kind(element(format))?.f_view_dtype(Kind::Uint8)?;
            return Ok(Quantized { format, data, scale: None, zero_point: None });
        }
        let (low, high) = (x.f_amin([-1_i64].as_slice(), false)?, x.f_amax([-1_i64].as_slice(), false)?);
        let finite = |t: &Tensor| -> Result<Tensor> { Ok(t.f_abs()?.f_le(f64::from(f32::MAX))?) };
        let wrong = finite(&low)?.f_logical_and(&finite(&high)?)?.f_logical_not()?;
        // by a tensor: on GPUs ATen divides by a number as a product with its inverse, which rounds otherwise
        let divided = |t: Tensor| -> Result<Tensor> { Ok(t.f_div(&Tensor::f_full_like(&t, Scalar::float(largest))?)?) };
        let is_int4 = format.info().has_zero_point;
        let (scale, zero_point, quotients) = if is_int4 {
            // The range of a row may overflow. Then its codes are computed from halves of its numbers, which are exact. Else `unit` is 1.
            let ones = Tensor::f_full_like(&low, Scalar::float(1.0))?;
            let unit = ones.f_masked_fill(&high.f_sub(&low)?.f_eq(f64::INFINITY)?, 0.5)?;
            let (x, low, high) = (x.f_mul(&unit.f_unsqueeze(-1)?)?, low.f_mul(&unit)?, high.f_mul(&unit)?);
            let spread = divided(high.f_sub(&low)?)?;
            // if all numbers of a row are equal, the step is their magnitude: code 0, with a zero point of 1 or -1, stands for them
            let step = low.f_abs()?.f_where_self(&spread.f_eq(0.0)?, &spread)?;
            let zero = low.f_neg()?.f_div(&step)?.f_masked_fill(&step.f_eq(0.0)?, 0.0)?;
            (step.f_div(&unit)?, Some(zero), x.f_sub(&low.f_unsqueeze(-1)?)?.f_div(&step.f_unsqueeze(-1)?)?)
        } else {
            let scale = divided(low.f_neg()?.f_maximum(&high)?)?;
            let quotients = x.f_div(&scale.f_unsqueeze(-1)?)?;
            (scale, None, quotients)
        };
        let mut codes = quotients.f_round()?.f_nan_to_num_(0.0, Some(0.0), Some(0.0))?;
        codes = codes.f_clamp(if is_int4 { 0.0 } else { -largest }, largest)?.f_masked_fill(&wrong.f_unsqueeze(-1)?, 0.0)?;
        let data = match is_int4 {
            false => codes.f_to_kind(Kind::Int8)?.f_view_dtype(Kind::Uint8)?,
            true => {
                let mut pairs = codes.size();
                *pairs.last_mut().expect("it has dimensions") /= 2;
                pairs.push(2);
                let pairs = codes.f_reshape(pairs.as_slice())?;
                pairs.f_select(-1, 0)?.f_add(&pairs.f_select(-1, 1)?.f_mul_scalar(16.0)?)?.f_to_kind(Kind::Uint8)?
            }
        };
        let or_nan = |t: Tensor| -> Result<Tensor> { Ok(t.f_masked_fill(&wrong, f64::NAN)?) };
        Ok(Quantized { format, data, scale: Some(or_nan(scale)?), zero_point: zero_point.map(or_nan).transpose()? })
    }
}
