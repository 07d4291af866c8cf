//! `volta_fa::fwd_kvcache` and `volta_fa::fwd_mla`: attention of new queries over a cache, after an optional append.
//!
//! Submodules: `kernels` launches kernels that read the cache in place, or a dequantized copy. `gather` copies sequences with ATen and
//! calls `fwd`: the CPU backend, and caches that kernels cannot read. `latents` does so for latents (`fwd_mla`: one vector per token, which
//! is key and value of all heads). `selection` turns calls with `kv_indices` into calls without. `quantized` has cache formats in ATen.

mod gather;
mod kernels;
mod latents;
mod quantized;
mod selection;

use super::inputs::{int32_values, Described, Inputs, Target}; // Target: ATen on the CPU, or kernels
use crate::error::{Error, Result};
use crate::kernels::FormatInfo;
use crate::limits::LATENT_HEADDIMS; // 512, then 64 columns
use crate::params::CacheFormat;
use crate::problem::{self, Attention, Backend, CacheValues, CachedSequence};
use crate::tensor::{is_readable, share};
use tch::{Kind, Tensor};

/// A validated call.
struct Prepared {
    target: Target,
    a: Attention, // the problem
    /// Lengths of each sequence, if the call checks them; else they stay on the device.
    sequences: Option<Vec<CachedSequence>>,
}

/// Computes `volta_fa::fwd_kvcache`: (out, softmax_lse).
pub(crate) fn forward(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    match inputs.options.kv_indices {
        Some(_) => forward_over_selection(inputs),
        None => forward_over_all(inputs),
    }
}

/// Computes calls without `kv_indices`: queries attend to all tokens of their sequences.
fn forward_over_all(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let Prepared { target, a, sequences } = prepare(inputs, validate)?;
    let seqlen_k = longest(&a, &sequences);
    match target {
        Target::Kernels(launcher) if has_room(&a) => kernels::append_and_attend(inputs, &a, seqlen_k, sequences.as_deref(), &*launcher),
        _ => gather::forward(inputs, &a, seqlen_k),
    }
}

/// Computes calls with `kv_indices`, the blocks of tokens that each query attends to: appends, then makes calls without `kv_indices`.
fn forward_over_selection(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let Prepared { target, a, .. } = prepare(inputs, validate)?;
    let inputs = match target {
        Target::Kernels(launcher) if has_room(&a) => {
            kernels::append_before_selection(inputs, &a, &*launcher)?.unwrap_or_else(|| inputs.share())
        }
        _ => gather::append_and_rotate(inputs, &a)?,
    };
    attend_to_selection(&inputs, &a, &forward_over_all)
}

/// Computes `volta_fa::fwd_mla`: (out, softmax_lse). `inputs.k` is the cache of latents, whose first 512 columns are the values.
pub(crate) fn forward_mla(inputs: &Inputs) -> Result<(Tensor, Tensor)> {
    let Prepared { target, a, sequences } = prepare(inputs, validate_mla)?;
    if inputs.options.kv_indices.is_some() {
        return attend_to_selection(inputs, &a, &forward_mla);
    }
    let mut inputs = inputs.share();
    let o = &mut inputs.options;
    (o.v_scale, o.v_descale) = (share(&o.k_scale), share(&o.k_descale));
    inputs.v = inputs.k.f_narrow(-1, 0, LATENT_HEADDIMS[0])?;
    match target {
        _ if a.has_no_output() => gather::no_output(&inputs, &a),
        Target::Cpu => gather::forward(&inputs, &a, longest(&a, &sequences)),
        Target::Kernels(launcher) if has_room(&a) && inputs.q.kind() == Kind::Half && is_readable(&inputs.k) => {
            kernels::attend(&inputs, &a, &*launcher)
        }
        Target::Kernels(launcher) => latents::attend_to_copies(&inputs, &a, longest(&a, &sequences), &*launcher),
    }
}

/// Attends to the tokens that `kv_indices` selects. `attend` computes calls without it.
fn attend_to_selection(inputs: &Inputs, a: &Attention, attend: &dyn Fn(&Inputs) -> Result<(Tensor, Tensor)>) -> Result<(Tensor, Tensor)> {
    match a.has_no_output() {
        true => gather::no_output(inputs, a),
        false => selection::attend_to_lists(inputs, a, attend),
    }
}

/// Rejects what [`forward`] would reject, as far as sizes are known. Tensors may have no data. Returns the format of the cache's values.
pub(crate) fn check(inputs: &Inputs) -> Result<&'static FormatInfo> {
    let [_, values] = validate(&inputs.describe()?, Backend::Meta)?.cache_format().parts();
    Ok(values.info())
}

/// Rejects what [`forward_mla`] would reject, as far as sizes are known.
pub(crate) fn check_mla(inputs: &Inputs) -> Result<()> {
    validate_mla(&inputs.describe()?, Backend::Meta).map(|_| ())
}

fn validate(d: &Described, backend: Backend) -> Result<Attention> {
    let appended = d.appended.as_ref().map(|[k, v]| [k, v]);
    problem::validate_kvcache(&d.q, &d.k, &d.v, appended, &d.options, backend)
}

fn validate_mla(d: &Described, backend: Backend) -> Result<Attention> {
    problem::validate_mla(&d.q, &d.k, &d.options, backend)
}

/// Chooses a backend and validates. If the call or the environment asks for it, checks lengths, blocks and scales on the host.
fn prepare(inputs: &Inputs, validate: fn(&Described, Backend) -> Result<Attention>) -> Result<Prepared> {
    let described = inputs.describe()?;
    let target = Target::of(&described.q, inputs.stream)?;
    let checks_lengths = target.checks_lengths(inputs.options.check_lengths)?;
    let a = validate(&described, target.backend())?;
    if inputs.appended.is_some() {
        check_separate(inputs)?;
    }
    let mut sequences = None;
    if checks_lengths {
        sequences = Some(checked_sequences(inputs, &a)?);
        if let Some(blocks) = int32_values(&inputs.options.kv_indices)? {
            problem::validate_kv_indices(&a, &blocks, inputs.options.kv_block)?;
        }
        if a.cache_format() != CacheFormat::Unquantized {
            gather::check_scales(inputs, &a, longest(&a, &sequences))?;
        }
    }
    Ok(Prepared { target, a, sequences })
}

/// Rejects one tensor in two places that an append writes: keys would be lost under values, and scales of one under those of the other.
fn check_separate(inputs: &Inputs) -> Result<()> {
    let caches = [("k_cache", Some(&inputs.k)), ("v_cache", Some(&inputs.v))];
    let scales = inputs.options.token_scales().map(|(name, t)| (name, t.as_ref()));
    let written = caches.into_iter().chain(scales).filter_map(|(name, t)| Some((name, t?.data_ptr())));
    // a tensor without elements has no address
    let written: Vec<_> = written.filter(|(_, address)| !address.is_null()).collect();
    for (i, (name, address)) in written.iter().enumerate() {
        if let Some((first, _)) = written[..i].iter().find(|(_, other)| other == address) {
            let expected = "memory of its own, because the call writes both: pass two tensors";
            return Err(Error::value(name, format!("the memory of {first}"), expected));
        }
    }
    Ok(())
}

/// Reads and checks the values of the call's int32 tensors. On a GPU this synchronizes.
fn checked_sequences(inputs: &Inputs, a: &Attention) -> Result<Vec<CachedSequence>> {
    let o = &inputs.options;
    let values = CacheValues {
        cache_seqlens: int32_values(&o.cache_seqlens)?,
        cu_seqlens_q: int32_values(&o.cu_seqlens_q)?,
        cu_seqlens_k_new: int32_values(&o.cu_seqlens_k_new)?,
        block_table: int32_values(&o.block_table)?,
        cache_batch_idx: int32_values(&o.cache_batch_idx)?,
        leftpad_k: int32_values(&o.leftpad_k)?,
    };
    problem::validate_kvcache_values(a, &values)
}

/// Returns the keys of the longest sequence if lengths are known, else the most that the cache can hold. Copies have this length.
fn longest(a: &Attention, sequences: &Option<Vec<CachedSequence>>) -> i64 {
    sequences.as_ref().map_or(a.seqlen_k, |all| all.iter().map(CachedSequence::seqlen_k).max().unwrap_or(0))
}

/// Returns true if the cache can hold a token. A tensor without elements may have no address, and kernels take null for "not given".
fn has_room(a: &Attention) -> bool {
    a.seqlen_k > 0 && a.cache().is_some_and(|cache| cache.entries > 0)
}
