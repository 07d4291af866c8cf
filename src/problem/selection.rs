//! Rules of `kv_indices`, an option of `fwd_kvcache` and `fwd_mla`: lists of the blocks of `kv_block` tokens that each query attends to.
//! cached.rs calls [`check`]; src/ops/kvcache/mod.rs checks the values if the call asks for it.

use super::attention::{Attention, Queries};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{KV_BLOCKS, MAX_SEQLEN}; // powers of two from 1 to 128 tokens; 2^29 - 1
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Checks `kv_indices` and `kv_block`, and rejects options that do not go with them.
pub fn check(o: &Options, q: &TensorDesc, [batch, seqlen_q, nheads_k]: [i64; 3], queries: Queries) -> Result<()> {
    let Some(d) = &o.kv_indices else {
        return match o.kv_block {
            1 | UNKNOWN => Ok(()),
            block => Err(Error::value("kv_block", block, "1, since kv_indices is not given")),
        };
    };
    if o.kv_block != UNKNOWN && !KV_BLOCKS.contains(&o.kv_block) {
        let allowed = KV_BLOCKS.map(|n| n.to_string()).join(", ");
        return Err(Error::value("kv_block", o.kv_block, format!("a number of tokens among {allowed}")));
    }
    check_dtype("kv_indices", d, DType::Int32)?;
    let (rows, what): (&[i64], _) = match queries {
        Queries::Dense => (&[batch, seqlen_q], "(batch, seqlen_q, heads, topk)"),
        Queries::Packed { total } => (&[total], "(total_q, heads, topk), since cu_seqlens_q is given"),
    };
    let heads = d.sizes.get(rows.len()).copied().unwrap_or(0);
    let fits = d.sizes.len() == rows.len() + 2 && same_sizes(&d.sizes[..rows.len()], rows);
    if !fits || !(same_size(heads, 1) || same_size(heads, nheads_k)) {
        let allowed = format!("shape {what}, here the first are {} and heads is 1 or nheads_k {}", listed(rows), number(nheads_k));
        return Err(Error::value("kv_indices", shape(d), allowed));
    }
    let topk = d.sizes[rows.len() + 1];
    if topk != UNKNOWN && o.kv_block != UNKNOWN && topk.saturating_mul(o.kv_block) > MAX_SEQLEN {
        let given = format!("{topk} blocks of {} tokens", o.kv_block);
        return Err(Error::value("kv_indices", given, format!("at most {MAX_SEQLEN} tokens")));
    }
    check_device("kv_indices", d, q)?;
    for (name, t) in [("alibi_slopes", &o.alibi_slopes), ("tree_mask", &o.tree_mask), ("leftpad_k", &o.leftpad_k)] {
        reject_if!(t.is_some(), name, "a tensor", "None beside kv_indices");
    }
    // a causal mask, a bound of 0 on the right, goes with a selection
    for (name, bound, most) in [("window_left", o.window_left, -1), ("window_right", o.window_right, 0)] {
        reject_if!(bound > most, name, bound, format!("at most {most} beside kv_indices: select the blocks of the window"));
    }
    Ok(())
}

/// Checks the values of `kv_indices`: numbers of blocks, and -1 after the last of a list.
pub fn validate_kv_indices(a: &Attention, blocks: &[i32], kv_block: i64) -> Result<()> {
    let count = (a.seqlen_k + kv_block - 1) / kv_block;
    match blocks.iter().find(|&&block| !(-1..count).contains(&i64::from(block))) {
        None => Ok(()),
        Some(block) => {
            let allowed = format!("numbers of blocks below {count}, for which the cache has room, or -1 after a list's last");
            Err(Error::value("kv_indices", block, allowed))
        }
    }
}
