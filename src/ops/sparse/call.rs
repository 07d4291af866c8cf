//! Arguments and results of `volta_fa::fwd_sparse_mla`: each query attends to latents (one vector per token, key and value of all heads)
//! that it chose. operators.rs makes the call, and sparse.rs and sparse/gather.rs compute it.

use crate::error::Result;
use std::ffi::c_void;
use tch::Tensor;

/// A cache of latents and the tokens of it that queries chose.
pub struct ChosenTokens {
    /// (pages, page_size, 1, columns), of q's type, or fp8 with scales in its bytes
    pub cache: Tensor,
    /// int32 (total_q, topk): numbers of tokens, counted over all pages
    pub indices: Tensor,
    /// int32 (total_q): indices that count, from the first on; None: all
    pub lengths: Option<Tensor>,
}

/// Arguments of a call. Names of tensors below are those of the operator's arguments.
pub struct Call {
    /// (total_q, nheads, headdim)
    pub q: Tensor,
    /// cache, indices and topk_length
    pub own: ChosenTokens,
    /// extra_cache, extra_indices and extra_topk_length: a second cache, whose tokens are in the same softmax
    pub extra: Option<ChosenTokens>,
    /// extra_indices and extra_topk_length without extra_cache: an error, which validation reports. None with `extra`.
    pub unused: [Option<Tensor>; 2],
    /// float32 (nheads): one more logit for each row of a head, without a value
    pub sinks: Option<Tensor>,
    pub softmax_scale: Option<f64>, // None: headdim ** -0.5
    /// True: the last 64 columns of a row of an fp8 cache, which encode positions, are fp16; false: bf16.
    pub has_fp16_positions: bool,
    pub stream: *mut c_void, // current cudaStream_t
}

/// Results in this order: out (total_q, nheads, 512); softmax_lse; max_logits, the largest scaled score of each row. The last two are fp32
/// (total_q, nheads).
pub type Found = [Tensor; 3];

impl ChosenTokens {
    pub fn parts(&self) -> impl Iterator<Item = &Tensor> {
        [&self.cache, &self.indices].into_iter().chain(&self.lengths)
    }

    /// Returns the choices of `count` queries from query `first` on.
    pub fn narrow(&self, first: i64, count: i64) -> Result<ChosenTokens> {
        Ok(ChosenTokens {
            cache: self.cache.shallow_clone(),
            indices: self.indices.f_narrow(0, first, count)?,
            lengths: self.lengths.as_ref().map(|t| t.f_narrow(0, first, count)).transpose()?,
        })
    }
}
