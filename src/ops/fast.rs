//! `volta_fa::fwd_fast`: the forward with int8 scores and fp16 sums, with a stated error and without a derivative.
//!
//! On a GPU without fast kernels, or where they do not pay ([`plan::fast`]), the exact forward serves the call.

use super::blocks::{broadcast_strides, lse_at, Blocks};
use super::device::fill_varlen;
use super::inputs::{int32_values, Inputs, Target};
use super::launches::Launches;
use super::{cpu, empty_forward, forward_on};
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::FastParams;
use crate::plan::{self, FastPlan};
use crate::problem::{self, Attention, Backend};
use crate::tensor::{self, element_type, operand, output, without_padding};
use std::ptr::null;
use tch::{Kind, Tensor};

/// Keys that share scales: codes of a sequence begin at a multiple (csrc/turing/fast/codes.cuh).
const SCALE_KEYS: i64 = 64;
/// Number of scales of a block of keys.
const SCALES: i64 = 4;

/// Computes (out, softmax_lse).
///
/// # Errors
/// Wrong arguments; a device that no kernel runs on.
pub fn forward(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let d = inputs.describe()?;
    let target = Target::of(&d.q, inputs.stream)?;
    let a = problem::validate_fast(&d.q, &d.k, &d.v, &d.options, target.backend())?;
    let o = &inputs.options;
    if a.is_varlen() && target.checks_lengths(o.check_lengths)? {
        let [cu_q, cu_k] = [&o.cu_seqlens_q, &o.cu_seqlens_k].map(int32_values);
        problem::validate_lengths(&a, cu_q?.as_deref(), cu_k?.as_deref(), None)?;
    }
    if a.is_empty() {
        return empty_forward(inputs, &a);
    }
    match &target {
        Target::Cpu => cpu::fast_forward(&with_bias(inputs), &a),
        Target::Kernels(launcher) => match plan::fast(&a.padded(), &launcher.limits()?)? {
            Some(plan) => on_device(inputs, &a, &plan, &**launcher),
            None => forward_on(&target, &with_bias(inputs), &a),
        },
    }
}

/// Rejects what [`forward`] would reject, as far as sizes are known. Tensors may have no data.
pub fn check(inputs: &Inputs) -> Result<()> {
    let d = inputs.describe()?;
    problem::validate_fast(&d.q, &d.k, &d.v, &d.options, Backend::Meta).map(|_| ())
}

/// Returns the inputs of the exact forward: the mask is a boolean bias.
fn with_bias(inputs: &Inputs) -> Inputs {
    let mut inputs = inputs.share();
    inputs.options.attn_bias = inputs.options.attn_mask.take();
    inputs
}

fn on_device(inputs: &Inputs, given: &Attention, plan: &FastPlan, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let a = &given.padded();
    log::fast(a, plan)?;
    let mut inputs = inputs.share();
    for t in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
        *t = tensor::readable(t)?;
    }
    let mask = inputs.options.attn_mask.take().map(|t| readable_mask(&t, a.seqlen_k)).transpose()?;
    inputs.options.attn_mask = mask;
    let inputs = &inputs;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    let is_bf16 = inputs.q.kind() == Kind::BFloat16;
    let out = empty(&a.query_shape(a.headdim_v), inputs.q.kind())?;
    let softmax_lse = empty(&a.lse_shape(), Kind::Float)?;
    // scratch memory, O(seqlen)
    let headdim = i64::from(plan.forward.variant.headdim);
    let blocks = a.total_k().map_or(a.batch * ceil_div(a.seqlen_k, SCALE_KEYS), |total| total / SCALE_KEYS + a.batch + 1);
    let v_max_stride = ceil_div(a.seqlen_k, i64::from(plan.prepare.variant.block_rows));
    let k_codes = empty(&[a.nheads_k, blocks * SCALE_KEYS, headdim], Kind::Int8)?;
    let k_scales = empty(&[a.nheads_k, blocks, SCALES], Kind::Float)?;
    let k_mean = empty(&[a.nheads_k, a.batch, headdim], Kind::Float)?;
    let v_max = empty(&[a.nheads_k, a.batch, v_max_stride], Kind::Float)?;
    let v_scaled = if is_bf16 { empty(&inputs.v.size(), Kind::Half)? } else { inputs.v.shallow_clone() };
    let written = [
        ("out", Some(&out)),
        ("softmax_lse", Some(&softmax_lse)),
        ("k_codes", Some(&k_codes)),
        ("k_scales", Some(&k_scales)),
        ("k_mean", Some(&k_mean)),
        ("v_max", Some(&v_max)),
        ("v_scaled", Some(&v_scaled).filter(|_| is_bf16)),
    ];
    let launches = Launches::begin(inputs, a, launcher, written);
    fill_varlen(a, [&out, &softmax_lse])?;
    let [mask_batch_stride, mask_head_stride, mask_row_stride, _] = inputs.options.attn_mask.as_ref().map_or([0; 4], broadcast_strides);
    let floats = |t: &Tensor| t.data_ptr() as *mut f32;
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, k, v, problem, lengths, .. } = Blocks::new(inputs, a, (first, batches));
        let mut params = FastParams {
            q,
            k,
            v,
            out: output(&out, first),
            softmax_lse: lse_at(&softmax_lse, a, first),
            problem,
            lengths,
            batch: a.batch as i32,
            element: element_type(&inputs.q),
            k_codes: k_codes.data_ptr().cast(),
            k_rows: blocks * SCALE_KEYS,
            k_scales: floats(&k_scales),
            k_mean: floats(&k_mean),
            v_max: floats(&v_max),
            v_max_stride,
            v_scaled: output(&v_scaled, first),
            mask: inputs
                .options
                .attn_mask
                .as_ref()
                .map_or(null(), |t| (t.data_ptr() as *const u8).wrapping_offset((first * mask_batch_stride) as isize).cast()),
            mask_batch_stride,
            mask_head_stride,
            mask_row_stride,
            smooth_k: inputs.options.smooth_k.into(),
            rotate: inputs.options.rotate.into(),
            phase: 0,
        };
        launches.run(&plan.prepare, batches, bytes_of(&params))?;
        if is_bf16 {
            params.phase = 1;
            launches.run(&plan.prepare, batches, bytes_of(&params))?;
            params.v = operand(&v_scaled, first);
        }
        launches.run(&plan.forward, batches, bytes_of(&params))?;
    }
    Ok((without_padding(out, given.headdim_v)?, softmax_lse))
}

fn ceil_div(n: i64, by: i64) -> i64 {
    (n + by - 1) / by
}

/// Returns the mask with contiguous rows of whole blocks of keys at even addresses: the kernel reads two keys at once and tests no
/// bounds. Copies it if necessary. Broadcast dimensions other than the keys keep size 1.
fn readable_mask(mask: &Tensor, seqlen_k: i64) -> Result<Tensor> {
    let (mut sizes, strides) = (mask.size(), mask.stride());
    let is_aligned = mask.data_ptr() as usize % 2 == 0
        && sizes[3] % SCALE_KEYS == 0
        && sizes[3] >= seqlen_k
        && strides[3] == 1
        && (0..3).all(|i| sizes[i] == 1 || strides[i] % 2 == 0);
    if is_aligned {
        return Ok(mask.shallow_clone());
    }
    let mut once = if sizes[3] > seqlen_k { mask.f_narrow(3, 0, seqlen_k)? } else { mask.shallow_clone() };
    for i in 0..3 {
        // the copy of an expanded mask repeats too, and stays small
        if strides[i] == 0 && sizes[i] > 1 {
            once = once.f_narrow(i as i64, 0, 1)?;
            sizes[i] = 1;
        }
    }
    sizes[3] = ceil_div(seqlen_k, SCALE_KEYS) * SCALE_KEYS;
    let copy = Tensor::f_zeros(&sizes, (Kind::Bool, mask.device()))?;
    copy.f_narrow(3, 0, seqlen_k)?.f_copy_(&once)?;
    Ok(copy)
}
