//! `volta_fa::merge_attention_states`: attention over two sets of keys, from the attention over each. `merge_attention_states_` does it in
//! place, also into an fp32 out. A state is an out with its softmax_lse. A softmax over two disjoint sets is the mean of their softmaxes,
//! weighted by their sums of exponentials, whose logarithms softmax_lse has. Shared prefixes, split caches and rings of devices use it.

use super::blocks::at;
use super::inputs::Target; // Target: ATen on the CPU, or kernels
use super::launches::Launches;
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::MergeParams;
use crate::plan::{self, PlannedKernel};
use crate::problem::{self, padded_headdim, Backend, MergedStates};
// readable: the tensor, or a copy that kernels can read; without_padding undoes its padded columns; ranges are for the simulator
use crate::tensor::{self, compute_kind, describe, operand, output, read_range, readable, without_padding, written_range};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// Two states.
pub struct States {
    /// (batch, seqlen_q, nheads, headdim_v), or packed (total_q, nheads, headdim_v)
    pub outs: [Tensor; 2],
    /// Their softmax_lse, natural logarithms in fp32: (batch, nheads, seqlen_q), or packed (nheads, total_q)
    pub lses: [Tensor; 2],
    pub stream: *mut c_void, // current cudaStream_t
}

/// Computes (out, softmax_lse) over the keys of both.
pub fn merge(states: &States) -> Result<(Tensor, Tensor)> {
    let target = Target::of(&describe(&states.outs[0])?, states.stream)?;
    let m = validate(states, false, target.backend())?; // false: not in place
    match target {
        Target::Kernels(launcher) if !m.is_empty() => on_device(states, &m, &*launcher),
        _ => on_cpu(states),
    }
}

/// Updates the first state (the whole) to that over the keys of both. Its out may be fp32 beside an fp16 or bf16 out of the second (the
/// part), so that merging many parts loses no precision.
pub fn merge_in_place(states: &States) -> Result<()> {
    // by the dtype of the part: on the CPU fp16 may select the simulator
    let target = Target::of(&describe(&states.outs[1])?, states.stream)?;
    let m = validate(states, true, target.backend())?; // true: in place
    let ([whole, part], [whole_lse, _]) = (&states.outs, &states.lses);
    let (out, lse) = match target {
        Target::Kernels(launcher) if !m.is_empty() && writable(whole, whole_lse)? => return in_place_on_device(states, &m, &*launcher),
        // the kernel cannot write this layout
        Target::Kernels(launcher) if !m.is_empty() => {
            let outs = [whole.shallow_clone(), part.f_to_kind(whole.kind())?];
            let lses = states.lses.each_ref().map(Tensor::shallow_clone);
            on_device(&States { outs, lses, stream: states.stream }, &m, &*launcher)?
        }
        _ => on_cpu(states)?,
    };
    whole.shallow_clone().f_copy_(&out)?;
    whole_lse.shallow_clone().f_copy_(&lse)?;
    Ok(())
}

/// Returns true if the kernel can write this out and softmax_lse where they are.
fn writable(out: &Tensor, lse: &Tensor) -> Result<bool> {
    let headdim = *out.size().last().unwrap_or(&0);
    // `readable` returns a copy of what kernels cannot read
    let in_place = padded_headdim(headdim) == headdim && readable(out)?.data_ptr() == out.data_ptr();
    let (sizes, strides) = (lse.size(), lse.stride());
    let rows = sizes.len() - 1;
    let rows_lie_together = sizes[rows] <= 1 || strides[rows] == 1;
    // one stride from head to head, entries included
    let evenly = sizes.len() == 2 || sizes[0] <= 1 || strides[0] == sizes[1] * strides[1];
    Ok(in_place && rows_lie_together && evenly)
}

/// Rejects what [`merge`] would reject, as far as sizes of meta tensors are known.
pub fn check(states: &States, in_place: bool) -> Result<()> {
    validate(states, in_place, Backend::Meta).map(|_| ())
}

fn validate(States { outs: [out_a, out_b], lses: [lse_a, lse_b], .. }: &States, in_place: bool, backend: Backend) -> Result<MergedStates> {
    problem::validate_merge([&describe(out_a)?, &describe(out_b)?], [&describe(lse_a)?, &describe(lse_b)?], in_place, backend)
}

/// Merges into new tensors, with the merge kernel.
fn on_device(states: &States, m: &MergedStates, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let planned = plan::merge(m, &launcher.limits()?)?;
    log::merge(m, &planned)?;
    let [a, b] = [readable(&states.outs[0])?, readable(&states.outs[1])?];
    let [lse_a, lse_b] = [states.lses[0].f_contiguous()?, states.lses[1].f_contiguous()?];
    let empty = |like: &Tensor| tensor::empty(&like.size(), like.kind(), launcher);
    let (out, lse) = (empty(&a)?, empty(&lse_a)?);
    let read = [("out_a", &a), ("out_b", &b), ("softmax_lse_a", &lse_a), ("softmax_lse_b", &lse_b)].map(|(name, t)| read_range(name, t));
    let written = [written_range("out", &out), written_range("softmax_lse", &lse)];
    let launches = Launches::begin_with(launcher, read.into_iter().chain(written).collect());
    launch([&a, &b, &out], [&lse_a, &lse_b, &lse], m, &planned, &launches)?;
    Ok((without_padding(out, m.headdim_v)?, lse))
}

/// Merges into the first state. Its out and softmax_lse are [`writable`].
fn in_place_on_device(states: &States, m: &MergedStates, launcher: &dyn Launcher) -> Result<()> {
    let planned = plan::merge(m, &launcher.limits()?)?;
    log::merge(m, &planned)?;
    let ([whole, part], [whole_lse, part_lse]) = (&states.outs, &states.lses);
    let (part, part_lse) = (readable(part)?, part_lse.f_contiguous()?);
    let written = [written_range("out_a", whole), written_range("softmax_lse_a", whole_lse)];
    let read = [read_range("out_b", &part), read_range("softmax_lse_b", &part_lse)];
    let launches = Launches::in_place(launcher, [written, read].concat());
    launch([whole, &part, whole], [whole_lse, &part_lse, whole_lse], m, &planned, &launches)
}

/// Launches the kernel. Arrays are [first state, second state, result]; in place the result is the first state.
fn launch(
    [a, b, out]: [&Tensor; 3],
    [lse_a, lse_b, lse]: [&Tensor; 3],
    m: &MergedStates,
    planned: &PlannedKernel,
    launches: &Launches,
) -> Result<()> {
    let heads_dim = lse.dim() - 2;
    // from head to head; softmax_lse of the second state is contiguous
    let lse_stride = if m.nheads > 1 || m.batch > 1 { lse.stride()[heads_dim] } else { m.seqlen_q };
    for (first, batches) in plan::batch_chunks(m.batch) {
        let of_first = |t: &Tensor, stride: i64| at(t, first * m.nheads * stride);
        let params = MergeParams {
            out_a: operand(a, first),
            out_b: operand(b, first),
            out: output(out, first),
            lse_a: of_first(lse_a, lse_stride),
            lse_b: of_first(lse_b, m.seqlen_q),
            lse: of_first(lse, lse_stride),
            lse_stride,
            nheads: m.nheads as i32,
            seqlen_q: m.seqlen_q as i32,
            headdim_v: padded_headdim(m.headdim_v) as i32,
            element: tensor::element_type(out),
            part: tensor::element_type(b), // of the second out
        };
        launches.run(planned, batches, bytes_of(&params))?;
    }
    Ok(())
}

/// Computes the merge with ATen, in fp32 or fp64.
fn on_cpu(States { outs: [out_a, out_b], lses: [lse_a, lse_b], .. }: &States) -> Result<(Tensor, Tensor)> {
    let kind = compute_kind(out_a.kind());
    let swapped = |t: &Tensor, from: f64, to: f64| t.f_masked_fill(&t.f_eq(from)?, to);
    // softmax_lse is +inf without keys: the logarithm of a sum of 0
    let of_keys = |t: &Tensor| swapped(&t.f_to_kind(kind)?, f64::INFINITY, f64::NEG_INFINITY);
    let (lse_a, lse_b) = (of_keys(lse_a)?, of_keys(lse_b)?);
    let joint = lse_a.f_logaddexp(&lse_b)?;
    // from the difference, so that the rounding of `joint` is in neither weight
    let weighted = |out: &Tensor, lse: &Tensor, other: &Tensor| -> Result<Tensor> {
        let weight =
            lse.f_sub(other)?.f_sigmoid()?.f_masked_fill(&lse.f_eq(f64::NEG_INFINITY)?, 0.0)?.f_transpose(-1, -2)?.f_unsqueeze(-1)?;
        // a part of weight 0 may be infinite
        Ok(out.f_to_kind(kind)?.f_mul(&weight)?.f_masked_fill(&weight.f_eq(0.0)?, 0.0)?)
    };
    let out = weighted(out_a, &lse_a, &lse_b)?.f_add(&weighted(out_b, &lse_b, &lse_a)?)?.f_to_kind(out_a.kind())?.f_contiguous()?;
    Ok((out, swapped(&joint, f64::NEG_INFINITY, f64::INFINITY)?.f_to_kind(Kind::Float)?.f_contiguous()?))
}
