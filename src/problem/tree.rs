//! Rules of `tree_mask`, an option of `fwd_kvcache` for speculative decoding. The last tokens of a sequence are draft tokens, guesses in a
//! tree, and its queries are theirs. Bit j of a query's word says whether the query sees draft token j. cached.rs calls the rules.

use super::attention::{Queries, Window};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::MAX_DRAFT_TOKENS; // 64

/// Checks `tree_mask`, and rejects options that do not go with it.
pub fn check(o: &Options, q: &TensorDesc, batch: i64, seqlen_q: i64, queries: Queries) -> Result<()> {
    let Some(d) = &o.tree_mask else { return Ok(()) };
    let (expected, what): (&[i64], _) = match queries {
        Queries::Dense => (&[batch, seqlen_q], "(batch, seqlen_q)"),
        Queries::Packed { total } => (&[total], "(total_q,), since cu_seqlens_q is given"),
    };
    check_tensor("tree_mask", d, DType::Int64, q, expected, what)?;
    check_contiguous_last("tree_mask", d)?;
    let name = if queries == Queries::Dense { "q" } else { "max_seqlen_q" };
    if seqlen_q > MAX_DRAFT_TOKENS {
        let given = if name == "q" { format!("seqlen {seqlen_q}") } else { number(seqlen_q) };
        return Err(Error::value(name, given, format!("at most {MAX_DRAFT_TOKENS} draft tokens, the bits of tree_mask")));
    }
    let distances = "None beside tree_mask: draft tokens have depths instead of consecutive positions";
    for (name, t, remedy) in [("alibi_slopes", &o.alibi_slopes, ""), ("rotary_cos", &o.rotary_cos, ". Rotate q and k before the call")] {
        reject_if!(t.is_some(), name, "a tensor", format!("{distances}{remedy}"));
    }
    Ok(())
}

/// Returns the window of a call with a tree mask. The tree takes the place of the limit on the right: a query sees no draft token but those
/// that its bits name, and every key before the draft tokens that the left bound allows.
pub fn window(window: Window) -> Window {
    Window { right: None, ..window }
}
