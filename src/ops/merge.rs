//! `volta_fa::merge_attention_states`: attention over two sets of keys, from the attention over each.
//!
//! A softmax over disjoint sets together is the mean of the softmaxes over each, weighted by their sums of exponentials, whose
//! logarithms are their softmax_lse. So a shared prefix, a cache in pieces or a ring of devices needs no part's scores again.

use super::{device, Target};
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::{ElementType, MergeParams};
use crate::plan;
use crate::problem::{self, Backend, MergedStates};
use crate::tensor::{self, describe, memory_range, operand, output, readable, without_padding};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// What the op takes.
pub struct States {
    pub outs: [Tensor; 2],
    /// softmax_lse of each
    pub lses: [Tensor; 2],
    /// the current stream of their device
    pub stream: *mut c_void,
}

/// (out, softmax_lse) over the keys of both.
///
/// # Errors
/// Wrong arguments; a device that no kernel runs on.
pub fn merge(states: &States) -> Result<(Tensor, Tensor)> {
    let target = Target::of(&describe(&states.outs[0])?, states.stream)?;
    let m = validate(states, target.backend())?;
    match target {
        Target::Kernels(launcher) if ![m.batch, m.seqlen_q, m.nheads, m.headdim_v].contains(&0) => on_device(states, &m, &*launcher),
        _ => on_cpu(states),
    }
}

/// What [`merge`] would refuse of tensors that may have no data, as far as their sizes are known.
pub fn check(states: &States) -> Result<()> {
    validate(states, Backend::Meta).map(|_| ())
}

fn validate(States { outs: [out_a, out_b], lses: [lse_a, lse_b], .. }: &States, backend: Backend) -> Result<MergedStates> {
    problem::validate_merge([&describe(out_a)?, &describe(out_b)?], [&describe(lse_a)?, &describe(lse_b)?], backend)
}

fn on_device(states: &States, m: &MergedStates, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let planned = plan::merge(m, &launcher.limits()?)?;
    log::merge(m, &planned)?;
    let [a, b] = [readable(&states.outs[0])?, readable(&states.outs[1])?];
    let [lse_a, lse_b] = [states.lses[0].f_contiguous()?, states.lses[1].f_contiguous()?];
    let empty = |like: &Tensor| tensor::empty(&like.size(), like.kind(), like.device(), launcher.output_alignment());
    let (out, lse) = (empty(&a)?, empty(&lse_a)?);
    let ranges = [
        memory_range("out_a", &a, false),
        memory_range("out_b", &b, false),
        memory_range("softmax_lse_a", &lse_a, false),
        memory_range("softmax_lse_b", &lse_b, false),
        memory_range("out", &out, true),
        memory_range("softmax_lse", &lse, true),
    ];
    launcher.begin(&ranges);
    for (first, batches) in plan::batch_chunks(m.batch) {
        let lse_at = |t: &Tensor| device::at(t, first * m.nheads * m.seqlen_q);
        let params = MergeParams {
            out_a: operand(&a, first),
            out_b: operand(&b, first),
            out: output(&out, first),
            lse_a: lse_at(&lse_a),
            lse_b: lse_at(&lse_b),
            lse: lse_at(&lse),
            nheads: m.nheads as i32,
            seqlen_q: m.seqlen_q as i32,
            headdim_v: tensor::padded_headdim(m.headdim_v) as i32,
            element: match out.kind() {
                Kind::Half => ElementType::Half,
                Kind::BFloat16 => ElementType::Bfloat,
                _ => ElementType::Float,
            },
        };
        device::run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok((without_padding(out, m.headdim_v)?, lse))
}

/// The same by ATen operations, in fp32 or fp64.
fn on_cpu(States { outs: [out_a, out_b], lses: [lse_a, lse_b], .. }: &States) -> Result<(Tensor, Tensor)> {
    let kind = if out_a.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let swapped = |t: &Tensor, from: f64, to: f64| t.f_masked_fill(&t.f_eq(from)?, to);
    // of a part without keys +inf stands for the logarithm of a sum of 0
    let of_keys = |t: &Tensor| swapped(&t.f_to_kind(kind)?, f64::INFINITY, f64::NEG_INFINITY);
    let (lse_a, lse_b) = (of_keys(lse_a)?, of_keys(lse_b)?);
    let joint = lse_a.f_logaddexp(&lse_b)?;
    // from the difference: the rounding of joint would be in both weights
    let weighted = |out: &Tensor, lse: &Tensor, other: &Tensor| -> Result<Tensor> {
        let weight =
            lse.f_sub(other)?.f_sigmoid()?.f_masked_fill(&lse.f_eq(f64::NEG_INFINITY)?, 0.0)?.f_transpose(-1, -2)?.f_unsqueeze(-1)?;
        // not 0 times what may be infinite: a part that counts nothing has no say
        Ok(out.f_to_kind(kind)?.f_mul(&weight)?.f_masked_fill(&weight.f_eq(0.0)?, 0.0)?)
    };
    let out = weighted(out_a, &lse_a, &lse_b)?.f_add(&weighted(out_b, &lse_b, &lse_a)?)?.f_to_kind(out_a.kind())?.f_contiguous()?;
    Ok((out, swapped(&joint, f64::NEG_INFINITY, f64::INFINITY)?.f_to_kind(Kind::Float)?.f_contiguous()?))
}
