//! The CPU backend: exact attention from ATen operations, with O(seqlen) memory beyond inputs and outputs.
//!
//! A *group* is one key/value head of one batch entry together with the query heads that read it; its
//! query rows lie in memory as (seqlen_q * heads per group, headdim), so that grouped-query attention is
//! a taller matrix product and never a repeated K or V. The work is cut into [`Chunk`]s, some rows of
//! some groups against every key that these rows see: batched matrix products do the arithmetic, a few
//! passes in place do the softmax, and keys outside the chunk's window are never touched. Whole score
//! rows mean no running rescale as the GPU kernels need.
//!
//! fp16 and bf16 are computed in fp32 and rounded once, at the end.

use super::{Gradients, Inputs, Saved};
use crate::error::{Error, Result};
use crate::problem::Attention;
use tch::{Device, Kind, Tensor};

/// Score rows of a group that a chunk takes when memory allows: each element of K and V that the matrix
/// products load is used this often. From 128 up, a product of this shape runs at the speed of a large one.
const CHUNK_ROWS: i64 = 128;
/// The fewest rows of a chunk, at any length: below, the products degrade to matrix-vector speed.
pub const MIN_CHUNK_ROWS: i64 = 16;
/// Scores of a chunk: 2^20 fp32 scores are 4 MiB, the caches (L2 of the cores together, or a share of
/// the L3) of the machines that this runs on. Four passes read them back after the product wrote them.
pub const CHUNK_SCORES: i64 = 1 << 20;

/// `rows` query positions from `row` on, of `groups` groups from `group` on, against `keys` keys from
/// `key` on: every key that any of these rows sees.
///
/// A chunk has at most `max(CHUNK_SCORES, seqlen_k * max(MIN_CHUNK_ROWS, heads per group))` scores, so
/// the buffers that hold them are O(seqlen).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    pub group: i64,
    pub groups: i64,
    pub row: i64,
    pub rows: i64,
    pub key: i64,
    pub keys: i64,
}

/// The window as offsets from the row index: row `i` sees the keys `i + first ..= i + last`.
fn window_offsets(a: &Attention) -> (i64, i64) {
    let offset = a.seqlen_k - a.seqlen_q;
    // no bound is wider than this; clamping keeps a user's i64::MAX from overflowing
    let reach = a.seqlen_q + a.seqlen_k;
    let clamp = |bound: Option<i64>| bound.map_or(reach, |w| w.min(reach));
    (offset - clamp(a.window.left), offset + clamp(a.window.right))
}

/// Query heads of a group.
fn heads_per_group(a: &Attention) -> i64 {
    if a.nheads_k == 0 {
        1
    } else {
        a.nheads / a.nheads_k
    }
}

/// Cut the problem into chunks. Rows without any key are in none of them.
pub fn chunks(a: &Attention) -> Vec<Chunk> {
    let groups = a.batch * a.nheads_k;
    let heads = heads_per_group(a).max(1);
    let (first, last) = window_offsets(a);
    let most_rows = (CHUNK_ROWS / heads).max(1);
    let most_keys = a.seqlen_k.min(last - first + most_rows).max(1);
    let least_rows = (MIN_CHUNK_ROWS / heads).clamp(1, most_rows);
    let rows = (CHUNK_SCORES / (heads * most_keys)).clamp(least_rows, most_rows);
    let most_groups = (CHUNK_SCORES / (rows.min(a.seqlen_q).max(1) * heads * most_keys)).max(1);

    let mut chunks = Vec::new();
    for group in (0..groups).step_by(most_groups as usize) {
        for row in (0..a.seqlen_q).step_by(rows as usize) {
            let rows = rows.min(a.seqlen_q - row);
            let key = (row + first).max(0);
            let end = (row + rows + last).min(a.seqlen_k);
            if key < end {
                chunks.push(Chunk { group, groups: most_groups.min(groups - group), row, rows, key, keys: end - key });
            }
        }
    }
    chunks
}

/// The type that the arithmetic is done in.
fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double {
        Kind::Double
    } else {
        Kind::Float
    }
}

/// (batch, seqlen, groups * heads, headdim) to (batch * groups, seqlen * heads, headdim), contiguous.
/// May alias `t`: never to be written to.
fn to_groups(t: &Tensor, heads: i64, kind: Kind) -> Result<Tensor> {
    let (batch, seqlen, all_heads, headdim) = t.size4()?;
    let groups = all_heads / heads;
    Ok(t.f_view([batch, seqlen, groups, heads, headdim])?.f_permute([0, 2, 1, 3, 4])?.f_to_kind(kind)?.f_contiguous()?.f_view([
        batch * groups,
        seqlen * heads,
        headdim,
    ])?)
}

/// The inverse of [`to_groups`], as a new contiguous tensor of type `kind`.
fn from_groups(t: &Tensor, batch: i64, heads: i64, kind: Kind) -> Result<Tensor> {
    let (all_groups, rows, headdim) = t.size3()?;
    let (groups, seqlen) = (all_groups / batch.max(1), rows / heads);
    let result = Tensor::f_empty([batch, seqlen, groups * heads, headdim], (kind, Device::Cpu))?;
    result
        .f_view([batch, seqlen, groups, heads, headdim])?
        .f_copy_(&t.f_view([batch, groups, seqlen, heads, headdim])?.f_permute([0, 2, 1, 3, 4])?)?;
    Ok(result)
}

/// (batch, nheads, seqlen) statistics to one column per score row, (batch * groups, seqlen * heads, 1).
fn rows_from_lse(lse: &Tensor, heads: i64, kind: Kind) -> Result<Tensor> {
    let (batch, nheads, seqlen) = lse.size3()?;
    Ok(lse.f_reshape([batch, nheads / heads, heads, seqlen])?.f_transpose(2, 3)?.f_to_kind(kind)?.f_contiguous()?.f_view([
        batch * (nheads / heads),
        seqlen * heads,
        1,
    ])?)
}

/// The inverse of [`rows_from_lse`], as a new contiguous fp32 tensor.
fn lse_from_rows(rows: &Tensor, batch: i64, heads: i64) -> Result<Tensor> {
    let (all_groups, all_rows, _) = rows.size3()?;
    let (groups, seqlen) = (all_groups / batch.max(1), all_rows / heads);
    let lse = Tensor::f_empty([batch, groups * heads, seqlen], (Kind::Float, Device::Cpu))?;
    lse.f_view([batch, groups, heads, seqlen])?.f_copy_(&rows.f_view([batch, groups, seqlen, heads])?.f_transpose(2, 3)?)?;
    Ok(lse)
}

/// A problem on its way through the chunks.
struct Work<'a> {
    problem: &'a Attention,
    heads: i64,
    kind: Kind,
    chunks: Vec<Chunk>,
    /// q times softmax_scale
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl<'a> Work<'a> {
    fn new(q: &Tensor, k: &Tensor, v: &Tensor, problem: &'a Attention) -> Result<Self> {
        let kind = compute_kind(q.kind());
        let heads = heads_per_group(problem);
        Ok(Work {
            problem,
            heads,
            kind,
            chunks: chunks(problem),
            scaled_q: to_groups(q, heads, kind)?.f_mul_scalar(problem.softmax_scale)?,
            k: to_groups(k, 1, kind)?,
            v: to_groups(v, 1, kind)?,
        })
    }

    /// Memory for the scores of any one chunk. Allocated once: fresh memory of this size would cost its
    /// page faults at every chunk.
    fn buffer(&self) -> Result<Tensor> {
        let scores = self.chunks.iter().map(|c| c.groups * c.rows * self.heads * c.keys).max().unwrap_or(0);
        Ok(Tensor::f_empty([scores], (self.kind, Device::Cpu))?)
    }

    /// The chunk's (groups, rows * heads, keys) matrix in a buffer.
    fn matrix(&self, buffer: &Tensor, c: &Chunk) -> Result<Tensor> {
        let rows = c.rows * self.heads;
        Ok(buffer.f_narrow(0, 0, c.groups * rows * c.keys)?.f_view([c.groups, rows, c.keys])?)
    }

    /// The chunk's part of something with a row per query and head.
    fn rows(&self, t: &Tensor, c: &Chunk) -> Result<Tensor> {
        Ok(t.f_narrow(0, c.group, c.groups)?.f_narrow(1, c.row * self.heads, c.rows * self.heads)?)
    }

    /// The chunk's part of something with a row per key.
    fn keys(&self, t: &Tensor, c: &Chunk) -> Result<Tensor> {
        Ok(t.f_narrow(0, c.group, c.groups)?.f_narrow(1, c.key, c.keys)?)
    }

    /// The chunk's scaled scores, -inf where the mask hides a key, in `buffer`.
    fn scores(&self, buffer: &Tensor, c: &Chunk) -> Result<Tensor> {
        let scores = self.matrix(buffer, c)?;
        let _ = self.rows(&self.scaled_q, c)?.f_bmm_out(&scores, &self.keys(&self.k, c)?.f_transpose(1, 2)?)?;
        self.mask(&scores, c)?;
        Ok(scores)
    }

    /// Put -inf where the chunk's window hides a key. Only the columns that are hidden from some row are
    /// touched: a triangle at either end. A fill and not a sum with -inf, which would make a NaN of +inf.
    fn mask(&self, scores: &Tensor, c: &Chunk) -> Result<()> {
        let (first, last) = window_offsets(self.problem);
        let by_head = scores.f_view([c.groups, c.rows, self.heads, c.keys])?;
        let end = c.key + c.keys;
        let bools = (Kind::Bool, Device::Cpu);
        // hidden on the right: key > row + last
        let right = (c.row + last + 1).max(c.key);
        if right < end {
            let hidden = Tensor::f_ones([c.rows, end - right], bools)?.f_triu(c.row + last + 1 - right)?;
            let _ = by_head.f_narrow(3, right - c.key, end - right)?.f_masked_fill_(&hidden.f_unsqueeze(1)?, f64::NEG_INFINITY)?;
        }
        // hidden on the left: key < row + first
        let left = (c.row + c.rows - 1 + first).min(end);
        if left > c.key {
            let hidden = Tensor::f_ones([c.rows, left - c.key], bools)?.f_tril(c.row + first - 1 - c.key)?;
            let _ = by_head.f_narrow(3, 0, left - c.key)?.f_masked_fill_(&hidden.f_unsqueeze(1)?, f64::NEG_INFINITY)?;
        }
        Ok(())
    }
}

fn check_implemented(a: &Attention) -> Result<()> {
    if a.is_ragged() || a.features.change_scores() {
        return Err(Error::unsupported("not implemented yet"));
    }
    Ok(())
}

/// out (batch, seqlen_q, nheads, headdim_v) and softmax_lse (batch, nheads, seqlen_q).
///
/// The caller has validated the problem and turned autograd off.
///
/// # Errors
/// Only where ATen fails, as when memory runs out.
pub fn forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let Inputs { q, k, v, .. } = inputs;
    check_implemented(a)?;
    let work = Work::new(q, k, v, a)?;
    let (groups, rows) = (a.batch * a.nheads_k, a.seqlen_q * work.heads);
    // what rows without any key keep
    let out = Tensor::f_zeros([groups, rows, a.headdim_v], (work.kind, Device::Cpu))?;
    let lse = Tensor::f_full([groups, rows, 1], f64::INFINITY, (work.kind, Device::Cpu))?;

    let buffer = work.buffer()?;
    for c in &work.chunks {
        let mut p = work.scores(&buffer, c)?;
        let mut max = p.f_amax(-1, true)?;
        // one fused pass, each row staying in L1; in place
        let _ = p.f_internal_softmax_out(&p, -1, false)?;
        let masked = max.f_eq(f64::NEG_INFINITY)?;
        if masked.f_any()?.f_int64_value(&[])? != 0 {
            let _ = p.f_masked_fill_(&masked, 0.0)?;
            let _ = max.f_masked_fill_(&masked, f64::INFINITY)?;
        }
        let _ = p.f_bmm_out(&work.rows(&out, c)?, &work.keys(&work.v, c)?)?;
        // The largest probability of a row is exp(0) / sum, so this is max + ln(sum); in a fully masked
        // row it is +inf - ln(0) = +inf.
        let _ = max.f_sub_(&p.f_amax(-1, true)?.f_log_()?)?;
        work.rows(&lse, c)?.f_copy_(&max)?;
    }
    Ok((from_groups(&out, a.batch, work.heads, q.kind())?, lse_from_rows(&lse, a.batch, work.heads)?))
}

/// The log-sum-exp that the gradient of fp64 inputs is computed with.
///
/// softmax_lse is fp32 for every input type: its rounding alone puts a relative error of 1e-7 and more
/// on each probability. So fp64 sums its own rows again, and takes the given value only where that is a
/// different number altogether: the sum over more keys than these, as ring attention passes it.
fn double_lse(scores: &Tensor, given: &Tensor) -> Result<Tensor> {
    let own = scores.f_logsumexp(-1, true)?;
    let (rtol, atol) = (1e-6, 1e-6);
    Ok(own.f_where_self(&own.f_isclose(given, rtol, atol, false)?, given)?)
}

/// dq, dk and dv, contiguous, with the shapes and types of q, k and v.
///
/// The caller has validated the problem and turned autograd off.
///
/// # Errors
/// Only where ATen fails, as when memory runs out.
pub fn backward(inputs: &Inputs, saved: &Saved, a: &Attention) -> Result<Gradients> {
    let Inputs { q, k, v, .. } = inputs;
    let Saved { dout, out, softmax_lse, .. } = saved;
    check_implemented(a)?;
    let work = Work::new(q, k, v, a)?;
    let dout = to_groups(dout, work.heads, work.kind)?;
    let lse = rows_from_lse(softmax_lse, work.heads, work.kind)?;
    let delta = to_groups(out, work.heads, work.kind)?.f_mul(&dout)?.f_sum_dim_intlist([-1_i64].as_slice(), true, work.kind)?;
    let mut dq = work.scaled_q.f_zeros_like()?;
    let dk = work.k.f_zeros_like()?;
    let dv = work.v.f_zeros_like()?;

    let (buffer, gradient_buffer) = (work.buffer()?, work.buffer()?);
    for c in &work.chunks {
        let (q_rows, dout_rows) = (work.rows(&work.scaled_q, c)?, work.rows(&dout, c)?);
        let mut p = work.scores(&buffer, c)?;
        let mut row_lse = work.rows(&lse, c)?;
        if work.kind == Kind::Double {
            row_lse = double_lse(&p, &row_lse)?;
        }
        // fully masked rows: exp(x - inf) = 0
        let _ = p.f_sub_(&row_lse)?.f_exp_()?;
        let _ = work.keys(&dv, c)?.f_baddbmm_(&p.f_transpose(1, 2)?, &dout_rows)?;
        // dS = P * (dP - delta), over dP
        let mut ds = work.matrix(&gradient_buffer, c)?;
        let _ = dout_rows.f_bmm_out(&ds, &work.keys(&work.v, c)?.f_transpose(1, 2)?)?;
        let _ = ds.f_sub_(&work.rows(&delta, c)?)?.f_mul_(&p)?;
        let _ = ds.f_bmm_out(&work.rows(&dq, c)?, &work.keys(&work.k, c)?)?;
        let _ = work.keys(&dk, c)?.f_baddbmm_(&ds.f_transpose(1, 2)?, &q_rows)?;
    }
    // dk has its factor from the scaled q
    let dq = dq.f_mul_scalar_(a.softmax_scale)?;
    Ok(Gradients {
        dq: from_groups(&dq, a.batch, work.heads, q.kind())?,
        dk: from_groups(&dk, a.batch, 1, k.kind())?,
        dv: from_groups(&dv, a.batch, 1, v.kind())?,
        dattn_bias: None,
        dsinks: None,
    })
}
