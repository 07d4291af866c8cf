//! Validation of `fwd_fast` and `prepare_fast`: the rules of `fwd`, with fp16 and bf16 alone, and a boolean mask in the place of a bias.
//! `fwd_fast` multiplies Q and K as int8 and sums P V in fp16. `prepared`, of `prepare_fast`, has K's codes and V's largest magnitudes.

use super::attention::Attention;
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{Backend, DType, Options, TensorDesc};
use super::{dense, scores};
use crate::error::{Error, Result};
use crate::limits::MAX_FAST_HEADDIM; // 256

/// Checks q, k, v and the options of `fwd_fast`. A mask counts as the feature `attn_bias`.
pub fn validate_fast(q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    reject_if!(!matches!(q.dtype, DType::Half | DType::BFloat16), "q", format!("dtype {}", q.dtype), "torch.float16 or torch.bfloat16");
    let mut a = dense::validate(q, k, v, o, backend)?;
    if let Some(mask) = &o.attn_mask {
        reject_if!(mask.dtype != DType::Bool, "attn_mask", format!("dtype {}", mask.dtype), "torch.bool. Use volta_fa::fwd for a bias");
        // packed: as long as max_seqlen, which may exceed the rows
        let [seqlen_q, seqlen_k] = [o.max_seqlen_q.unwrap_or(a.seqlen_q), o.max_seqlen_k.unwrap_or(a.seqlen_k)];
        scores::check_broadcast("attn_mask", mask, q, [a.batch, a.nheads, seqlen_q, seqlen_k])?;
        a.features.attn_bias = true;
    }
    if let Some(prepared) = &o.prepared {
        check_dtype("prepared", prepared, DType::Uint8)?;
        reject_if!(prepared.sizes.len() != 1, "prepared", rank(prepared), "rank 1, what volta_fa::prepare_fast returns");
        check_device("prepared", prepared, q)?;
    }
    Ok(a)
}

/// Checks k, v and the options of `prepare_fast`. It has no queries, so k stands for q in the problem.
pub fn validate_prepare(k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    let o = Options { cu_seqlens_q: o.cu_seqlens_k.clone(), max_seqlen_q: o.max_seqlen_k, ..o.clone() };
    let a = validate_fast(k, k, v, &o, backend).map_err(of_keys)?;
    for (name, headdim) in [("k", a.headdim), ("v", a.headdim_v)] {
        if headdim > MAX_FAST_HEADDIM {
            let expected = format!("at most {MAX_FAST_HEADDIM}: above, volta_fa::fwd_fast runs exact kernels. Call it without prepared");
            return Err(Error::value(name, format!("headdim {headdim}"), expected));
        }
    }
    Ok(a)
}

/// Returns an error about q, for which k stands, as one about k.
fn of_keys(e: Error) -> Error {
    const NAMES: [(&str, &str); 4] = [
        ("cu_seqlens_q and cu_seqlens_k", "cu_seqlens_k"),
        ("seqlens_q", "seqlens_k"),
        ("seqlen_q", "seqlen_k"),
        ("that of q", "that of k"),
    ];
    let message = NAMES.iter().fold(e.message, |text, (query, key)| text.replace(query, key));
    let message = message.strip_prefix("q: ").map_or(message.clone(), |rest| format!("k: {rest}"));
    Error { message, ..e }
}
