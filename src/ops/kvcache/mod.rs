//! `volta_fa::fwd_kvcache`: attention of new queries over keys and values in a cache, to which more may be appended first.

mod append;
mod dequantize;
mod device;
mod gather;
pub(crate) mod mla;
mod parameters;
mod prefill;
mod quantized;

use super::{checks_lengths, Target};
use crate::error::{Error, Result};
use crate::options::KvCacheOptions;
use crate::params::CacheFormat;
use crate::plan;
use crate::problem::{self, Backend, CacheValues, CachedAttention, CachedSequence, TensorDesc};
use crate::tensor::{describe, is_readable};
use std::ffi::c_void;
use tch::{Kind, Tensor};

/// What the op takes.
pub(crate) struct Call {
    pub q: Tensor,
    pub k_cache: Tensor,
    pub v_cache: Tensor,
    /// k and v, written to the caches behind cache_seqlens before anything is read
    pub appended: Option<[Tensor; 2]>,
    pub options: KvCacheOptions<Tensor>,
    /// the current stream of q's device
    pub stream: *mut c_void,
}

/// (out, softmax_lse).
///
/// # Errors
/// Wrong arguments; a device that no kernel runs on.
pub(crate) fn forward(call: &Call) -> Result<(Tensor, Tensor)> {
    let q = describe(&call.q)?;
    let target = Target::of(&q, call.stream)?;
    let a = validate(call, &q, target.backend())?;
    let sequences = match checks_lengths(&target, q.device, call.options.check_lengths)? {
        true => Some(sequences(call, &a)?),
        false => None,
    };
    // what the gathered tokens take memory for
    let seqlen_k = sequences.as_ref().map_or(a.seqlen_k, |all| all.iter().map(CachedSequence::seqlen_k).max().unwrap_or(0));
    if sequences.is_some() && a.format != CacheFormat::Unquantized {
        gather::check_scales(call, &a, seqlen_k)?;
    }
    match target {
        Target::Kernels(launcher) if has_room(&a) => {
            let q = append::run(call, &a, &*launcher)?;
            if a.is_empty() {
                empty(call, &a)
            } else if readable(call, &a) {
                device::attend(&q, call, &a, &*launcher)
            } else {
                gather::attend(&q, call, &a, seqlen_k, sequences.as_deref(), &*launcher)
            }
        }
        _ => gather::forward(call, &a, seqlen_k),
    }
}

/// Whether the cache can hold a token at all. A tensor without elements may have no address, by which kernels tell what is given.
fn has_room(a: &CachedAttention) -> bool {
    a.seqlen_k > 0 && a.entries > 0
}

/// Whether the kernels can attend to the caches where they are: all rows on 16-byte boundaries, of whole groups of 16 bytes. Of a cache that
/// is not fp16 they read what decode reads, of a quantized one beside fp16 queries.
fn readable(call: &Call, a: &CachedAttention) -> bool {
    let own = match (call.q.kind(), a.format) {
        (Kind::Half, CacheFormat::Unquantized) => true,
        (Kind::Half, _) | (Kind::BFloat16, CacheFormat::Unquantized) => {
            plan::decode_rows(&parameters::attention(a)) <= plan::MAX_DECODE_ROWS
        }
        _ => false,
    };
    own && [&call.k_cache, &call.v_cache].into_iter().all(is_readable)
}

/// What [`forward`] would refuse of tensors that may have no data, as far as their sizes are known.
pub(crate) fn check(call: &Call) -> Result<()> {
    validate(call, &describe(&call.q)?, Backend::Meta).map(|_| ())
}

/// `q` is the description of call.q.
fn validate(call: &Call, q: &TensorDesc, backend: Backend) -> Result<CachedAttention> {
    let options = call.options.try_map(describe)?;
    let appended = call.appended.as_ref().map(|[k, v]| Ok::<_, Error>([describe(k)?, describe(v)?])).transpose()?;
    let appended = appended.as_ref().map(|[k, v]| [k, v]);
    problem::validate_kvcache(q, &describe(&call.k_cache)?, &describe(&call.v_cache)?, appended, &options, backend)
}

/// Reads and checks the values in the call's int32 tensors, which on a GPU means waiting for it.
fn sequences(call: &Call, a: &CachedAttention) -> Result<Vec<CachedSequence>> {
    let o = &call.options;
    let values = |t: &Option<Tensor>| {
        t.as_ref().map(|t| Vec::<i32>::try_from(t.f_to_device(tch::Device::Cpu)?.f_reshape([-1_i64].as_slice())?)).transpose()
    };
    let values = CacheValues {
        cache_seqlens: values(&o.cache_seqlens)?,
        cu_seqlens_q: values(&o.cu_seqlens_q)?,
        cu_seqlens_k_new: values(&o.cu_seqlens_k_new)?,
        block_table: values(&o.block_table)?,
        cache_batch_idx: values(&o.cache_batch_idx)?,
        leftpad_k: values(&o.leftpad_k)?,
    };
    problem::validate_kvcache_values(a, &values)
}

/// No output element: nothing but shapes.
fn empty(call: &Call, a: &CachedAttention) -> Result<(Tensor, Tensor)> {
    let device = call.q.device();
    Ok((Tensor::f_empty(a.out_shape(), (call.q.kind(), device))?, Tensor::f_empty(a.lse_shape(), (Kind::Float, device))?))
}
