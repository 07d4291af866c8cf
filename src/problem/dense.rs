//! Validation of `fwd` and `bwd`: dense q, k and v (batch, seqlen, nheads, headdim), or packed ones (total, nheads, headdim), whose
//! sequences follow each other. Makes the [`Attention`] problem that planner and backends work with, by the rules of other modules:
//! operands (ranks and heads), lengths (of sequences), scores (scale, window, bias), block_mask.

use super::attention::{Appended, Attention, Keys, Queries};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::features::RequestedFeatures;
use super::operands::{self, Packing}; // Since(argument): packed, because it is given; Needs(argument): dense, without it
use super::tensor::{Backend, DType, Options, TensorDesc};
use super::{block_mask, lengths, scores};
use crate::error::{Error, Result};

/// Checks q, k, v and the options of `fwd`.
pub fn validate(q: &TensorDesc, k: &TensorDesc, v: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    let features = RequestedFeatures::of(o)?;
    scores::check_numbers(o, backend)?;
    let is_packed = o.cu_seqlens_q.is_some() || o.cu_seqlens_k.is_some();
    let cu_seqlens = "cu_seqlens_q and cu_seqlens_k";
    let packing = if is_packed { Packing::Since(cu_seqlens) } else { Packing::Needs(cu_seqlens) };
    let qs = operands::check_operand("q", q, q, packing, backend)?;
    let ks = operands::check_operand("k", k, q, packing, backend)?;
    let vs = operands::check_operand("v", v, q, packing, backend)?;
    check_same_size("k", "batch", ks.batch, "q", qs.batch)?;
    check_same_size("v", "batch", vs.batch, "q", qs.batch)?;
    // rows(): the dimension's name, total or seqlen
    check_same_size("v", packing.rows(), vs.rows, "k", ks.rows)?;
    check_same_size("v", "nheads", vs.nheads, "k", ks.nheads)?;
    check_same_size("k", "headdim", ks.headdim, "q", qs.headdim)?;
    operands::check_heads(qs.nheads, ks.nheads, "k and v")?;
    operands::check_headdim("q", qs.headdim)?;
    operands::check_headdim("v", vs.headdim)?;
    let lengths = lengths::check(q, o, packing, [&qs, &ks], backend)?;
    if let Some(d) = &o.seqused_k {
        // the rules of cu_seqlens: an int32 vector, here of this many numbers
        lengths::check_lengths_vector("seqused_k", d, q, Some(lengths.batch), "(batch,)")?;
    }
    scores::check_tensors(o, q, [lengths.batch, qs.nheads, lengths.longest_q, lengths.longest_k])?;
    block_mask::check(o, q, [lengths.longest_q, lengths.longest_k])?;
    Ok(Attention {
        batch: lengths.batch,
        // rows: of an entry, packed of all sequences, which max_seqlen_q may exceed
        seqlen_q: lengths.longest_q.min(qs.rows),
        seqlen_k: lengths.longest_k.min(ks.rows),
        nheads: qs.nheads,
        nheads_k: ks.nheads,
        headdim: qs.headdim,
        headdim_v: vs.headdim,
        dtype: q.dtype,
        queries: if is_packed { Queries::Packed { total: qs.rows } } else { Queries::Dense },
        keys: if is_packed { Keys::Packed { total: ks.rows } } else { Keys::Dense },
        softmax_scale: scores::scale(o, qs.headdim),
        window: scores::window(o),
        features,
        appended: Appended::default(),
        num_splits: o.num_splits,
    })
}

/// Checks the tensors that `bwd` takes beyond those of `fwd`.
pub fn validate_backward(
    dout: &TensorDesc,
    out: &TensorDesc,
    softmax_lse: &TensorDesc,
    rng_state: Option<&TensorDesc>,
    q: &TensorDesc,
    a: &Attention,
    backend: Backend,
) -> Result<()> {
    let cu_seqlens = "cu_seqlens_q and cu_seqlens_k";
    let packing = if a.total_q().is_some() { Packing::Since(cu_seqlens) } else { Packing::Needs(cu_seqlens) };
    let expected = a.query_shape(a.headdim_v);
    for (name, d) in [("dout", dout), ("out", out)] {
        check_compute_dtype(name, d, backend)?;
        operands::sizes(name, d, packing)?;
        check_like_q(name, d, q)?;
        // `readable_gradient` in tensor.rs copies a dout with a layout that no backend reads
        if !(name == "dout" && backend == Backend::Meta) {
            check_layout(name, d, backend)?;
        }
        reject_if!(!same_sizes(&d.sizes, &expected), name, shape(d), format!("shape {}, that of the forward's out", listed(&expected)));
    }
    check_per_row("softmax_lse", softmax_lse, q, a)?;
    check_rng_state(rng_state, q, a)
}

/// Checks the gradient of softmax_lse.
pub fn validate_dlse(dlse: &TensorDesc, q: &TensorDesc, a: &Attention) -> Result<()> {
    check_per_row("dlse", dlse, q, a)
}

/// Checks softmax_lse or its gradient: fp32, a number for each query row.
fn check_per_row(name: &str, d: &TensorDesc, q: &TensorDesc, a: &Attention) -> Result<()> {
    check_dtype(name, d, DType::Float)?;
    check_device(name, d, q)?;
    reject_if!(!same_sizes(&d.sizes, &a.lse_shape()), name, shape(d), format!("shape {}", listed(&a.lse_shape())));
    Ok(())
}

/// Checks seed and offset of the forward's dropout.
fn check_rng_state(rng_state: Option<&TensorDesc>, q: &TensorDesc, a: &Attention) -> Result<()> {
    match rng_state {
        Some(d) if a.features.dropout_p > 0.0 => {
            if d.dtype != DType::Int64 || !same_sizes(&d.sizes, &[2]) {
                let given = format!("{} of dtype {}", shape(d), d.dtype);
                return Err(Error::value("rng_state", given, "shape (2,) of dtype torch.int64, that of the forward"));
            }
            check_device("rng_state", d, q)
        }
        None if a.features.dropout_p > 0.0 => Err(Error::value("rng_state", "None", "that of the forward, since dropout_p is not 0")),
        Some(d) => Err(Error::value("rng_state", format!("a tensor of {}", shape(d)), "None, since dropout_p is 0")),
        None => Ok(()),
    }
}
