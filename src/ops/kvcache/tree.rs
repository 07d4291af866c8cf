//! A tree mask as a mask of all scores, for backends without kernels that read its bits.

use crate::error::Result;
use crate::limits::MAX_DRAFT_TOKENS;
use crate::ops::inputs::Inputs;
use crate::problem::Attention;
use tch::{Kind, Tensor};

/// Returns which keys each query sees by the tree and the window, (batch, 1, seqlen_q, seqlen_k) bool. `first_q` and `seqlen_q`: rows of each
/// sequence in q, (batch) int64. `used`: key counts, (batch). There is a query and a key.
///
/// csrc/decode/tree.cuh has the rules.
pub fn visible(inputs: &Inputs, a: &Attention, [first_q, seqlen_q]: [&Tensor; 2], used: &Tensor, seqlen_k: i64) -> Result<Tensor> {
    let words = inputs.options.tree_mask.as_ref().expect("the call has a tree mask");
    let numbers = |n| Tensor::f_arange(n, (Kind::Int64, words.device()));
    let words = match a.total_q() {
        None => words.shallow_clone(),
        Some(total) => {
            let rows = first_q.f_unsqueeze(1)?.f_add(&numbers(a.seqlen_q)?)?.f_clamp(0, total - 1)?;
            words.f_index(&[Some(&rows)])?
        }
    };
    // (batch, seqlen_q, draft tokens)
    let draft = numbers(MAX_DRAFT_TOKENS)?;
    let count = seqlen_q.f_view([-1, 1, 1])?;
    let bits = words.f_unsqueeze(-1)?.f_bitwise_right_shift(&draft)?.f_bitwise_and(1)?.f_mul(&draft.f_lt_tensor(&count)?)?;
    let total = bits.f_sum_dim_intlist([-1_i64].as_slice(), true, Kind::Int64)?;
    let depth = total.f_clamp_min(1)?.f_add_scalar(-1)?;
    // draft tokens that the query sees after each
    let later = total.f_sub(&bits.f_cumsum(-1, Kind::Int64)?)?;
    // clamps to the widest useful bound, so that i64::MAX does not overflow
    let left = a.window.left.map_or(seqlen_k + MAX_DRAFT_TOKENS, |left| left.min(seqlen_k + MAX_DRAFT_TOKENS));
    let seen = bits.f_mul(&later.f_le(left)?)?.f_ge(1)?;
    let key = numbers(seqlen_k)?;
    let first_draft = used.f_to_kind(Kind::Int64)?.f_view([-1, 1, 1])?.f_sub(&count)?;
    let of_drafts = key.f_sub(&first_draft)?;
    let before = key.f_ge_tensor(&first_draft.f_add(&depth)?.f_add_scalar(-left)?)?;
    let index = of_drafts.f_clamp(0, MAX_DRAFT_TOKENS - 1)?.f_expand([a.batch, a.seqlen_q, seqlen_k], false)?;
    Ok(before.f_where_self(&of_drafts.f_lt(0)?, &seen.f_gather(2, &index, false)?)?.f_unsqueeze(1)?)
}
