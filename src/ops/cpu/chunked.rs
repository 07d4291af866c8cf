//! Computes attention with ATen's batched matrix products, chunk by chunk, for problems that flash.rs does not cover. dense.rs calls it.
//!
//! - group: one KV head of one batch entry with its query heads;
//! - [`Chunk`]: some query positions of some groups, with all keys that any of them sees. Its scores are a matrix (groups, rows * heads of
//!   a group, keys), which fits a CPU's caches. It has whole rows, so the softmax needs no rescaling;
//! - [`Part`] (part.rs): one dense problem of the call, whose first batch entry is number `first` of the call's;
//! - [`Sums`]: gradients to which all parts add.

use super::block_mask::PresentBlock;
use super::chunk::{chunks, heads_per_group, window_offsets, Chunk}; // window_offsets: (first, last), query i sees keys i + first..=i + last
use super::layout::{from_groups, lse_from_rows, rows_from_lse, to_groups}; // between (batch, seqlen, heads, ...) and a matrix per group
use super::part::{Part, Sums};
// modify: score function, ALiBi and bias, in place; multiply_derivative: by the score function's; bias_of_group and group_of: one group's
// part of a bias and of a chunk's matrix, both (heads, rows, keys)
use super::scores::{bias_of_group, dropout_factors, group_of, has_derivative, modify, multiply_derivative};
use crate::error::Result;
use crate::tensor::compute_kind;
use tch::{Device, Kind, Tensor};

/// An operand of a product with probabilities or gradients of scores. Those of a block mask's absent blocks are 0, but 0 * NaN and
/// 0 * infinity are NaN. So a product takes `finite` in all blocks of a chunk, and `rest` only in present ones.
struct Operand {
    /// 0 for elements that are not finite.
    finite: Tensor,
    /// 0 for finite elements. None: all are finite, or the call has no block mask.
    rest: Option<Tensor>,
}

impl Operand {
    fn new(t: &Tensor, part: &Part) -> Result<Self> {
        if part.blocks.is_none() || is_finite(t)? {
            return Ok(Operand { finite: t.shallow_clone(), rest: None });
        }
        let finite = t.f_abs()?.f_lt(f64::INFINITY)?;
        Ok(Operand { finite: t.f_masked_fill(&finite.f_logical_not()?, 0.0)?, rest: Some(t.f_masked_fill(&finite, 0.0)?) })
    }
}

/// Returns true if no element is infinite or NaN.
fn is_finite(t: &Tensor) -> Result<bool> {
    let all: [i64; 0] = [];
    if t.numel() == 0 {
        return Ok(true);
    }
    let above = t.f_amin(all, false)?.f_neg()?.f_lt(f64::INFINITY)?;
    Ok(above.f_logical_and(&t.f_amax(all, false)?.f_lt(f64::INFINITY)?)?.f_int64_value(&[])? != 0)
}

/// A problem with tensors in the layout of the matrix products: (groups, rows * heads, headdim) and (groups, keys, headdim).
struct Work<'a> {
    part: &'a Part,
    heads: i64, // query heads of a group
    /// Type of the arithmetic.
    kind: Kind,
    chunks: Vec<Chunk>,
    scaled_q: Tensor, // q * softmax_scale
    k: Tensor,
    v: Tensor,
}

impl<'a> Work<'a> {
    fn new(part: &'a Part) -> Result<Self> {
        let a = &part.a;
        let kind = compute_kind(part.q.kind());
        let heads = heads_per_group(a);
        Ok(Work {
            part,
            heads,
            kind,
            chunks: match &part.blocks {
                Some(blocks) => chunks(a).into_iter().filter_map(|c| blocks.narrowed(a, part.first, c)).collect(),
                None => chunks(a),
            },
            scaled_q: to_groups(&part.q, heads, kind)?.f_mul_scalar(a.softmax_scale)?,
            k: to_groups(&part.k, 1, kind)?,
            v: to_groups(&part.v, 1, kind)?,
        })
    }

    /// Allocates memory for the scores of the largest chunk, once, because new memory of this size would fault its pages in each chunk.
    fn buffer(&self) -> Result<Tensor> {
        let scores = self.chunks.iter().map(|c| c.groups * c.rows * self.heads * c.keys).max().unwrap_or(0);
        Ok(Tensor::f_empty([scores], (self.kind, Device::Cpu))?)
    }

    /// Returns the chunk's (groups, rows * heads, keys) matrix in a buffer.
    fn matrix(&self, buffer: &Tensor, c: &Chunk) -> Result<Tensor> {
        let rows = c.rows * self.heads;
        Ok(buffer.f_narrow(0, 0, c.groups * rows * c.keys)?.f_view([c.groups, rows, c.keys])?)
    }

    /// Returns the chunk's part of a tensor with a row per query and head.
    fn rows(&self, t: &Tensor, c: &Chunk) -> Result<Tensor> {
        Ok(t.f_narrow(0, c.group, c.groups)?.f_narrow(1, c.row * self.heads, c.rows * self.heads)?)
    }

    /// Returns the chunk's part of a tensor with a row per key.
    fn keys(&self, t: &Tensor, c: &Chunk) -> Result<Tensor> {
        Ok(t.f_narrow(0, c.group, c.groups)?.f_narrow(1, c.key, c.keys)?)
    }

    /// Computes the logits of the chunk in `buffer`, -inf for hidden keys. `kept` receives what [`multiply_derivative`] takes:
    /// the softcap's tanh of each score.
    fn scores(&self, buffer: &Tensor, kept: Option<&mut Tensor>, c: &Chunk) -> Result<Tensor> {
        let mut scores = self.matrix(buffer, c)?;
        let _ = self.rows(&self.scaled_q, c)?.f_bmm_out(&scores, &self.keys(&self.k, c)?.f_transpose(1, 2)?)?;
        modify(&mut scores, self.part, c, kept)?;
        self.mask(&scores, c)?;
        Ok(scores)
    }

    /// Fills -inf where the chunk's window or a block mask hides a key. A window hides only columns of a triangle at either end. Adding
    /// -inf instead would turn +inf into NaN.
    fn mask(&self, scores: &Tensor, c: &Chunk) -> Result<()> {
        let (first, last) = window_offsets(&self.part.a);
        let by_head = scores.f_view([c.groups, c.rows, self.heads, c.keys])?;
        let end = c.key + c.keys;
        let bools = (Kind::Bool, Device::Cpu);
        // hidden on the right: key > row + last
        let right = (c.row + last + 1).max(c.key);
        if right < end {
            let hidden = Tensor::f_full([c.rows, end - right], 1, bools)?.f_triu(c.row + last + 1 - right)?;
            let _ = by_head.f_narrow(3, right - c.key, end - right)?.f_masked_fill_(&hidden.f_unsqueeze(1)?, f64::NEG_INFINITY)?;
        }
        // hidden on the left: key < row + first
        let left = (c.row + c.rows - 1 + first).min(end);
        if left > c.key {
            let hidden = Tensor::f_full([c.rows, left - c.key], 1, bools)?.f_tril(c.row + first - 1 - c.key)?;
            let _ = by_head.f_narrow(3, 0, left - c.key)?.f_masked_fill_(&hidden.f_unsqueeze(1)?, f64::NEG_INFINITY)?;
        }
        if let Some(blocks) = &self.part.blocks {
            let mut by_head = by_head;
            let _ = by_head.f_masked_fill_(&blocks.hidden(&self.part.a, self.part.first, c)?, f64::NEG_INFINITY)?;
        }
        Ok(())
    }

    /// Returns a present block's part of the chunk's [`Work::rows`]: (1, rows, columns).
    fn block_rows(&self, rows: &Tensor, c: &Chunk, b: &PresentBlock) -> Result<Tensor> {
        let by_head = rows.f_narrow(0, b.group, 1)?.f_view([1, c.rows, self.heads, rows.size()[2]])?;
        Ok(by_head.f_select(2, b.head)?.f_narrow(1, b.rows.start, b.rows.end - b.rows.start)?)
    }

    /// Returns a present block's part of the chunk's [`Work::keys`]: (1, keys, columns).
    fn block_keys(&self, keys: &Tensor, b: &PresentBlock) -> Result<Tensor> {
        Ok(keys.f_narrow(0, b.group, 1)?.f_narrow(1, b.keys.start, b.keys.end - b.keys.start)?)
    }

    /// Returns a present block's part of the chunk's [`Work::matrix`]: (1, rows, keys).
    fn block_scores(&self, matrix: &Tensor, c: &Chunk, b: &PresentBlock) -> Result<Tensor> {
        Ok(self.block_rows(matrix, c, b)?.f_narrow(2, b.keys.start, b.keys.end - b.keys.start)?)
    }

    /// Returns the present blocks of the chunk; none without a block mask.
    fn present(&self, c: &Chunk) -> Vec<PresentBlock> {
        self.part.blocks.as_ref().map_or_else(Vec::new, |blocks| blocks.present(&self.part.a, self.part.first, c))
    }

    /// Returns true for scores of absent blocks, in the shape of the chunk's matrix.
    fn absent(&self, c: &Chunk) -> Result<Tensor> {
        let absent = Tensor::f_full([c.groups, c.rows * self.heads, c.keys], 1, (Kind::Bool, Device::Cpu))?;
        for b in self.present(c) {
            let _ = self.block_scores(&absent, c, &b)?.f_zero_()?;
        }
        Ok(absent)
    }

    /// Computes matrix * x in the chunk's rows of `result`, for x with a row per key.
    fn multiply_keys(&self, result: &Tensor, matrix: &Tensor, x: &Operand, c: &Chunk) -> Result<()> {
        let result = self.rows(result, c)?;
        let _ = matrix.f_bmm_out(&result, &self.keys(&x.finite, c)?)?;
        if let Some(rest) = &x.rest {
            let rest = self.keys(rest, c)?;
            for b in self.present(c) {
                let scores = self.block_scores(matrix, c, &b)?;
                let _ = self.block_rows(&result, c, &b)?.f_baddbmm_(&scores, &self.block_keys(&rest, &b)?)?;
            }
        }
        Ok(())
    }

    /// Adds matrix^T * x to the chunk's keys of `sum`, for x with a row per query and head.
    fn add_products_of_rows(&self, sum: &Tensor, matrix: &Tensor, x: &Operand, c: &Chunk) -> Result<()> {
        let mut sum = self.keys(sum, c)?;
        let _ = sum.f_baddbmm_(&matrix.f_transpose(1, 2)?, &self.rows(&x.finite, c)?)?;
        if let Some(rest) = &x.rest {
            let rest = self.rows(rest, c)?;
            for b in self.present(c) {
                let scores = self.block_scores(matrix, c, &b)?.f_transpose(1, 2)?;
                let _ = self.block_keys(&sum, &b)?.f_baddbmm_(&scores, &self.block_rows(&rest, c, &b)?)?;
            }
        }
        Ok(())
    }

    /// Returns the dropout factor of each probability; None without dropout.
    fn dropout_factors(&self, c: &Chunk) -> Result<Option<Tensor>> {
        self.part.dropout.as_ref().map(|d| dropout_factors(d, self.part, c, self.kind)).transpose()
    }
}

/// Computes out (batch, seqlen_q, nheads, headdim_v) and the log-sum-exp (batch, nheads, seqlen_q), in the type of the arithmetic.
pub fn forward(part: &Part) -> Result<(Tensor, Tensor)> {
    let a = &part.a;
    let work = Work::new(part)?;
    let (groups, rows) = (a.batch * a.nheads_k, a.seqlen_q * work.heads);
    // the result of rows without keys
    let out = Tensor::f_zeros([groups, rows, a.headdim_v], (work.kind, Device::Cpu))?;
    let lse = Tensor::f_full([groups, rows, 1], f64::INFINITY, (work.kind, Device::Cpu))?;

    let (buffer, v) = (work.buffer()?, Operand::new(&work.v, part)?);
    for c in &work.chunks {
        let mut p = work.scores(&buffer, None, c)?; // None: keeps no tanh
        let mut max = p.f_amax(-1, true)?;
        // over the keys, in place, without a cast (false). ATen goes row by row, so rows of some thousand keys stay in a core's caches
        let _ = p.f_internal_softmax_out(&p, -1, false)?;
        let masked = max.f_eq(f64::NEG_INFINITY)?;
        if masked.f_any()?.f_int64_value(&[])? != 0 {
            let _ = p.f_masked_fill_(&masked, 0.0)?;
            let _ = max.f_masked_fill_(&masked, f64::INFINITY)?;
        }
        // The log-sum-exp: the largest probability of a row is exp(0) / sum, so this is max + ln(sum); fully masked, +inf - ln(0).
        let _ = max.f_sub_(&p.f_amax(-1, true)?.f_log_()?)?;
        work.rows(&lse, c)?.f_copy_(&max)?;
        if let Some(factors) = work.dropout_factors(c)? {
            let _ = p.f_mul_(&factors)?;
        }
        work.multiply_keys(&out, &p, &v, c)?;
    }
    Ok((from_groups(&out, a.batch, work.heads)?, lse_from_rows(&lse, a.batch, work.heads)?))
}

/// Computes dq, dk and dv with the shapes of q, k and v, and adds the gradient of a bias to `sums`. `delta` is what the gradient of a score
/// subtracts from that of its probability (dense.rs). `delta`, `lse` and the results have the type of the arithmetic (fp32 or fp64).
pub fn backward(part: &Part, dout: &Tensor, delta: &Tensor, lse: &Tensor, sums: &Sums) -> Result<[Tensor; 3]> {
    let a = &part.a;
    let work = Work::new(part)?;
    let dout = to_groups(dout, work.heads, work.kind)?;
    let lse = rows_from_lse(lse, work.heads, work.kind)?;
    let delta = rows_from_lse(delta, work.heads, work.kind)?;
    let (q, k, dout_operand) = (Operand::new(&work.scaled_q, part)?, Operand::new(&work.k, part)?, Operand::new(&dout, part)?);
    let are_operands_finite = [&q, &k, &dout_operand].iter().all(|x| x.rest.is_none());
    // whether P, dS or the softcap's tanh may be NaN in absent blocks
    let clears_absent = part.blocks.is_some() && !(are_operands_finite && is_finite(&work.v)? && is_finite(&delta)?);
    let mut dq = work.scaled_q.f_zeros_like()?;
    let dk = work.k.f_zeros_like()?;
    let dv = work.v.f_zeros_like()?;

    let (buffer, gradient_buffer) = (work.buffer()?, work.buffer()?);
    let kept_buffer = if has_derivative(a) { Some(work.buffer()?) } else { None };
    for c in &work.chunks {
        let absent = if clears_absent { Some(work.absent(c)?) } else { None };
        let clear_absent = |t: &mut Tensor| absent.as_ref().map(|absent| t.f_masked_fill_(absent, 0.0)).transpose();
        let mut kept = kept_buffer.as_ref().map(|t| work.matrix(t, c)).transpose()?;
        let mut p = work.scores(&buffer, kept.as_mut(), c)?;
        // fully masked rows: exp(x - inf) = 0
        let _ = p.f_sub_(&work.rows(&lse, c)?)?.f_exp_()?;
        clear_absent(&mut p)?;
        let factors = work.dropout_factors(c)?;
        let dropped = factors.as_ref().map(|f| p.f_mul(f)).transpose()?;
        work.add_products_of_rows(&dv, dropped.as_ref().unwrap_or(&p), &dout_operand, c)?;
        // dS = P * (dP - delta), over dP
        let mut ds = work.matrix(&gradient_buffer, c)?;
        let _ = work.rows(&dout, c)?.f_bmm_out(&ds, &work.keys(&work.v, c)?.f_transpose(1, 2)?)?;
        if let Some(factors) = &factors {
            let _ = ds.f_mul_(factors)?;
        }
        let _ = ds.f_sub_(&work.rows(&delta, c)?)?.f_mul_(&p)?;
        clear_absent(&mut ds)?;
        if let Some(dbias) = &sums.dattn_bias {
            for group in c.group..c.group + c.groups {
                let mut dbias = bias_of_group(dbias, part, c, group)?;
                let _ = dbias.f_add_(&group_of(&ds, part, c, group)?.f_sum_to_size(dbias.size())?)?;
            }
        }
        if let Some(kept) = &mut kept {
            clear_absent(kept)?;
            multiply_derivative(&mut ds, kept)?;
        }
        work.multiply_keys(&dq, &ds, &k, c)?;
        work.add_products_of_rows(&dk, &ds, &q, c)?;
    }
    // dk has the factor already, from the scaled q
    let dq = dq.f_mul_scalar_(a.softmax_scale)?;
    Ok([from_groups(&dq, a.batch, work.heads)?, from_groups(&dk, a.batch, 1)?, from_groups(&dv, a.batch, 1)?])
}
