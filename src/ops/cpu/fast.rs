//! A model of the fast kernels (`fwd_fast`: int8 scores, fp16 sums) in ATen operations. It computes the operator on the CPU, and tests
//! compare the kernels with it. cpu/mod.rs calls it.
//!
//! - codes: int8 numbers of Q and K; a code times its scale is the number;
//! - block: 64 keys, with four scales: keys 8i + 2t and 8i + 2t + 1 have scale t;
//! - span: the keys of one step of the kernel, which sums P V of a span in fp16, and spans in fp32. V is divided by a power of two, so that
//!   it is below 1.
//!
//! The model has the kernels' codes and scales, bit for bit, flushes the same small probabilities to 0, and rounds sums to fp16 after each
//! 8 keys. It subtracts a row's final maximum from scores, kernels an earlier one, so probabilities may differ. Memory: O(seqlen).

use super::layout::narrow_broadcast; // a view of (dim, start, count) parts; dimensions of size 1 stay
use super::part::Part; // a dense problem, of entries with equal lengths
use crate::error::Result;
use crate::ops::codes::{kernel_headdim, Codes, SCALES, SCALE_KEYS};
use tch::{Device, Kind, Tensor};

/// Maximum number of evenly spaced keys in K's mean. csrc/turing/fast/codes.cuh has this and the next.
const MEAN_KEYS: i64 = 128;
/// Smallest scale: the product of two is a normal number, so that a score of -inf stays -inf.
const SMALLEST_SCALE: f64 = 1e-18;
/// Threads of the prepare kernel, and the keys of one of its blocks (src/kernels/turing/fast.rs). A thread has eight columns of a key, so
/// the number of keys that are summed side by side depends on the headdim.
const PREPARE_THREADS: i64 = 256;
const PREPARED_KEYS: i64 = 256;
/// Keys that one product adds to fp16 sums.
const PRODUCT_KEYS: i64 = 8;
/// 2^23. Rows whose largest score (log2 units) is above it have their scores' differences divided by largest / 2^23: fp32 is too coarse.
const TEMPERED_FROM: f64 = 8_388_608.0;
/// Query rows that are computed at once.
const CHUNK_ROWS: i64 = 256;
/// Log2 of the smallest probability, as packed in fp16, that is not 0: fp16's smallest normal number.
const LOG2_SMALLEST: f64 = -14.0;
const LN_2: f64 = std::f64::consts::LN_2;

/// Returns (headdim, keys of a span) of the kernel for this many columns. A span's K has 64 * 64 codes at any headdim.
fn tile(columns: i64) -> (i64, i64) {
    let headdim = kernel_headdim(columns);
    (headdim, 64 * 64 / headdim)
}

/// Writes the codes of K and V's largest magnitudes of a dense problem: [`Codes`] as `Span::codes` returns them, by batch entries.
pub fn prepare(part: &Part, smooth_k: bool, rotate: bool, codes: &Codes) -> Result<()> {
    let a = &part.a;
    if a.is_empty() {
        return Ok(());
    }
    let (headdim, span) = tile(a.headdim.max(a.headdim_v));
    for entry in 0..a.batch {
        for head in 0..a.nheads_k {
            let rows_of = |t: &Tensor, columns: i64| padded(&t.f_select(0, entry)?.f_select(1, head)?, columns);
            let to = |t: &Tensor| t.f_select(0, head)?.f_select(0, entry);
            let keys = Keys::new(&rows_of(&part.k, headdim)?, smooth_k, rotate)?;
            to(&codes.k_codes)?.f_copy_(&keys.codes.f_transpose(0, 1)?)?;
            // the first 2 * SCALES keys of a block have each scale twice, once for each key of a pair
            to(&codes.k_scales)?
                .f_copy_(&keys.scales.f_view([-1, SCALE_KEYS])?.f_narrow(1, 0, 2 * SCALES)?.f_view([-1, SCALES, 2])?.f_select(2, 0)?)?;
            to(&codes.k_mean)?.f_copy_(&keys.mean.f_squeeze_dim(1)?)?;
            let v = rows_of(&part.v, a.headdim_v)?;
            let mut v_max = to(&codes.v_max)?;
            let _ = v_max.f_zero_()?;
            let blocks = resized(&v, 0, round_up(a.seqlen_k, PREPARED_KEYS))?.f_view([-1, PREPARED_KEYS * a.headdim_v])?;
            v_max.f_narrow(0, 0, blocks.size()[0])?.f_copy_(&finite(&blocks)?.f_abs_()?.f_amax([1_i64].as_slice(), false)?)?;
            if let Some(scaled) = &codes.v_scaled {
                let values = Values::new(&v, &largest(&v)?, span, part.v.kind())?;
                let rows = values.v.f_reshape([-1, a.headdim_v])?.f_narrow(0, 0, a.seqlen_k)?;
                scaled.f_select(0, entry)?.f_select(1, head)?.f_narrow(1, 0, a.headdim_v)?.f_copy_(&rows)?;
            }
        }
    }
    Ok(())
}

/// Computes a dense problem into `out` (batch, seqlen_q, nheads, headdim_v) and `lse` (batch, nheads, seqlen_q).
pub fn forward(part: &Part, codes: &Codes, rotate: bool, out: &Tensor, lse: &Tensor) -> Result<()> {
    let a = &part.a;
    if a.is_empty() {
        let _ = (out.shallow_clone().f_zero_()?, lse.shallow_clone().f_fill_(f64::INFINITY)?);
        return Ok(());
    }
    let (headdim, span) = tile(a.headdim.max(a.headdim_v));
    let floats = |t: &Tensor, entry: i64, head: i64, columns: i64| padded(&t.f_select(0, entry)?.f_select(1, head)?, columns);
    for entry in 0..a.batch {
        for head_k in 0..a.nheads_k {
            let own = |t: &Tensor| t.f_select(0, head_k)?.f_select(0, entry);
            let keys = Keys::load(&own(&codes.k_codes)?, &own(&codes.k_scales)?, &own(&codes.k_mean)?)?;
            let v_max = own(&codes.v_max)?.f_amax([0_i64].as_slice(), false)?;
            let values = Values::new(&floats(&part.v, entry, head_k, a.headdim_v)?, &v_max, span, part.v.kind())?;
            let group = a.nheads / a.nheads_k;
            for head in head_k * group..(head_k + 1) * group {
                let q = floats(&part.q, entry, head, headdim)?.f_mul_scalar(if a.softmax_scale < 0.0 { -1.0 } else { 1.0 })?;
                let (out, lse) = (out.f_select(0, entry)?.f_select(1, head)?, lse.f_select(0, entry)?.f_select(0, head)?);
                let mut row = 0;
                while row < a.seqlen_q {
                    let rows = CHUNK_ROWS.min(a.seqlen_q - row);
                    let of_rows = |t: &Tensor| t.f_narrow(0, row, rows);
                    let hidden = hidden(part, entry, head, row, rows)?;
                    let (o, l) = attend(&of_rows(&q)?, &keys, &values, &hidden, a.softmax_scale.abs(), rotate)?;
                    of_rows(&out)?.f_copy_(&below_overflow(&o, part.v.kind())?)?;
                    of_rows(&lse)?.f_copy_(&l)?;
                    row += rows;
                }
            }
        }
    }
    Ok(())
}

/// Returns rows as fp32, with zeros up to `columns`.
fn padded(t: &Tensor, columns: i64) -> Result<Tensor> {
    resized(&t.f_to_kind(Kind::Float)?, 1, columns)
}

/// Returns `t` with zeros after it, so that a dimension has this size.
fn resized(t: &Tensor, dim: i64, size: i64) -> Result<Tensor> {
    let mut sizes = t.size();
    let present = std::mem::replace(&mut sizes[dim as usize], size);
    let copy = Tensor::f_zeros(&sizes, (t.kind(), Device::Cpu))?;
    copy.f_narrow(dim, 0, present)?.f_copy_(t)?;
    Ok(copy)
}

fn round_up(n: i64, multiple: i64) -> i64 {
    (n + multiple - 1) / multiple * multiple
}

fn matrix_product(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    Ok(x.f_unsqueeze(0)?.f_bmm(&y.f_unsqueeze(0)?)?.f_squeeze_dim(0)?)
}

/// Returns rows after a Hadamard transform, which spreads outliers over all columns, without its factor headdim ** -0.5, as kernels do.
fn hadamard(x: &Tensor) -> Result<Tensor> {
    let (rows, headdim) = x.size2()?;
    let mut x = x.shallow_clone();
    let mut step = 1;
    while step < headdim {
        let pairs = x.f_reshape([rows, headdim / (2 * step), 2, step])?;
        let (a, b) = (pairs.f_select(2, 0)?, pairs.f_select(2, 1)?);
        x = Tensor::f_stack(&[a.f_add(&b)?, a.f_sub(&b)?], 2)?.f_reshape([rows, headdim])?;
        step *= 2;
    }
    Ok(x)
}

/// Returns the mean of some keys, summed in the order of the prepare kernel.
fn mean(sample: &Tensor) -> Result<Tensor> {
    let (samples, headdim) = sample.size2()?;
    let apart = PREPARE_THREADS * 8 / headdim; // keys that the threads load at once, each in a sum of its own
    let sample = sample.f_mul_scalar(1.0 / MEAN_KEYS as f64)?;
    let rows = resized(&sample, 0, round_up(samples, apart))?.f_view([-1, apart, headdim])?;
    let sum = |rows: &Tensor| -> Result<Tensor> {
        let mut sum = rows.f_select(0, 0)?.f_zeros_like()?;
        for i in 0..rows.size()[0] {
            sum = sum.f_add(&rows.f_select(0, i)?)?;
        }
        Ok(sum)
    };
    let sum = sum(&sum(&rows)?)?;
    Ok(sum.f_div(&Tensor::f_full_like(&sum, samples as f64 / MEAN_KEYS as f64)?)?)
}

/// Returns the sum of 0 * x over these dimensions: 0, or NaN if an element is not finite.
fn poison(x: &Tensor, dims: &[i64]) -> Result<Tensor> {
    Ok(x.f_mul_scalar(0.0)?.f_sum_dim_intlist(dims, true, Kind::Float)?)
}

/// Returns a copy with 0 for what is not finite.
fn finite(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_add_scalar(0.0)?.f_nan_to_num_(0.0, 0.0, 0.0)?)
}

/// Returns codes and scales of x, with one scale over these dimensions. A scale is NaN if an element is not finite.
fn quantized(x: &Tensor, dims: &[i64]) -> Result<(Tensor, Tensor)> {
    let largest = x.f_abs()?.f_nan_to_num_(0.0, 0.0, 0.0)?.f_amax(dims, true)?;
    // 127 is the largest code; 1e-30 keeps the factor of zeros finite
    let factor = Tensor::f_full_like(&largest, 127.0)?.f_div(&largest.f_clamp_min(1e-30)?)?;
    // fp64 has the whole product: kernels round it once, to an integer
    let codes = finite(x)?.f_to_kind(Kind::Double)?.f_mul(&factor)?.f_round()?.f_to_kind(Kind::Float)?;
    let scale = largest.f_mul_scalar(1.0 / 127.0)?.f_clamp_min(SMALLEST_SCALE)?.f_add(&poison(x, dims)?)?;
    Ok((codes, scale))
}

/// Codes of K and what makes scores of them.
struct Keys {
    /// (headdim, keys rounded up)
    codes: Tensor,
    /// (keys rounded up)
    scales: Tensor,
    /// (headdim, 1)
    mean: Tensor,
}

impl Keys {
    /// Quantizes K (keys, headdim): less its mean with `smooth`, after a Hadamard transform with `rotate`.
    fn new(k: &Tensor, smooth: bool, rotate: bool) -> Result<Keys> {
        let (count, headdim) = k.size2()?;
        let samples = count.min(MEAN_KEYS);
        let positions: Vec<i64> = (0..samples).map(|i| i * count / samples).collect();
        let sample = k.f_index_select(0, &Tensor::f_from_slice(&positions)?)?;
        let mean = if smooth { mean(&finite(&sample)?)? } else { Tensor::f_zeros([headdim], (Kind::Float, Device::Cpu))? };
        let mut x = k.f_sub(&mean)?;
        if rotate {
            x = hadamard(&x)?;
        }
        // block, pair of keys, scale, key of the pair
        let rows = round_up(count, SCALE_KEYS);
        let x = resized(&x, 0, rows)?.f_view([rows / SCALE_KEYS, SCALE_KEYS / SCALES / 2, SCALES, 2, headdim])?;
        let (codes, scales) = quantized(&x, &[1, 3, 4])?;
        let scales = scales.f_expand([rows / SCALE_KEYS, SCALE_KEYS / SCALES / 2, SCALES, 2, 1], false)?.f_reshape([rows])?;
        let codes = codes.f_reshape([rows, headdim])?.f_transpose(0, 1)?.f_contiguous()?;
        Ok(Keys { codes, scales, mean: mean.f_unsqueeze(1)? })
    }

    /// Returns the keys of codes (keys rounded up, headdim), scales (blocks, 4) and a mean (headdim).
    fn load(codes: &Tensor, scales: &Tensor, mean: &Tensor) -> Result<Keys> {
        let (rows, blocks) = (codes.size()[0], scales.size()[0]);
        let of_keys = [blocks, SCALE_KEYS / SCALES / 2, SCALES, 2];
        let scales = scales.f_view([blocks, 1, SCALES, 1])?.f_expand(of_keys, false)?.f_reshape([rows])?;
        let codes = codes.f_to_kind(Kind::Float)?.f_transpose(0, 1)?.f_contiguous()?;
        Ok(Keys { codes, scales, mean: mean.f_unsqueeze(1)? })
    }
}

fn largest(v: &Tensor) -> Result<Tensor> {
    Ok(finite(v)?.f_abs_()?.f_amax([0_i64, 1].as_slice(), false)?)
}

/// V below 1 in magnitude, as fp16 numbers.
struct Values {
    /// (spans, products of a span, keys of a product, headdim_v)
    v: Tensor,
    /// What V was divided by.
    power: f64,
}

impl Values {
    /// Scales V (keys, headdim_v) of type `kind`. `largest`: the largest magnitude of the sequence's V.
    fn new(v: &Tensor, largest: &Tensor, span: i64, kind: Kind) -> Result<Values> {
        let (count, columns) = v.size2()?;
        let (_, exponent) = largest.f_frexp()?;
        // at least these, so that the inverse of a factor 2^-exponent is a normal number (`v_exponent` in csrc/turing/fast/codes.cuh)
        let exponent = exponent.f_int64_value(&[])?.max(if kind == Kind::BFloat16 { -126 } else { -14 }) as i32;
        let rows = round_up(count, span);
        let scaled = v.f_mul_scalar(2f64.powi(-exponent))?.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float)?;
        let v = resized(&scaled, 0, rows)?.f_view([rows / span, span / PRODUCT_KEYS, PRODUCT_KEYS, columns])?;
        Ok(Values { v, power: 2f64.powi(exponent) })
    }
}

/// Returns which keys rows do not see: (rows, keys).
fn hidden(part: &Part, entry: i64, head: i64, row: i64, rows: i64) -> Result<Tensor> {
    let a = &part.a;
    let positions = |start: i64, count: i64| Tensor::f_arange_start(start, start + count, (Kind::Int64, Device::Cpu));
    let distances = positions(0, a.seqlen_k)?.f_sub(&positions(row + a.seqlen_k - a.seqlen_q, rows)?.f_unsqueeze(1)?)?;
    // a side without a bound: 2^40 keys, more than any sequence has
    let before = distances.f_lt(a.window.left.map_or(-(1_i64 << 40), |left| -left))?;
    let mut hidden = before.f_logical_or(&distances.f_le(a.window.right.unwrap_or(1 << 40))?.f_logical_not()?)?;
    if let Some(mask) = &part.attn_bias {
        let mask = narrow_broadcast(mask, [(0, entry, 1), (1, head, 1), (2, row, rows)])?;
        hidden = hidden.f_logical_or(&mask.f_squeeze_dim(0)?.f_squeeze_dim(0)?.f_logical_not()?)?;
    }
    Ok(hidden)
}

/// Rounds outputs that exceed fp16's largest number (65504) by rounding alone down to it: a mean of V is no larger than V. Rounding does
/// not reach 66000, so larger numbers stay, and become infinite in fp16.
fn below_overflow(x: &Tensor, kind: Kind) -> Result<Tensor> {
    let largest = f64::from(half::f16::MAX);
    if kind != Kind::Half {
        return Ok(x.shallow_clone());
    }
    Ok(x.f_clamp(-largest, largest)?.f_where_self(&x.f_abs()?.f_lt(66000.0)?, x)?)
}

/// Returns out and log-sum-exp of some rows of one head. `hidden`: (rows, keys). `scale`: of scores, positive.
fn attend(q: &Tensor, keys: &Keys, values: &Values, hidden: &Tensor, scale: f64, rotate: bool) -> Result<(Tensor, Tensor)> {
    let (rows, headdim) = q.size2()?;
    let (count, columns) = (hidden.size()[1], values.v.size()[3]);
    let [spans, products] = [values.v.size()[0], values.v.size()[1]];
    // a scale of 0 counts as 1e-30 (src/plan/features.rs)
    let log2_scale = scale.max(1e-30) / LN_2;
    // unit: what 1 in a product of transformed q and k is worth as a score
    let (x, unit) = match rotate {
        true => (hadamard(q)?, log2_scale / headdim as f64),
        false => (q.shallow_clone(), log2_scale),
    };
    let (codes, q_scale) = quantized(&x, &[1])?;
    let q_scale = q_scale.f_mul_scalar(unit)?;
    let q_scale = q_scale.f_maximum(&Tensor::f_full_like(&q_scale, SMALLEST_SCALE)?)?;
    // (rows, keys) in log2 units
    let scores = matrix_product(&codes, &keys.codes)?.f_mul(&q_scale.f_mul(&keys.scales)?)?.f_narrow(1, 0, count)?;
    let scores = scores.f_masked_fill(hidden, f64::NEG_INFINITY)?;
    let maximum = scores.f_amax([1_i64].as_slice(), true)?;
    let maximum = maximum.f_masked_fill(&maximum.f_eq(f64::NEG_INFINITY)?, 0.0)?;
    // log2 of what a probability of 1 is packed as: a span of ones sums to 2^11. Kernels, whose maxima lag, let it grow to 2^15.
    let one = f64::from(15 - (products * PRODUCT_KEYS).ilog2() as i32 - 4);
    let largest = Tensor::f_full_like(&maximum, TEMPERED_FROM)?;
    let inverse_temperature = largest.f_div(&maximum.f_abs()?.f_clamp_min(TEMPERED_FROM)?)?;
    let exponents = scores.f_sub(&maximum)?.f_mul(&inverse_temperature)?.f_add_scalar(one)?;
    let flushed = exponents.f_lt(LOG2_SMALLEST)?;
    let p = exponents.f_mul_scalar(LN_2)?.f_exp_()?.f_masked_fill(&flushed, 0.0)?;
    let sum = p.f_sum_dim_intlist([1_i64].as_slice(), true, Kind::Float)?;
    let p = resized(&p.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float)?, 1, spans * products * PRODUCT_KEYS)?;
    let p = p.f_view([rows, spans, products, PRODUCT_KEYS])?.f_permute([1, 2, 0, 3])?;
    let mut sums = Tensor::f_zeros([spans, rows, columns], (Kind::Float, Device::Cpu))?;
    for i in 0..products {
        let of_keys = p.f_select(1, i)?.f_contiguous()?.f_bmm(&values.v.f_select(1, i)?.f_contiguous()?)?;
        sums = sums.f_add(&of_keys)?.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float)?;
    }
    let is_empty = sum.f_eq(0.0)?;
    let out = sums.f_sum_dim_intlist([0_i64].as_slice(), false, Kind::Float)?.f_div(&sum)?.f_mul_scalar(values.power)?;
    let mean_score = matrix_product(q, &keys.mean)?.f_mul_scalar(scale)?;
    let lse = sum.shallow_clone().f_log_()?.f_add(&maximum.f_add_scalar(-one)?.f_mul_scalar(LN_2)?)?.f_add(&mean_score)?;
    let lse = lse.f_masked_fill(&is_empty, f64::INFINITY)?.f_squeeze_dim(1)?;
    Ok((out.f_masked_fill(&is_empty, 0.0)?, lse))
}
