//! From a call's tensors to what the parameter blocks say of them. Each function is told the first sequence of its launch.

use super::Call;
use crate::launch::MemoryRange;
use crate::options::KvCacheOptions;
use crate::params::{Cache, CacheScale, CacheScales, Lengths, ScoreOptions};
use crate::problem::{Attention, CachedAttention, Packed, RequestedFeatures};
use crate::tensor::{self, memory_range, padded_headdim};
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// The call as the forward kernels see it: an attention to the most keys that a sequence can have, with headdims in whole groups of 8.
pub fn attention(a: &CachedAttention) -> Attention {
    Attention {
        batch: a.batch,
        seqlen_q: a.seqlen_q,
        seqlen_k: a.seqlen_k,
        nheads: a.nheads,
        nheads_k: a.nheads_k,
        headdim: padded_headdim(a.headdim),
        headdim_v: padded_headdim(a.headdim_v),
        softmax_scale: a.softmax_scale,
        window: a.window,
        packed: a.total_q.map(|total_q| Packed { total_q, total_k: a.seqlen_k }),
        features: RequestedFeatures {
            softcap: a.softcap,
            dropout_p: 0.0,
            alibi: a.alibi,
            attn_bias: false,
            fp32_bias: false,
            sinks: a.sinks,
            seqused_k: true,
        },
    }
}

/// Where the tokens lie: in these caches, which are the call's or copies of them.
pub fn cache([k, v]: [&Tensor; 2], call: &Call, a: &CachedAttention, first: i64) -> Cache {
    let o = &call.options;
    // a dense sequence without a number has that of its place in the launch
    let skipped = if o.block_table.is_none() && o.cache_batch_idx.is_none() { first } else { 0 };
    let block_table_stride = o.block_table.as_ref().map_or(0, |t| t.stride()[0]);
    Cache {
        k: tensor::operand(k, skipped),
        v: tensor::operand(v, skipped),
        entries: (a.entries - skipped) as i32,
        rows: a.rows as i32,
        block_table: element(&o.block_table, first * block_table_stride),
        block_table_stride,
        max_pages: a.max_pages.unwrap_or(0) as i32,
        cache_batch_idx: element(&o.cache_batch_idx, first),
        leftpad_k: element(&o.leftpad_k, first),
        cache_seqlens: element(&o.cache_seqlens, first),
        // packed like q where nothing else is said
        cu_seqlens_k_new: match a.total_new {
            None => null(),
            Some(_) => element(if o.cu_seqlens_k_new.is_some() { &o.cu_seqlens_k_new } else { &o.cu_seqlens_q }, first),
        },
        seqlen_new: a.seqlen_new as i32,
        total_new: a.total_new.unwrap_or(0) as i32,
    }
}

/// What belongs to the data of a quantized cache.
pub fn scales(call: &Call, a: &CachedAttention, first: i64) -> CacheScales {
    let o = &call.options;
    const NONE: CacheScale = CacheScale { ptr: null_mut(), batch_stride: 0, row_stride: 0, head_stride: 0 };
    // as the cache's own entries: `cache`
    let skipped = if o.block_table.is_none() && o.cache_batch_idx.is_none() { first } else { 0 };
    let scale = |t: &Option<Tensor>| {
        let Some(t) = t else { return NONE };
        let (sizes, strides) = (t.size(), t.stride());
        let (strides, skipped) = match strides[..] {
            [entry, row, head] => ([entry, row, head], skipped),
            [sequence, head] => ([sequence, 0, head], first),
            [head] => ([0, 0, if sizes[0] == 1 { 0 } else { head }], 0),
            _ => ([0; 3], 0),
        };
        let [batch_stride, row_stride, head_stride] = strides;
        let ptr = (t.data_ptr() as *mut f32).wrapping_offset((skipped * batch_stride) as isize);
        CacheScale { ptr, batch_stride, row_stride, head_stride }
    };
    let of = |each: &Option<Tensor>, fp8: &Option<Tensor>| scale(if a.format.has_scales() { each } else { fp8 });
    CacheScales {
        format: a.format,
        k: of(&o.k_scale, &o.k_descale),
        v: of(&o.v_scale, &o.v_descale),
        k_zero_point: scale(&o.k_zero_point),
        v_zero_point: scale(&o.v_zero_point),
    }
}

/// Where the queries lie.
pub fn lengths(call: &Call, a: &CachedAttention, first: i64) -> Lengths {
    Lengths {
        cu_seqlens_q: element(&call.options.cu_seqlens_q, first),
        cu_seqlens_k: null(),
        seqused_k: null(),
        total_q: a.total_q.unwrap_or(0) as i32,
        total_k: 0,
        scratch_rows: 0,
        first_batch: first as i32,
    }
}

/// Softcap, ALiBi and sinks. `options` hold what the kernels read: [`readable_scores`].
pub fn score_options(options: &KvCacheOptions<Tensor>, a: &CachedAttention, first: i64) -> ScoreOptions {
    let slopes = &options.alibi_slopes;
    let alibi_batch_stride = slopes.as_ref().map_or(0, |t| if t.dim() == 2 { a.nheads } else { 0 });
    ScoreOptions {
        bias: null(),
        bias_batch_stride: 0,
        bias_head_stride: 0,
        bias_row_stride: 0,
        bias_is_fp32: 0,
        alibi_slopes: element(slopes, first * alibi_batch_stride),
        alibi_batch_stride,
        sinks: element(&options.sinks, 0),
        rng_state: null(),
        dropout_threshold: 0,
        dropout_inverted: 0,
        dropout_scale: 1.0,
        softcap: a.softcap as f32,
        inverse_softcap: if a.softcap > 0.0 { (1.0 / a.softcap) as f32 } else { 0.0 },
    }
}

/// The options with slopes and sinks in types and layouts that the kernels read.
pub fn readable_scores(options: &KvCacheOptions<Tensor>) -> crate::error::Result<KvCacheOptions<Tensor>> {
    let mut o = options.try_map(|t| Ok::<_, crate::error::Error>(t.shallow_clone()))?;
    o.alibi_slopes = o.alibi_slopes.map(|t| t.f_contiguous()).transpose()?;
    o.sinks = o.sinks.map(|t| t.f_to_kind(Kind::Float)?.f_contiguous()).transpose()?;
    Ok(o)
}

/// What the kernels may read beside q and the caches.
pub fn ranges(options: &KvCacheOptions<Tensor>) -> impl Iterator<Item = MemoryRange> + '_ {
    options.tensors().map(|(name, t)| memory_range(name, t, false))
}

/// Pointer to an element; null where the tensor is not there.
fn element<T>(t: &Option<Tensor>, i: i64) -> *const T {
    t.as_ref().map_or(null(), |t| (t.data_ptr() as *const T).wrapping_offset(i as isize))
}
