//! Computes attention with ATen's batched matrix products, chunk by chunk, for problems that flash.rs does not cover. dense.rs calls it.
//!
//! A group is one KV head of one batch entry with its query heads. A [`Chunk`] is some query positions of some groups, with all keys that
//! any of them sees. Its scores are a matrix (groups, rows * heads of a group, keys), which fits a CPU's caches. It has whole rows, so the
//! softmax needs no rescaling. A [`Part`] (part.rs) is one dense problem of the call, whose first batch entry is number `first` of the
//! call's. [`Sums`] are gradients to which all parts add.

use super::chunk::{chunks, heads_per_group, window_offsets, Chunk};
use super::layout::{from_groups, lse_from_rows, rows_from_lse, to_groups};
use super::part::{Part, Sums};
use super::scores::{bias_of_group, dropout_factors, group_of, has_derivative, modify, multiply_derivative};
use crate::error::Result;
use crate::tensor::compute_kind;
use tch::{Device, Kind, Tensor};

/// A problem with tensors in the layout of the matrix products: (groups, rows * heads, headdim) and (groups, keys, headdim).
struct Work<'a> {
    part: &'a Part,
    heads: i64,
    /// Type of the arithmetic.
    kind: Kind,
    chunks: Vec<Chunk>,
    scaled_q: Tensor,
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

    let buffer = work.buffer()?;
    for c in &work.chunks {
        let mut p = work.scores(&buffer, None, c)?;
        let mut max = p.f_amax(-1, true)?;
        // one fused pass in place: a row stays in L1
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
        let _ = p.f_bmm_out(&work.rows(&out, c)?, &work.keys(&work.v, c)?)?;
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
    let mut dq = work.scaled_q.f_zeros_like()?;
    let dk = work.k.f_zeros_like()?;
    let dv = work.v.f_zeros_like()?;

    let (buffer, gradient_buffer) = (work.buffer()?, work.buffer()?);
    let kept_buffer = if has_derivative(a) { Some(work.buffer()?) } else { None };
    for c in &work.chunks {
        let (q_rows, dout_rows, delta_rows) = (work.rows(&work.scaled_q, c)?, work.rows(&dout, c)?, work.rows(&delta, c)?);
        let mut kept = kept_buffer.as_ref().map(|t| work.matrix(t, c)).transpose()?;
        let mut p = work.scores(&buffer, kept.as_mut(), c)?;
        // fully masked rows: exp(x - inf) = 0
        let _ = p.f_sub_(&work.rows(&lse, c)?)?.f_exp_()?;
        let factors = work.dropout_factors(c)?;
        let dropped = factors.as_ref().map(|f| p.f_mul(f)).transpose()?;
        let _ = work.keys(&dv, c)?.f_baddbmm_(&dropped.as_ref().unwrap_or(&p).f_transpose(1, 2)?, &dout_rows)?;
        // dS = P * (dP - delta), over dP
        let mut ds = work.matrix(&gradient_buffer, c)?;
        let _ = dout_rows.f_bmm_out(&ds, &work.keys(&work.v, c)?.f_transpose(1, 2)?)?;
        if let Some(factors) = &factors {
            let _ = ds.f_mul_(factors)?;
        }
        let _ = ds.f_sub_(&delta_rows)?.f_mul_(&p)?;
        if let Some(dbias) = &sums.dattn_bias {
            for group in c.group..c.group + c.groups {
                let mut dbias = bias_of_group(dbias, part, c, group)?;
                let _ = dbias.f_add_(&group_of(&ds, part, c, group)?.f_sum_to_size(dbias.size())?)?;
            }
        }
        if let Some(kept) = &mut kept {
            multiply_derivative(&mut ds, kept)?;
        }
        let _ = ds.f_bmm_out(&work.rows(&dq, c)?, &work.keys(&work.k, c)?)?;
        let _ = work.keys(&dk, c)?.f_baddbmm_(&ds.f_transpose(1, 2)?, &q_rows)?;
    }
    // dk has the factor already, from the scaled q
    let dq = dq.f_mul_scalar_(a.softmax_scale)?;
    Ok([from_groups(&dq, a.batch, work.heads)?, from_groups(&dk, a.batch, 1)?, from_groups(&dv, a.batch, 1)?])
}
