//! Validation of `fwd_fast`: the rules of `fwd`, with fp16 and bf16 alone and a boolean mask for a bias.

use super::attention::Attention;
use super::tensor::{Backend, DType, TensorDesc};
use super::{dense, scores, Options};
use crate::error::{Error, Result};
use crate::limits::MAX_FAST_HEADDIM;

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

/// Checks k, v and the options of `prepare_fast`. The problem's queries are its keys.
///
/// # Errors
/// `Value`, naming the argument.
pub fn validate_prepare(k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    let o = Options { cu_seqlens_q: o.cu_seqlens_k.clone(), max_seqlen_q: o.max_seqlen_k, ..o.clone() };
    // the first checks are those of q
    let names = |e: Error| Error { message: e.message.strip_prefix("q: ").map_or(e.message.clone(), |rest| format!("k: {rest}")), ..e };
    let a = validate_fast(k, k, v, &o, backend).map_err(names)?;
    for (name, headdim) in [("k", a.headdim), ("v", a.headdim_v)] {
        if headdim > MAX_FAST_HEADDIM {
            let expected = format!("at most {MAX_FAST_HEADDIM}: above, volta_fa::fwd_fast runs exact kernels. Call it without prepared");
            return Err(Error::value(name, format!("headdim {headdim}"), expected));
        }
    }
    Ok(a)
}
