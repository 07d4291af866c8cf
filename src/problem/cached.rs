//! Validation of `fwd_kvcache` and `fwd_mla`: queries, a cache of keys and values (or of latents: vectors that are both), and tokens to
//! append. Makes the [`Attention`] problem that planner and backends work with, by the rules of other modules. `tree` is for speculative
//! decoding, where a query sees only its ancestors among the draft tokens, and `selection` for lists of the blocks of tokens that a query
//! attends to. `queries` says whether q is dense or packed (sequences one after the other, by cu_seqlens_q).

use super::attention::{Attention, Keys};
use super::cache::{self, CacheTensors};
use super::features::RequestedFeatures;
use super::operands::{self, Packing}; // Since(argument): packed, because it is given; Needs(argument): dense, without it
use super::tensor::{Backend, Options, TensorDesc};
use super::{append, formats, lengths, scores, selection, tree}; // scores: scale, window, bias, ALiBi, sinks
use crate::error::Result;

/// Checks q, the caches, k and v to append and the options of `fwd_kvcache`.
pub fn validate_kvcache(
    q: &TensorDesc,
    k_cache: &TensorDesc,
    v_cache: &TensorDesc,
    appended: Option<[&TensorDesc; 2]>,
    o: &Options,
    backend: Backend,
) -> Result<Attention> {
    validate(q, CacheTensors { keys: k_cache, values: Some(v_cache) }, appended, o, backend)
}

/// Checks q, a cache of latents and the options of `fwd_mla`.
pub fn validate_mla(q: &TensorDesc, latent_cache: &TensorDesc, o: &Options, backend: Backend) -> Result<Attention> {
    validate(q, CacheTensors { keys: latent_cache, values: None }, None, o, backend)
}

fn validate(q: &TensorDesc, caches: CacheTensors, appended: Option<[&TensorDesc; 2]>, o: &Options, backend: Backend) -> Result<Attention> {
    let features = RequestedFeatures::of(o)?;
    scores::check_numbers(o, backend)?;
    let packing = if o.cu_seqlens_q.is_some() { Packing::Since("cu_seqlens_q") } else { Packing::Needs("cu_seqlens_q") };
    let qs = operands::check_operand("q", q, q, packing, backend)?;
    let shape = caches.check(q, qs.headdim, o, backend)?;
    operands::check_heads(qs.nheads, shape.nheads_k, "k_cache and v_cache")?;
    let (batch, seqlen_q, queries) = lengths::check_queries(q, o, &qs, backend)?;
    let (layout, seqlen_k) = cache::check_sequences(caches.name(), &shape, o, q, batch)?;
    let cache = shape.cache(layout);
    let to_cache = append::Target { cache: &shape, batch, seqlen_q, seqlen_k, queries: &qs };
    let appends = appended.is_some();
    let appended = append::check(appended, o, q, &to_cache, packing, backend)?;
    formats::check_scales(o, &cache, shape.nheads_k, batch, q, caches.values.is_none())?; // without values: latents
    if appends {
        caches.check_written(o)?;
    }
    scores::check_tensors(o, q, [batch, qs.nheads, seqlen_q, seqlen_k])?;
    tree::check(o, q, batch, seqlen_q, queries)?;
    selection::check(o, q, [batch, seqlen_q, shape.nheads_k], queries)?;
    let window = scores::window(o);
    Ok(Attention {
        batch,
        seqlen_q,
        seqlen_k,
        nheads: qs.nheads,
        nheads_k: shape.nheads_k,
        headdim: shape.headdim,
        headdim_v: shape.headdim_v,
        dtype: q.dtype,
        queries,
        keys: if caches.values.is_some() { Keys::Cache(cache) } else { Keys::Latents(cache) },
        softmax_scale: scores::scale(o, shape.headdim),
        window: if features.tree { tree::window(window) } else { window }, // a tree replaces the bound on the right
        features,
        appended,
        num_splits: o.num_splits,
    })
}
