//! The gradient of softmax_lse (dlse, an argument of `bwd`) on the kernels.
//!
//! A score's gradient is p * (dp - delta), where p is its probability and delta the row sum of out * dout. dlse adds p * dlse. So delta
//! becomes delta - dlse. The preprocess kernel leaves -delta in scratch memory (row_stats), and device.rs then adds dlse there with ATen.

use crate::error::Result;
use crate::kernels::Scratch;
use tch::{Kind, Tensor};

/// Returns the gradient with 0 in rows without a visible key, whose log-sum-exp is +inf.
pub fn of_visible_rows(dlse: &Tensor, softmax_lse: &Tensor) -> Result<Tensor> {
    Ok(dlse.f_masked_fill(&softmax_lse.f_eq(f64::INFINITY)?, 0.0)?)
}

/// Adds the gradient to the row statistics (entries, nheads, groups of rows, floats of a group) of a launch of `count` entries from
/// `first` on. `scratch` says where in a group each row's -delta is; `cu_q`, cu_seqlens_q, where packed sequences begin.
pub fn add_to_stats(dlse: &Tensor, row_stats: &Tensor, scratch: &Scratch, cu_q: Option<&Tensor>, (first, count): (i64, i64)) -> Result<()> {
    let (_, nheads, groups, _) = row_stats.size4()?;
    let group_rows = i64::from(scratch.group_rows);
    let rows = groups * group_rows;
    let (entries, padded) = match cu_q {
        Some(cu) => (1, packed(dlse, &cu.f_narrow(0, first, count + 1)?, rows, i64::from(scratch.row_rounding))?),
        None => {
            let padded = Tensor::f_zeros([count, nheads, rows], (Kind::Float, dlse.device()))?;
            padded.f_narrow(2, 0, dlse.size()[2])?.f_copy_(&dlse.f_narrow(0, first, count)?)?;
            (count, padded)
        }
    };
    let (stats, of_groups) = (row_stats.f_narrow(0, 0, entries)?, padded.f_view([entries, nheads, groups, group_rows])?);
    for (row, offset, count) in runs(scratch.neg_delta_offsets) {
        // a family of kernels may keep each value in several places
        for &copy in scratch.copy_distances {
            let mut neg_delta = stats.f_narrow(3, offset + i64::from(copy), count)?;
            let _ = neg_delta.f_add_(&of_groups.f_narrow(3, row, count)?)?;
        }
    }
    Ok(())
}

/// Returns the gradient of packed rows, (nheads, total), in the order of scratch memory, (nheads, rows): there sequence i begins at its
/// first row divided by `rounding`, plus i, times `rounding` (csrc/backward/scratch.cuh). Leaves out rows of no sequence.
fn packed(dlse: &Tensor, cu_seqlens_q: &Tensor, rows: i64, rounding: i64) -> Result<Tensor> {
    let (nheads, total) = dlse.size2()?;
    let (device, entries) = (dlse.device(), cu_seqlens_q.size()[0] - 1);
    let position = Tensor::f_arange(total, (Kind::Int, device))?;
    // a row's sequence has the number of sequences that end at or before the row
    let (out_int32, right) = (false, true);
    let entry = position.f_bucketize(&cu_seqlens_q.f_narrow(0, 1, entries)?, out_int32, right)?;
    let start = cu_seqlens_q.f_index_select(0, &entry.f_clamp_max(entries - 1)?)?;
    let of_none = entry.f_eq(entries)?.f_logical_or(&position.f_lt_tensor(&start)?)?;
    let first = start.f_floor_divide_scalar(rounding)?.f_add(&entry)?.f_mul_scalar(rounding)?;
    // one row more than kernels read takes those of no sequence
    let at = first.f_add(&position.f_sub(&start)?)?.f_clamp(0, rows)?.f_masked_fill(&of_none, rows)?;
    let mut padded = Tensor::f_zeros([rows + 1, nheads], (Kind::Float, device))?;
    let _ = padded.f_index_put_(&[Some(at.f_to_kind(Kind::Int64)?)], &dlse.f_transpose(0, 1)?, false)?; // false: overwrites
    Ok(padded.f_narrow(0, 0, rows)?.f_transpose(0, 1)?.f_contiguous()?)
}

/// Returns (first row, its offset, number of rows) of each run of consecutive offsets, so that one operation adds to several rows.
fn runs(offsets: &[u32]) -> Vec<(i64, i64, i64)> {
    let mut runs: Vec<(i64, i64, i64)> = Vec::new();
    for (row, &offset) in (0..).zip(offsets) {
        match runs.last_mut() {
            Some((_, start, count)) if *start + *count == i64::from(offset) => *count += 1,
            _ => runs.push((row, i64::from(offset), 1)),
        }
    }
    runs
}
