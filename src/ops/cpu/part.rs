//! Divides a call of the CPU backend into dense problems, whose batch entries have equal lengths: the whole call if lengths do not differ,
//! else one problem for each sequence. cpu/mod.rs computes them one after the other.

use super::block_mask::BlockMask;
use super::layout::{narrow, narrow_broadcast};
use crate::error::{Error, Result};
use crate::ops::codes::{ceil_div, Codes, SCALE_KEYS};
use crate::ops::dropout::Dropout;
use crate::ops::Inputs;
use crate::problem::{Attention, Keys, Queries};
use crate::tensor::share;
use std::rc::Rc;
use tch::Tensor;

/// A dense problem: the tensors of one [`Span`] of the call.
pub struct Part {
    /// Its sizes and options; neither packed nor in a cache.
    pub a: Attention,
    /// Number of its first batch entry in the call.
    pub first: i64,
    /// (batch, seqlen_q, nheads, headdim); k and v: (batch, seqlen_k, nheads_k, headdim or headdim_v).
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// Broadcast to (batch, nheads, seqlen_q, seqlen_k).
    pub attn_bias: Option<Tensor>,
    /// (batch or 1, nheads).
    pub alibi_slopes: Option<Tensor>,
    /// (nheads).
    pub sinks: Option<Tensor>,
    pub dropout: Option<Dropout>,
    /// The block mask of the whole call.
    pub blocks: Option<Rc<BlockMask>>,
}

/// What the backward pass takes of a part's query rows.
pub struct Rows {
    /// (batch, seqlen_q, nheads, headdim_v), as out.
    pub dout: Tensor,
    pub out: Tensor,
    /// (batch, nheads, seqlen_q).
    pub softmax_lse: Tensor,
    /// Gradient of softmax_lse.
    pub dlse: Option<Tensor>,
}

/// Gradients to which all entries add, in the type of the arithmetic: fp32, or fp64 for fp64 tensors.
pub struct Sums {
    /// Shape of the bias.
    pub dattn_bias: Option<Tensor>,
    /// (nheads).
    pub dsinks: Option<Tensor>,
}

/// Batch entries of equal lengths, and where their rows are in the call's tensors.
#[derive(Clone, Copy)]
pub struct Span {
    entry: i64, // the first
    entries: i64,
    /// First row of q; 0 unless q is packed.
    q_start: i64,
    seqlen_q: i64,
    /// First row of k; 0 unless k is packed.
    k_start: i64,
    seqlen_k: i64,
}

impl Span {
    /// Returns one span for the whole call, or one per entry if lengths may differ. The lengths have been validated.
    pub fn all(inputs: &Inputs, a: &Attention) -> Result<Vec<Span>> {
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

    /// Returns the span's rows of q, out or dout.
    pub fn queries(&self, t: &Tensor) -> Result<Tensor> {
        self.rows(t, self.q_start, self.seqlen_q)
    }

    /// Returns the span's rows of k or v.
    pub fn keys(&self, t: &Tensor) -> Result<Tensor> {
        self.rows(t, self.k_start, self.seqlen_k)
    }

    /// Returns the span's part of a softmax_lse: (batch, nheads, seqlen_q).
    pub fn lse(&self, t: &Tensor) -> Result<Tensor> {
        Ok(match t.dim() {
            2 => t.f_narrow(1, self.q_start, self.seqlen_q)?.f_unsqueeze(0)?,
            _ => narrow(t, 0, self.entry, self.entries)?,
        })
    }

    /// Returns the span's part of a bias or its gradient. Dimensions of size 1 stay.
    pub fn bias(&self, t: &Tensor) -> Result<Tensor> {
        narrow_broadcast(t, [(0, self.entry, self.entries), (2, 0, self.seqlen_q), (3, 0, self.seqlen_k)])
    }

    /// Returns the int8 codes (`fwd_fast`) of the span's keys. k_codes and k_scales get a dimension of entries before that of the rows.
    pub fn codes(&self, codes: &Codes) -> Result<Codes> {
        let blocks = ceil_div(self.seqlen_k, SCALE_KEYS);
        // A packed sequence's codes begin on a block of SCALE_KEYS keys (csrc/turing/fast/codes.cuh): the number of whole blocks before its
        // first key, plus one for each sequence before it, whose last block may be unfinished. Dense entries are one span, from block 0 on.
        let first = self.k_start / SCALE_KEYS + self.entry;
        let of_keys = |t: &Tensor, block_rows: i64| {
            let sizes = t.size();
            let rows = t.f_narrow(1, first * block_rows, self.entries * blocks * block_rows)?;
            Ok::<_, Error>(rows.f_view([sizes[0], self.entries, blocks * block_rows, sizes[2]])?)
        };
        let of_entries = |t: &Tensor| t.f_narrow(1, self.entry, self.entries);
        Ok(Codes {
            k_codes: of_keys(&codes.k_codes, SCALE_KEYS)?,
            k_scales: of_keys(&codes.k_scales, 1)?,
            k_mean: of_entries(&codes.k_mean)?,
            v_max: of_entries(&codes.v_max)?,
            v_scaled: codes.v_scaled.as_ref().map(|v| self.keys(v)).transpose()?,
        })
    }

    /// Returns the span's dense problem. `blocks`: the block mask of the call.
    pub fn part(&self, inputs: &Inputs, a: &Attention, blocks: &Option<Rc<BlockMask>>) -> Result<Part> {
        let slopes = |t: &Tensor| match t.dim() {
            2 => t.f_narrow(0, self.entry, self.entries),
            _ => t.f_unsqueeze(0),
        };
        let dense = Attention { queries: Queries::Dense, keys: Keys::Dense, ..*a };
        Ok(Part {
            a: Attention { batch: self.entries, seqlen_q: self.seqlen_q, seqlen_k: self.seqlen_k, ..dense },
            first: self.entry,
            q: self.queries(&inputs.q)?,
            k: self.keys(&inputs.k)?,
            v: self.keys(&inputs.v)?,
            attn_bias: inputs.options.attn_bias.as_ref().map(|t| self.bias(t)).transpose()?,
            alibi_slopes: inputs.options.alibi_slopes.as_ref().map(slopes).transpose()?,
            sinks: share(&inputs.options.sinks),
            dropout: match &inputs.rng_state {
                Some(state) if a.features.dropout_p > 0.0 => Some(Dropout::new(state, a.features.dropout_p)?),
                _ => None,
            },
            blocks: blocks.clone(),
        })
    }
}
