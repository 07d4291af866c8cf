//! The CPU backend: exact attention with ATen operations, in O(seqlen) memory beyond inputs and outputs.
//!
//! ATen's flash operator for the CPU computes most problems ([`flash`]). [`chunked`] computes the others: softcap, block masks, dropout,
//! scales that are not positive, different headdims of q and v, and the gradients of a bias and of softmax_lse.
//!
//! A *group* is one KV head of one batch entry with its query heads. Its query rows lie in memory as (seqlen_q * heads per group, headdim).
//! So grouped-query attention is a taller matrix product, without repeating K or V. [`chunked`] divides the work into [`Chunk`]s: rows of
//! some groups, with all keys that these rows see. So the softmax needs no rescaling, unlike in GPU kernels.
//!
//! Entries of different lengths are separate dense problems ([`part::Part`]). A [`Span`] is where one of them lies in the call's tensors.
//! The arithmetic is fp64 for fp64 tensors; for others fp32, rounded once at the end. Callers have validated, and turned autograd off.

mod block_mask;
mod chunk;
mod chunked;
mod dense;
mod fast;
mod flash;
mod layout;
mod part;
mod scores;

pub use chunk::{chunks, Chunk, CHUNK_SCORES, MIN_CHUNK_ROWS};

use super::{Gradients, Inputs, Saved};
use crate::error::Result;
use crate::ops::codes::Codes;
use crate::problem::Attention;
use crate::tensor::{compute_kind, share};
use block_mask::BlockMask;
use part::{Part, Rows, Span, Sums}; // Rows: what the backward pass takes of query rows; Sums: gradients to which all parts add
use tch::{Device, Kind, Tensor};

/// Computes (out, softmax_lse).
pub(super) fn forward(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let (spans, blocks) = (Span::all(inputs, a)?, BlockMask::of(inputs)?);
    if !a.is_varlen() {
        return dense::forward(&spans[0].part(inputs, a, &blocks)?);
    }
    // the spans cover all query rows: lengths have been checked, so cu_seqlens_q goes from 0 to the number of rows
    let out = Tensor::f_empty(a.query_shape(a.headdim_v), (inputs.q.kind(), Device::Cpu))?;
    let softmax_lse = Tensor::f_empty(a.lse_shape(), (Kind::Float, Device::Cpu))?;
    for span in spans {
        let (o, lse) = dense::forward(&span.part(inputs, a, &blocks)?)?;
        span.queries(&out)?.f_copy_(&o)?;
        span.lse(&softmax_lse)?.f_copy_(&lse)?;
    }
    Ok((out, softmax_lse))
}

/// Computes `fwd_fast`, attention on int8 codes of Q and K: (out, softmax_lse), with its kernels' rounding errors ([`fast`]). The bias, if
/// any, is a boolean mask. `rotate`: codes are of Q and K after a Hadamard transform; `smooth_k` (below): of K less its mean over the keys.
pub(super) fn fast_forward(inputs: &Inputs, a: &Attention, codes: &Codes) -> Result<(Tensor, Tensor)> {
    let out = Tensor::f_empty(a.query_shape(a.headdim_v), (inputs.q.kind(), Device::Cpu))?;
    let softmax_lse = Tensor::f_empty(a.lse_shape(), (Kind::Float, Device::Cpu))?;
    for span in Span::all(inputs, a)? {
        let (to, lse) = (span.queries(&out)?, span.lse(&softmax_lse)?);
        // &None: there is no block mask
        fast::forward(&span.part(inputs, a, &None)?, &span.codes(codes)?, inputs.options.rotate, &to, &lse)?;
    }
    Ok((out, softmax_lse))
}

/// Computes `prepare_fast`: writes the int8 codes of K and the largest magnitudes of V as the prepare kernel does.
pub(super) fn fast_prepare(inputs: &Inputs, a: &Attention, codes: &Codes) -> Result<()> {
    for span in Span::all(inputs, a)? {
        fast::prepare(&span.part(inputs, a, &None)?, inputs.options.smooth_k, inputs.options.rotate, &span.codes(codes)?)?;
    }
    Ok(())
}

/// Computes contiguous gradients with the shapes and types of their tensors.
pub(super) fn backward(inputs: &Inputs, saved: &Saved, a: &Attention) -> Result<Gradients> {
    // gradients to which each part adds, in the type of the arithmetic; rounded at the end
    let sums_of =
        |t: &Option<Tensor>| t.as_ref().map(|t| Tensor::f_zeros(t.size(), (compute_kind(inputs.q.kind()), Device::Cpu))).transpose();
    let sums = Sums {
        dattn_bias: if saved.attn_bias_requires_grad { sums_of(&inputs.options.attn_bias)? } else { None },
        dsinks: sums_of(&inputs.options.sinks)?,
    };
    let (spans, blocks) = (Span::all(inputs, a)?, BlockMask::of(inputs)?);
    let of_span = |span: Span| part_backward(&span, &span.part(inputs, a, &blocks)?, saved, &sums);
    let [dq, dk, dv] = if a.is_varlen() {
        // keys past `seqused_k` belong to no span: their gradients stay zero
        let zeros = |t: &Tensor| Tensor::f_zeros(t.size(), (t.kind(), Device::Cpu));
        let (dq, dk, dv) = (zeros(&inputs.q)?, zeros(&inputs.k)?, zeros(&inputs.v)?);
        for span in spans {
            let [q, k, v] = of_span(span)?;
            span.queries(&dq)?.f_copy_(&q)?;
            span.keys(&dk)?.f_copy_(&k)?;
            span.keys(&dv)?.f_copy_(&v)?;
        }
        [dq, dk, dv]
    } else {
        of_span(spans[0])?
    };
    let rounded =
        |sum: Option<Tensor>, like: &Option<Tensor>| sum.zip(like.as_ref()).map(|(sum, like)| sum.f_to_kind(like.kind())).transpose();
    let dattn_bias = rounded(sums.dattn_bias, &inputs.options.attn_bias)?;
    Ok(Gradients { dq, dk, dv, dattn_bias, dsinks: rounded(sums.dsinks, &inputs.options.sinks)? })
}

/// Returns dsinks of a problem without keys, on any device. It is 0 for the problem's own out and a dlse of 0; ring attention gives those
/// of a problem with more keys.
pub(super) fn dsinks_without_keys(sinks: &Tensor, saved: &Saved) -> Result<Tensor> {
    // packed sequences are one entry of all their rows
    let is_packed = saved.out.dim() == 3;
    let of_entries = |t: &Tensor| if is_packed { t.f_unsqueeze(0) } else { Ok(t.shallow_clone()) };
    let rows = Rows {
        dout: of_entries(&saved.dout)?,
        out: of_entries(&saved.out)?,
        softmax_lse: of_entries(&saved.softmax_lse)?,
        dlse: saved.dlse.as_ref().map(of_entries).transpose()?,
    };
    let lse = rows.softmax_lse.f_to_kind(compute_kind(saved.out.kind()))?;
    Ok(dense::dsinks(sinks, &rows, &lse)?.f_to_kind(sinks.kind())?)
}

/// Computes dq, dk and dv of one dense problem, and adds its part of the other gradients to `sums`.
fn part_backward(span: &Span, part: &Part, saved: &Saved, sums: &Sums) -> Result<[Tensor; 3]> {
    let sums = Sums { dattn_bias: sums.dattn_bias.as_ref().map(|t| span.bias(t)).transpose()?, dsinks: share(&sums.dsinks) };
    let rows = Rows {
        dout: span.queries(&saved.dout)?,
        out: span.queries(&saved.out)?,
        softmax_lse: span.lse(&saved.softmax_lse)?,
        dlse: saved.dlse.as_ref().map(|t| span.lse(t)).transpose()?,
    };
    dense::backward(part, &rows, &sums)
}
