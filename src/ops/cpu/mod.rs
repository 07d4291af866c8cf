//! The CPU backend: exact attention with ATen operations, in O(seqlen) memory beyond inputs and outputs.
//!
//! ATen's flash operator for the CPU computes most problems ([`flash`]). [`chunked`] computes the others: scores that are not only
//! shifted, dropout, different headdims of q and v, and the gradient of a bias.
//!
//! A *group* is one KV head of one batch entry with its query heads. Its query rows lie in memory as (seqlen_q * heads per group, headdim).
//! So grouped-query attention is a taller matrix product, without repeating K or V. [`chunked`] divides the work into [`Chunk`]s: rows of
//! some groups, with all keys that these rows see. Batched matrix products compute scores and outputs, and a few passes in place compute
//! the softmax. Score rows are complete, so there is no rescaling as in GPU kernels.
//!
//! Entries of different lengths are separate dense problems ([`Part`]).
//!
//! The arithmetic for fp16 and bf16 is fp32, rounded once at the end.

mod chunk;
mod chunked;
mod dense;
mod flash;
mod layout;
mod scores;

pub use chunk::{chunks, Chunk, CHUNK_SCORES, MIN_CHUNK_ROWS};

use super::dropout::Dropout;
use super::{Gradients, Inputs, Saved};
use crate::error::Result;
use crate::problem::{Attention, Keys, Queries};
use layout::{compute_kind, narrow};
use tch::{Device, Kind, Tensor};

/// Batch entries of equal lengths, and the positions of their rows in the problem's tensors.
#[derive(Clone, Copy)]
struct Span {
    entry: i64,
    entries: i64,
    q_start: i64,
    seqlen_q: i64,
    k_start: i64,
    seqlen_k: i64,
}

impl Span {
    /// Returns one span for the whole problem, or one per entry if lengths differ.
    fn all(inputs: &Inputs, a: &Attention) -> Result<Vec<Span>> {
        let whole = Span { entry: 0, entries: a.batch, q_start: 0, seqlen_q: a.seqlen_q, k_start: 0, seqlen_k: a.seqlen_k };
        if !a.is_varlen() {
            return Ok(vec![whole]);
        }
        let values = |t: &Option<Tensor>| t.as_ref().map(Vec::<i32>::try_from).transpose();
        let (cu_q, cu_k, used) =
            (values(&inputs.options.cu_seqlens_q)?, values(&inputs.options.cu_seqlens_k)?, values(&inputs.options.seqused_k)?);
        let rows = |cu: &Option<Vec<i32>>, entry: usize, seqlen: i64| {
            cu.as_ref().map_or((0, seqlen), |cu| (i64::from(cu[entry]), i64::from(cu[entry + 1] - cu[entry])))
        };
        Ok((0..a.batch as usize)
            .map(|entry| {
                let (q_start, seqlen_q) = rows(&cu_q, entry, a.seqlen_q);
                let (k_start, stored) = rows(&cu_k, entry, a.seqlen_k);
                let seqlen_k = used.as_ref().map_or(stored, |used| i64::from(used[entry]));
                Span { entry: entry as i64, entries: 1, q_start, seqlen_q, k_start, seqlen_k }
            })
            .collect())
    }

    /// Returns rows of a (batch, seqlen, heads, headdim) or packed tensor, with a batch dimension.
    fn rows(&self, t: &Tensor, start: i64, count: i64) -> Result<Tensor> {
        Ok(match t.dim() {
            3 => t.f_narrow(0, start, count)?.f_unsqueeze(0)?,
            _ => narrow(&narrow(t, 0, self.entry, self.entries)?, 1, start, count)?,
        })
    }

    fn queries(&self, t: &Tensor) -> Result<Tensor> {
        self.rows(t, self.q_start, self.seqlen_q)
    }

    fn keys(&self, t: &Tensor) -> Result<Tensor> {
        self.rows(t, self.k_start, self.seqlen_k)
    }

    /// Returns the span's part of a softmax_lse: (batch, nheads, seqlen_q).
    fn lse(&self, t: &Tensor) -> Result<Tensor> {
        Ok(match t.dim() {
            2 => t.f_narrow(1, self.q_start, self.seqlen_q)?.f_unsqueeze(0)?,
            _ => narrow(t, 0, self.entry, self.entries)?,
        })
    }

    /// Returns the span's part of a bias or its gradient. Dimensions of size 1 stay.
    fn bias(&self, t: &Tensor) -> Result<Tensor> {
        let mut t = t.shallow_clone();
        for (dim, start, count) in [(0, self.entry, self.entries), (2, 0, self.seqlen_q), (3, 0, self.seqlen_k)] {
            if t.size()[dim] > 1 {
                t = t.f_narrow(dim as i64, start, count)?;
            }
        }
        Ok(t)
    }

    fn part(&self, inputs: &Inputs, a: &Attention) -> Result<Part> {
        let slopes = |t: &Tensor| match t.dim() {
            2 => t.f_narrow(0, self.entry, self.entries),
            _ => t.f_unsqueeze(0),
        };
        Ok(Part {
            a: Attention {
                batch: self.entries,
                seqlen_q: self.seqlen_q,
                seqlen_k: self.seqlen_k,
                queries: Queries::Dense,
                keys: Keys::Dense,
                ..*a
            },
            first: self.entry,
            q: self.queries(&inputs.q)?,
            k: self.keys(&inputs.k)?,
            v: self.keys(&inputs.v)?,
            attn_bias: inputs.options.attn_bias.as_ref().map(|t| self.bias(t)).transpose()?,
            alibi_slopes: inputs.options.alibi_slopes.as_ref().map(slopes).transpose()?,
            sinks: inputs.options.sinks.as_ref().map(Tensor::shallow_clone),
            dropout: match &inputs.rng_state {
                Some(state) if a.features.dropout_p > 0.0 => Some(Dropout::new(state, a.features.dropout_p)?),
                _ => None,
            },
        })
    }
}

/// A dense problem: one span of the whole problem.
struct Part {
    a: Attention,
    /// Number of its first entry in the whole problem.
    first: i64,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Option<Tensor>,
    /// (batch or 1, nheads).
    alibi_slopes: Option<Tensor>,
    sinks: Option<Tensor>,
    dropout: Option<Dropout>,
}

/// Gradients to which all entries add, in the type of the arithmetic.
struct Sums {
    /// Shape of the bias.
    dattn_bias: Option<Tensor>,
    /// (nheads).
    dsinks: Option<Tensor>,
}

/// Computes (out, softmax_lse).
///
/// The caller has validated the problem and turned autograd off.
///
/// # Errors
/// ATen fails, for example without memory.
pub(super) fn forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let spans = Span::all(inputs, a)?;
    if !a.is_varlen() {
        return dense::forward(&spans[0].part(inputs, a)?);
    }
    let out = Tensor::f_empty(a.query_shape(a.headdim_v), (inputs.q.kind(), Device::Cpu))?;
    let softmax_lse = Tensor::f_empty(a.lse_shape(), (Kind::Float, Device::Cpu))?;
    for span in spans {
        let (o, lse) = dense::forward(&span.part(inputs, a)?)?;
        span.queries(&out)?.f_copy_(&o)?;
        span.lse(&softmax_lse)?.f_copy_(&lse)?;
    }
    Ok((out, softmax_lse))
}

/// Computes contiguous gradients with the shapes and types of their tensors.
///
/// The caller has validated the problem and turned autograd off.
///
/// # Errors
/// ATen fails, for example without memory.
pub(super) fn backward(inputs: &Inputs, saved: &Saved, a: &Attention) -> Result<Gradients> {
    let sums_of =
        |t: &Option<Tensor>| t.as_ref().map(|t| Tensor::f_zeros(t.size(), (compute_kind(inputs.q.kind()), Device::Cpu))).transpose();
    let sums = Sums {
        dattn_bias: if saved.attn_bias_requires_grad { sums_of(&inputs.options.attn_bias)? } else { None },
        dsinks: sums_of(&inputs.options.sinks)?,
    };
    let spans = Span::all(inputs, a)?;
    let [dq, dk, dv] = if a.is_varlen() {
        // the gradient of unused keys
        let zeros = |t: &Tensor| Tensor::f_zeros(t.size(), (t.kind(), Device::Cpu));
        let (dq, dk, dv) = (zeros(&inputs.q)?, zeros(&inputs.k)?, zeros(&inputs.v)?);
        for span in spans {
            let [q, k, v] = part_backward(span, inputs, saved, a, &sums)?;
            span.queries(&dq)?.f_copy_(&q)?;
            span.keys(&dk)?.f_copy_(&k)?;
            span.keys(&dv)?.f_copy_(&v)?;
        }
        [dq, dk, dv]
    } else {
        part_backward(spans[0], inputs, saved, a, &sums)?
    };
    let rounded =
        |sum: Option<Tensor>, like: &Option<Tensor>| sum.zip(like.as_ref()).map(|(sum, like)| sum.f_to_kind(like.kind())).transpose();
    Ok(Gradients {
        dq,
        dk,
        dv,
        dattn_bias: rounded(sums.dattn_bias, &inputs.options.attn_bias)?,
        dsinks: rounded(sums.dsinks, &inputs.options.sinks)?,
    })
}

fn part_backward(span: Span, inputs: &Inputs, saved: &Saved, a: &Attention, sums: &Sums) -> Result<[Tensor; 3]> {
    let sums = Sums {
        dattn_bias: sums.dattn_bias.as_ref().map(|t| span.bias(t)).transpose()?,
        dsinks: sums.dsinks.as_ref().map(Tensor::shallow_clone),
    };
    let (dout, out, lse) = (span.queries(&saved.dout)?, span.queries(&saved.out)?, span.lse(&saved.softmax_lse)?);
    dense::backward(&span.part(inputs, a)?, &dout, &out, &lse, &sums)
}
