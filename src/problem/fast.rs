//! Validation of `fwd_fast`: the rules of `fwd`, with fp16 and bf16 alone and a boolean mask for a bias.

use super::attention::Attention;
use super::tensor::{Backend, DType, TensorDesc};
use super::{dense, scores, Options};
use crate::error::{Error, Result};

/// Checks q, k, v and the options of `fwd_fast`. A mask counts as the feature `attn_bias`.
///
/// # Errors
/// `Value`, naming the argument.
pub fn validate_fast(q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    if !matches!(q.dtype, DType::Half | DType::BFloat16) {
        return Err(Error::value("q", format!("dtype {}", q.dtype), "torch.float16 or torch.bfloat16"));
    }
    let mut a = dense::validate(q, k, v, o, backend)?;
    if let Some(mask) = &o.attn_mask {
        if mask.dtype != DType::Bool {
            let expected = "torch.bool. Use volta_fa::fwd for a bias";
            return Err(Error::value("attn_mask", format!("dtype {}", mask.dtype), expected));
        }
        // packed: as long as max_seqlen, which may exceed the rows
        let [seqlen_q, seqlen_k] = [o.max_seqlen_q.unwrap_or(a.seqlen_q), o.max_seqlen_k.unwrap_or(a.seqlen_k)];
        scores::check_broadcast("attn_mask", mask, q, [a.batch, a.nheads, seqlen_q, seqlen_k])?;
        a.features.attn_bias = true;
    }
    Ok(a)
}
