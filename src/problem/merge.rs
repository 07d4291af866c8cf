//! Validation of `merge_attention_states`: two states, each the result (out and softmax_lse) of attention over some keys, become the state
//! over all these keys. Packed tensors have the rows of all sequences one after the other. src/ops/merge.rs calls it.

use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::operands::{self, Packing}; // Since(argument): packed, because it is given; Needs(argument): dense, without it
use super::tensor::{Backend, DType, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{MAX_HEADS, MAX_MERGED_HEADDIM, MAX_SEQLEN}; // 65535, 2^20 and 2^29 - 1

/// A validated `volta_fa::merge_attention_states`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergedStates {
    /// Batch entries; 1 if packed.
    pub batch: i64,
    /// Rows of an entry; all rows if packed.
    pub seqlen_q: i64,
    pub nheads: i64,
    /// Columns of out. The kernel takes any number.
    pub headdim_v: i64,
}

impl MergedStates {
    pub fn is_empty(&self) -> bool {
        [self.batch, self.seqlen_q, self.nheads, self.headdim_v].contains(&0)
    }
}

/// Checks two outs and their softmax_lse, dense or packed. `in_place`: out_a is updated, and may be fp32 beside an fp16 or bf16 out_b.
pub fn validate_merge(outs: [&TensorDesc; 2], lses: [&TensorDesc; 2], in_place: bool, backend: Backend) -> Result<MergedStates> {
    let [a, b] = outs;
    let packing = check_first(a, backend)?;
    let sizes = operands::sizes("out_a", a, packing)?;
    // in place, out_a may be an fp32 sum of fp16 or bf16 parts
    if !(in_place && a.dtype == DType::Float && matches!(b.dtype, DType::Half | DType::BFloat16)) {
        check_same("out_b", "dtype", b.dtype, "out_a", a.dtype)?;
    }
    check_same("out_b", "device", b.device, "out_a", a.device)?;
    reject_if!(!same_sizes(&a.sizes, &b.sizes), "out_b", shape(b), format!("{}, that of out_a", shape(a)));
    check_layout("out_a", a, backend)?;
    check_layout("out_b", b, backend)?;
    let is_packed = packing.is_packed();
    let expected = if is_packed { vec![sizes.nheads, sizes.rows] } else { vec![sizes.batch, sizes.nheads, sizes.rows] };
    for (name, d) in ["softmax_lse_a", "softmax_lse_b"].into_iter().zip(lses) {
        check_dtype(name, d, DType::Float)?;
        check_same(name, "device", d.device, "out_a", a.device)?;
        reject_if!(!same_sizes(&d.sizes, &expected), name, shape(d), format!("shape {}, that of out_a's softmax_lse", listed(&expected)));
    }
    if in_place {
        check_written("out_a", a)?;
        check_written("softmax_lse_a", lses[0])?;
    }
    check_at_most("out_a", packing.rows(), sizes.rows, MAX_SEQLEN)?;
    check_at_most("out_a", "nheads", sizes.nheads, MAX_HEADS)?;
    check_at_most("out_a", "headdim", sizes.headdim, MAX_MERGED_HEADDIM)?;
    let batch = if is_packed { 1 } else { sizes.batch };
    Ok(MergedStates { batch, seqlen_q: sizes.rows, nheads: sizes.nheads, headdim_v: sizes.headdim })
}

/// Checks dtype and rank of out_a, which decides whether all are packed.
fn check_first(a: &TensorDesc, backend: Backend) -> Result<Packing<'static>> {
    let floats = [DType::Half, DType::BFloat16, DType::Float, DType::Double];
    let allowed = if backend == Backend::Kernels { &floats[..3] } else { &floats };
    if !allowed.contains(&a.dtype) {
        let names: Vec<String> = allowed.iter().map(DType::to_string).collect();
        return Err(Error::value("out_a", format!("dtype {}", a.dtype), names.join(", ")));
    }
    match a.sizes.len() {
        3 => Ok(Packing::Since("a packed out_a")),
        4 => Ok(Packing::Needs("rank 3")),
        _ => Err(Error::value("out_a", rank(a), "(batch, seqlen_q, nheads, headdim_v) or packed (total_q, nheads, headdim_v)")),
    }
}
