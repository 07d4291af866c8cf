//! Arguments and results of `volta_fa::fwd_sparse_mla`.

use crate::error::Result;
use std::ffi::c_void;
use tch::Tensor;

/// A cache of latents and the tokens of it that queries chose.
pub struct ChosenTokens {
    /// (pages, page_size, 1, columns)
    pub cache: Tensor,
    /// int32 (total_q, topk)
    pub indices: Tensor,
    /// int32 (total_q): indices that count.
    pub lengths: Option<Tensor>,
}

/// Arguments of a call.
pub struct Call {
    /// (total_q, nheads, headdim)
    pub q: Tensor,
    pub own: ChosenTokens,
    /// A second cache.
    pub extra: Option<ChosenTokens>,
    /// Of extra arguments without a second cache.
    pub unused: [Option<Tensor>; 2],
    /// float32 (nheads)
    pub sinks: Option<Tensor>,
    pub softmax_scale: Option<f64>,
    /// The last 64 columns of an fp8 row are fp16, else bf16.
    pub has_fp16_positions: bool,
    /// Current stream of q's device.
    pub stream: *mut c_void,
}

/// Out (total_q, nheads, 512), and softmax_lse and max_logits, both (total_q, nheads).
pub type Found = [Tensor; 3];

impl ChosenTokens {
    /// Returns its tensors.
    pub fn parts(&self) -> impl Iterator<Item = &Tensor> {
        [&self.cache, &self.indices].into_iter().chain(&self.lengths)
    }

    /// Returns some queries' part.
    pub fn narrow(&self, first: i64, count: i64) -> Result<ChosenTokens> {
        Ok(ChosenTokens {
            cache: self.cache.shallow_clone(),
            indices: self.indices.f_narrow(0, first, count)?,
            lengths: self.lengths.as_ref().map(|t| t.f_narrow(0, first, count)).transpose()?,
        })
    }
}
