//! Converts between the layout of tensors, (batch, seqlen, heads, headdim), and that of the CPU backend's matrix products. A group is the
//! query heads of a batch entry that share a KV head: their rows make one matrix. `heads`: of a group; of K and V, 1.

use crate::error::Result;
use tch::{Device, Kind, Tensor};

/// Returns `count` entries of a dimension as a view. The whole dimension costs no ATen call, which small problems notice.
pub fn narrow(t: &Tensor, dim: i64, start: i64, count: i64) -> Result<Tensor> {
    Ok(if count == t.size()[dim as usize] { t.shallow_clone() } else { t.f_narrow(dim, start, count)? })
}

/// Returns `count` entries from `start` on of these dimensions, (dim, start, count), as a view. Dimensions of size 1, broadcast ones, stay.
pub fn narrow_broadcast<const N: usize>(t: &Tensor, parts: [(usize, i64, i64); N]) -> Result<Tensor> {
    let mut t = t.shallow_clone();
    for (dim, start, count) in parts {
        if t.size()[dim] > 1 {
            t = t.f_narrow(dim as i64, start, count)?;
        }
    }
    Ok(t)
}

/// Converts (batch, seqlen, groups * heads, headdim) to contiguous (batch * groups, seqlen * heads, headdim) of type `kind`; may alias `t`.
pub fn to_groups(t: &Tensor, heads: i64, kind: Kind) -> Result<Tensor> {
    let (batch, seqlen, all_heads, headdim) = t.size4()?;
    let groups = all_heads / heads;
    let by_group = t.f_view([batch, seqlen, groups, heads, headdim])?.f_permute([0, 2, 1, 3, 4])?;
    Ok(by_group.f_to_kind(kind)?.f_contiguous()?.f_view([batch * groups, seqlen * heads, headdim])?)
}

/// Inverts [`to_groups`], into a new contiguous tensor.
pub fn from_groups(t: &Tensor, batch: i64, heads: i64) -> Result<Tensor> {
    let (all_groups, rows, headdim) = t.size3()?;
    let (groups, seqlen) = (all_groups / batch.max(1), rows / heads);
    let result = Tensor::f_empty([batch, seqlen, groups * heads, headdim], (t.kind(), Device::Cpu))?;
    result
        .f_view([batch, seqlen, groups, heads, headdim])?
        .f_copy_(&t.f_view([batch, groups, seqlen, heads, headdim])?.f_permute([0, 2, 1, 3, 4])?)?;
    Ok(result)
}

/// Converts a number for each row, (batch, nheads, seqlen) as softmax_lse has it, to (batch * groups, seqlen * heads, 1).
pub fn rows_from_lse(lse: &Tensor, heads: i64, kind: Kind) -> Result<Tensor> {
    let (batch, nheads, seqlen) = lse.size3()?;
    let by_group = lse.f_reshape([batch, nheads / heads, heads, seqlen])?.f_transpose(2, 3)?;
    Ok(by_group.f_to_kind(kind)?.f_contiguous()?.f_view([batch * (nheads / heads), seqlen * heads, 1])?)
}

/// Inverts [`rows_from_lse`], into a new contiguous tensor.
pub fn lse_from_rows(rows: &Tensor, batch: i64, heads: i64) -> Result<Tensor> {
    let (all_groups, all_rows, _) = rows.size3()?;
    let (groups, seqlen) = (all_groups / batch.max(1), all_rows / heads);
    let lse = Tensor::f_empty([batch, groups * heads, seqlen], (rows.kind(), Device::Cpu))?;
    lse.f_view([batch, groups, heads, seqlen])?.f_copy_(&rows.f_view([batch, groups, seqlen, heads])?.f_transpose(2, 3)?)?;
    Ok(lse)
}
