//! `volta_fa::fwd_mla`: attention over a cache of latents, one for all heads, whose first columns are the values.
//!
//! To everything but the kernels such a cache is a KV cache with one head, of which the cache of values is a view.

use super::{device, empty, gather, has_room, sequences, Call};
use crate::error::Result;
use crate::launch::Launcher;
use crate::ops::bf16::saturated;
use crate::ops::{checks_lengths, Target};
use crate::options::{KvCacheOptions, MlaOptions};
use crate::params::CacheFormat;
use crate::problem::{self, Backend, CachedAttention, CachedSequence, TensorDesc, LATENT_HEADDIMS};
use crate::tensor::{describe, is_readable, readable};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// What the op takes.
pub(crate) struct MlaCall {
    pub q: Tensor,
    pub latent_cache: Tensor,
    pub options: MlaOptions<Tensor>,
    /// the current stream of q's device
    pub stream: *mut c_void,
}

/// (out, softmax_lse).
///
/// # Errors
/// Wrong arguments; a device that no kernel runs on.
pub(crate) fn forward(call: MlaCall) -> Result<(Tensor, Tensor)> {
    let q = describe(&call.q)?;
    let target = Target::of(&q, call.stream)?;
    let (call, a) = validate(call, &q, target.backend())?;
    let sequences = match checks_lengths(&target, q.device, call.options.check_lengths)? {
        true => Some(sequences(&call, &a)?),
        false => None,
    };
    let seqlen_k = sequences.as_ref().map_or(a.seqlen_k, |all| all.iter().map(CachedSequence::seqlen_k).max().unwrap_or(0));
    if sequences.is_some() && a.format != CacheFormat::Unquantized {
        gather::check_scales(&call, &a, seqlen_k)?;
    }
    match target {
        _ if a.is_empty() => empty(&call, &a),
        Target::Cpu => gather::forward(&call, &a, seqlen_k),
        Target::Kernels(launcher) if has_room(&a) && call.q.kind() == Kind::Half && is_readable(&call.k_cache) => {
            device::attend_to_latents(&readable(&call.q)?, &call, &a, &*launcher)
        }
        Target::Kernels(launcher) => on_copies(&call, &a, seqlen_k, &*launcher),
    }
}

/// What [`forward`] would refuse of tensors that may have no data, as far as their sizes are known.
pub(crate) fn check(call: MlaCall) -> Result<()> {
    let q = describe(&call.q)?;
    let options = KvCacheOptions::from(call.options.try_map(describe)?);
    problem::validate_mla(&q, &describe(&call.latent_cache)?, &options, Backend::Meta).map(|_| ())
}

/// The call as one on a KV cache.
fn validate(call: MlaCall, q: &TensorDesc, backend: Backend) -> Result<(Call, CachedAttention)> {
    let MlaCall { q: queries, latent_cache, options, stream } = call;
    let mut options = KvCacheOptions::from(options);
    let a = problem::validate_mla(q, &describe(&latent_cache)?, &options.try_map(describe)?, backend)?;
    let own = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
    (options.v_scale, options.v_descale) = (own(&options.k_scale), own(&options.k_descale));
    let values = latent_cache.f_narrow(-1, 0, LATENT_HEADDIMS[0])?;
    Ok((Call { q: queries, k_cache: latent_cache, v_cache: values, appended: None, options, stream }, a))
}

/// What the kernels cannot read where it is, beside bf16 queries or of rows off 16-byte boundaries: they get copies of the batch's tokens,
/// in fp16.
fn on_copies(call: &Call, a: &CachedAttention, seqlen_k: i64, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let half = |t: &Tensor| readable(&if t.kind() == Kind::Half { t.shallow_clone() } else { saturated(t)? });
    let (tokens, used) = gather::collected(call, a, seqlen_k)?;
    let tokens = match seqlen_k {
        // without elements a tensor may have no address, by which kernels tell what is given
        0 => Tensor::f_zeros([a.batch, 1, 1, a.headdim], (Kind::Half, call.q.device()))?,
        _ => half(&tokens)?,
    };
    let q = half(&call.q)?;
    let o = &call.options;
    let options = KvCacheOptions {
        cache_seqlens: Some(used),
        cu_seqlens_q: o.cu_seqlens_q.as_ref().map(Tensor::shallow_clone),
        max_seqlen_q: o.max_seqlen_q,
        ..KvCacheOptions::default()
    };
    let values = tokens.f_narrow(-1, 0, a.headdim_v)?;
    let rows = tokens.size()[1];
    let dense = CachedAttention { format: CacheFormat::Unquantized, entries: a.batch, rows, max_pages: None, seqlen_k: rows, ..*a };
    let copied = Call { q: q.shallow_clone(), k_cache: tokens, v_cache: values, appended: None, options, stream: call.stream };
    let (out, softmax_lse) = device::attend_to_latents(&q, &copied, &dense, launcher)?;
    Ok((out.f_to_kind(call.q.kind())?, softmax_lse))
}
