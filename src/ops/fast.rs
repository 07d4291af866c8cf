//! `volta_fa::fwd_fast`: the forward with int8 scores and fp16 sums, whose error docs/guides/fast.md states. It has no derivative.
//!
//! Q and K become int8 codes with scales. `smooth_k` subtracts K's mean before, `rotate` applies a Hadamard transform to both: either makes
//! the codes more exact. Below, codes are those of K with their scales, and V's largest magnitudes. A prepare kernel computes them
//! (`volta_fa::prepare_fast` does so ahead), and the forward kernel reads them. A boolean `attn_mask` is packed to bits first. On a GPU
//! without fast kernels, or where they do not pay ([`plan::fast`]), the exact forward, that of `fwd`, computes the call.

use super::blocks::{broadcast_strides, lse_at, with_readable_operands, Blocks};
use super::codes::{ceil_div, CodeSizes, Codes, SCALE_KEYS};
use super::device::fill_varlen;
use super::inputs::{Inputs, Target}; // Target: ATen on the CPU, or kernels
use super::launches::{memory_ranges, Launches, Named};
use super::{cpu, empty_forward, forward_on};
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::limits::MAX_FAST_HEADDIM; // 256
use crate::log;
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)
use crate::params::FastParams;
use crate::plan::{self, FastPlan, PlannedKernel};
use crate::problem::{self, Attention, Backend};
// operand and output: address and strides from a batch entry on; Absent: NONE, a block of null pointers and zeros
use crate::tensor::{self, element_type, operand, output, read_range, without_padding, Absent};
use tch::{Kind, Tensor};

// `FastParams::phase`: the work of a launch of the prepare kernel, `PreparePhase` in csrc/turing/fast/prepare.cuh
/// Quantizes K, packs the mask, and takes v_max, V's largest magnitudes.
const QUANTIZE: i32 = 0;
/// Writes v_scaled: bf16 V as fp16, by factors from v_max.
const SCALE_V: i32 = 1;
/// Packs the mask alone.
const PACK_MASK: i32 = 2;

/// Computes (out, softmax_lse).
pub fn forward(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let d = inputs.describe()?;
    let target = Target::of(&d.q, inputs.stream)?;
    let a = problem::validate_fast(&d.q, &d.k, &d.v, &d.options, target.backend())?;
    target.check_seqlens(inputs, &a)?;
    if a.is_empty() {
        return empty_forward(inputs, &a);
    }
    let o = &inputs.options;
    // `within` checks its size, and returns views of its parts, or of a copy's if it is strided or off 16-byte boundaries
    let prepared = o.prepared.as_ref().map(|t| code_sizes(inputs, &a).within(t, o.rotate, inputs.q.device())).transpose()?;
    match &target {
        Target::Cpu if a.headdim.max(a.headdim_v) > MAX_FAST_HEADDIM => forward_on(&target, &with_bias(inputs), &a),
        Target::Cpu => {
            let codes = prepared.map_or_else(|| prepare_on_cpu(inputs, &a), Ok)?;
            cpu::fast_forward(&with_bias(inputs), &a, &codes)
        }
        Target::Kernels(launcher) => match plan::fast(&a.padded(), prepared.is_some(), &launcher.limits()?)? {
            Some(plan) => launch(inputs, &a, &plan, prepared, &**launcher),
            None => forward_on(&target, &with_bias(inputs), &a),
        },
    }
}

/// Computes `volta_fa::prepare_fast`: codes of K and V's largest magnitudes for calls of [`forward`]. There is no q: k stands in for it.
pub fn prepare(given: &Inputs) -> Result<Tensor> {
    let d = given.describe()?;
    let target = Target::of(&d.k, given.stream)?;
    let a = problem::validate_prepare(&d.k, &d.v, &d.options, target.backend())?;
    target.check_seqlens(given, &a)?;
    let mut inputs = given.share();
    inputs.options.cu_seqlens_q = tensor::share(&inputs.options.cu_seqlens_k);
    inputs.options.max_seqlen_q = inputs.options.max_seqlen_k;
    let (inputs, o) = (&inputs, &inputs.options);
    let sizes = code_sizes(inputs, &a);
    // all allocators align to 16 bytes or more, as the parts of the tensor must be
    let prepared = match &target {
        Target::Cpu => Tensor::f_empty([sizes.bytes(o.rotate)], (Kind::Uint8, inputs.k.device()))?,
        Target::Kernels(launcher) => tensor::empty(&[sizes.bytes(o.rotate)], Kind::Uint8, &**launcher)?,
    };
    // kernels leave some bytes unwritten
    let _ = prepared.shallow_clone().f_zero_()?;
    if a.is_empty() {
        return Ok(prepared);
    }
    let codes = sizes.within(&prepared, o.rotate, inputs.k.device())?;
    match &target {
        Target::Cpu => cpu::fast_prepare(inputs, &a, &codes)?,
        Target::Kernels(launcher) => {
            // without a fast kernel, the exact forward computes all calls, and reads no codes
            if let Some(kernel) = plan::fast_prepare(&a.padded(), &launcher.limits()?)? {
                let inputs = &with_readable_operands(inputs)?;
                let a = &a.padded();
                log::fast_prepare(a, &kernel)?;
                let launches = Launches::begin(inputs, a, &**launcher, written(&codes, []));
                for (first, batches) in plan::batch_chunks(a.batch) {
                    run_prepare(&kernel, &codes, &launches, &mut params(inputs, a, &codes, (first, batches)), batches)?;
                }
            }
        }
    }
    Ok(prepared)
}

/// Rejects what [`prepare`] would reject, as far as sizes of meta tensors are known.
pub fn check_prepare(inputs: &Inputs) -> Result<()> {
    let d = inputs.describe()?;
    problem::validate_prepare(&d.k, &d.v, &d.options, Backend::Meta).map(|_| ())
}

/// Returns the sizes of the codes in a tensor of `prepare_fast`.
fn code_sizes(inputs: &Inputs, a: &Attention) -> CodeSizes {
    CodeSizes::prepared(&a.padded(), inputs.k.kind() == Kind::BFloat16)
}

/// Computes the codes of a call without `prepared` on the CPU.
fn prepare_on_cpu(inputs: &Inputs, a: &Attention) -> Result<Codes> {
    let codes = code_sizes(inputs, a).make(|sizes, kind| Ok(Tensor::f_zeros(sizes, (kind, inputs.k.device()))?))?;
    cpu::fast_prepare(inputs, a, &codes)?;
    Ok(codes)
}

/// Rejects what [`forward`] would reject, as far as sizes of meta tensors are known.
pub fn check(inputs: &Inputs) -> Result<()> {
    let d = inputs.describe()?;
    let a = problem::validate_fast(&d.q, &d.k, &d.v, &d.options, Backend::Meta)?;
    let Some(prepared) = &d.options.prepared else { return Ok(()) };
    let sizes = [a.batch, a.seqlen_k, a.nheads_k, a.headdim, a.headdim_v, a.total_k().unwrap_or(0), prepared.sizes[0]];
    if a.is_empty() || sizes.contains(&UNKNOWN) {
        return Ok(());
    }
    code_sizes(inputs, &a).check(prepared.sizes[0], inputs.options.rotate)
}

/// Returns the inputs of the exact forward: the mask is a boolean bias.
fn with_bias(inputs: &Inputs) -> Inputs {
    let mut inputs = inputs.share();
    inputs.options.attn_bias = inputs.options.attn_mask.take();
    inputs
}

/// Computes a call on the fast kernels: prepares K and V if there are no codes, packs a mask, then computes out.
fn launch(inputs: &Inputs, given: &Attention, plan: &FastPlan, codes: Option<Codes>, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let a = &given.padded();
    let inputs = &with_readable_operands(inputs)?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    let is_bf16 = inputs.q.kind() == Kind::BFloat16;
    let out = empty(&a.query_shape(a.headdim_v), inputs.q.kind())?;
    let softmax_lse = empty(&a.lse_shape(), Kind::Float)?;
    let headdim = i64::from(plan.forward.variant.headdim);
    // a tuning (measured choices of kernels) may have chosen the kernel of a larger headdim than the codes have
    let prepared = codes.filter(|codes| codes.k_mean.size()[2] == headdim);
    let is_prepared = prepared.is_some();
    // true: the prepare kernel does not run
    log::fast(a, plan, is_prepared && inputs.options.attn_mask.is_none())?;
    // scratch memory: the codes, and a bit for each element of the mask, whose broadcast dimensions keep size 1
    let v_blocks = ceil_div(a.seqlen_k, i64::from(plan.prepare.variant.block_rows));
    let codes = prepared.map_or_else(|| CodeSizes::new(a, headdim, v_blocks, is_bf16).make(empty), Ok)?;
    let mask = inputs.options.attn_mask.as_ref();
    let mask_bits = mask.map(|t| empty(&mask_bits_shape(t, a), Kind::Int)).transpose()?;
    // memory by name: the simulator rejects accesses to other memory
    let results = [("out", Some(&out)), ("softmax_lse", Some(&softmax_lse)), ("mask_bits", mask_bits.as_ref())];
    let launches = match is_prepared {
        true => {
            // the codes too: they may be in a copy of `prepared`
            let mut ranges = memory_ranges(inputs, a, launcher, results);
            ranges.extend(written(&codes, []).into_iter().filter_map(|(name, t)| Some(read_range(name, t?))));
            Launches::begin_with(launcher, ranges)
        }
        false => Launches::begin(inputs, a, launcher, written(&codes, results)),
    };
    fill_varlen(a, [&out, &softmax_lse])?;
    for (first, batches) in plan::batch_chunks(a.batch) {
        let mut params = FastParams {
            out: output(&out, first),
            softmax_lse: lse_at(&softmax_lse, a, first),
            ..params(inputs, a, &codes, (first, batches))
        };
        if let (Some(mask), Some(bits)) = (mask, &mask_bits) {
            set_mask(&mut params, mask, bits, first);
        }
        if !is_prepared {
            run_prepare(&plan.prepare, &codes, &launches, &mut params, batches)?;
        } else if mask.is_some() {
            params.phase = PACK_MASK;
            launches.run(&plan.prepare, batches, bytes_of(&params))?;
        }
        if let Some(v) = &codes.v_scaled {
            params.v = operand(v, first);
        }
        launches.run(&plan.forward, batches, bytes_of(&params))?;
    }
    Ok((without_padding(out, given.headdim_v)?, softmax_lse))
}

/// Returns `others`, then the tensors that the prepare kernel writes, by name.
fn written<'a, const N: usize>(codes: &'a Codes, others: [Named<'a>; N]) -> Vec<Named<'a>> {
    let of_codes = [
        ("k_codes", Some(&codes.k_codes)),
        ("k_scales", Some(&codes.k_scales)),
        ("k_mean", Some(&codes.k_mean)),
        ("v_max", Some(&codes.v_max)),
        ("v_scaled", codes.v_scaled.as_ref()),
    ];
    others.into_iter().chain(of_codes).collect()
}

/// Returns the parameters of a launch for some batch entries, without results and mask.
fn params(inputs: &Inputs, a: &Attention, codes: &Codes, (first, batches): (i64, i64)) -> FastParams {
    let Blocks { q, k, v, problem, lengths, .. } = Blocks::new(inputs, a, (first, batches));
    let floats = |t: &Tensor| t.data_ptr() as *mut f32;
    FastParams {
        q,
        k,
        v,
        problem,
        lengths,
        batch: a.batch as i32,
        element: element_type(&inputs.q),
        k_codes: codes.k_codes.data_ptr().cast(),
        k_rows: codes.k_codes.size()[1],
        k_scales: floats(&codes.k_scales),
        k_mean: floats(&codes.k_mean),
        v_max: floats(&codes.v_max),
        v_max_stride: codes.v_max.size()[2],
        // without v_scaled, kernels do not use it, and v stands in
        v_scaled: output(codes.v_scaled.as_ref().unwrap_or(&inputs.v), first),
        smooth_k: inputs.options.smooth_k.into(),
        rotate: inputs.options.rotate.into(),
        phase: QUANTIZE,
        ..FastParams::NONE // no results and no mask yet
    }
}

/// Launches the prepare kernel for some batch entries: once for fp16. bf16 takes two launches, because v_scaled needs v_max of all keys.
fn run_prepare(kernel: &PlannedKernel, codes: &Codes, launches: &Launches, params: &mut FastParams, batches: i64) -> Result<()> {
    params.phase = QUANTIZE;
    launches.run(kernel, batches, bytes_of(params))?;
    if codes.v_scaled.is_some() {
        params.phase = SCALE_V;
        launches.run(kernel, batches, bytes_of(params))?;
    }
    Ok(())
}

/// Returns the shape of a mask of bits: (batch or 1, heads or 1, words of 32 keys, queries rounded up to 32; 32 if broadcast).
fn mask_bits_shape(mask: &Tensor, a: &Attention) -> [i64; 4] {
    let [of_batch, of_head, of_row, _] = broadcast_strides(mask);
    // whole blocks of 64 keys
    let words = ceil_div(a.seqlen_k, SCALE_KEYS) * SCALE_KEYS / 32;
    let repeated = |stride, size| if stride == 0 { 1 } else { size };
    [repeated(of_batch, a.batch), repeated(of_head, a.nheads), words, ceil_div(repeated(of_row, a.seqlen_q), 32) * 32]
}

/// Sets the parameters of a mask, from batch entry `first` on.
fn set_mask(params: &mut FastParams, mask: &Tensor, bits: &Tensor, first: i64) {
    let bits_strides = broadcast_strides(bits);
    [params.mask_batch_stride, params.mask_head_stride, params.mask_row_stride, params.mask_key_stride] = broadcast_strides(mask);
    [params.mask_bits_batch_stride, params.mask_bits_head_stride, ..] = bits_strides;
    params.mask = (mask.data_ptr() as *const bool).wrapping_offset((first * params.mask_batch_stride) as isize);
    params.mask_bits = (bits.data_ptr() as *mut u32).wrapping_offset((first * bits_strides[0]) as isize);
    let [.., words, rows] = bits.size()[..] else { unreachable!("mask_bits_shape() has four sizes") };
    (params.mask_words, params.mask_rows) = (words as i32, rows as i32);
}
