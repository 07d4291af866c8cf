//! Attention of each query to the blocks of tokens that the caller selected for it (`kv_indices`). Each query becomes a sequence of its
//! own, whose tokens are those of its blocks in ascending order. So every kernel and cache format serves selections. Blocks of 16 tokens
//! and more are read in place, as pages of the cache. The tokens of smaller blocks, and of caches whose strides do not allow that, are
//! copied first. KV heads with lists of their own are calls of their own.
//!
//! Nothing here synchronizes or trusts the numbers: what is no block of the sequence is left out, and invalid lengths and pages result in
//! NaN: such a query gets length -1, which kernels take for invalid. A cache is entries of one sequence each, or pages that a block table
//! assigns to sequences. With latents (MLA) values are the first columns of keys, so there is no tensor of values to divide or copy.

use super::gather::{all, owners, Places, Sequences};
use super::quantized::bytes;
use crate::error::Result;
use crate::limits::{MAX_SEQLEN, MAX_SEQUENCES, PAGE_SIZE_MULTIPLE};
use crate::ops::inputs::Inputs;
use crate::options::Options;
use crate::params::CacheFormat;
use crate::problem::{Appended, Attention, Cache, Queries, Window};
use crate::tensor::share;
use tch::{Kind, Tensor};

/// Most bytes of copied tokens, and of their places, that exist at a time.
const COPY_BYTES: i64 = 256 << 20;
/// Number of a block that is left out: after all others, and so large that none of its tokens exists.
const NO_BLOCK: i64 = 1 << 32;

/// Queries, and the blocks that each selected.
struct Selection {
    /// Sequence of each query, (queries) int64.
    sequence: Tensor,
    /// Tokens of its sequence that a query may see, counted from the first: all, or under a causal mask those up to itself. -1: the
    /// sequence is invalid. (queries) int64.
    limit: Tensor,
    /// Selected blocks, each once, in ascending order, then [`NO_BLOCK`]. (queries, topk) int64.
    blocks: Tensor,
    /// Tokens of a block.
    block: i64,
}

impl Selection {
    fn narrow(&self, first: i64, count: i64) -> Result<Selection> {
        let part = |t: &Tensor| t.f_narrow(0, first, count);
        Ok(Selection { sequence: part(&self.sequence)?, limit: part(&self.limit)?, blocks: part(&self.blocks)?, block: self.block })
    }

    /// Returns the number of tokens that each query selected and may see, (queries) int64.
    fn tokens(&self) -> Result<Tensor> {
        let starts = self.blocks.f_mul_scalar(self.block)?;
        let of_block = self.limit.f_unsqueeze(1)?.f_sub(&starts)?.f_clamp(0, self.block)?;
        Ok(of_block.f_sum_dim_intlist([-1_i64].as_slice(), false, Kind::Int64)?)
    }

    /// Finds every `step`-th token of the blocks in the cache: (queries, topk * block / step).
    fn places(&self, inputs: &Inputs, a: &Attention, step: i64) -> Result<Places> {
        let offsets = Tensor::f_arange(self.block / step, (Kind::Int64, self.blocks.device()))?.f_mul_scalar(step)?;
        let position = self.blocks.f_mul_scalar(self.block)?.f_unsqueeze(-1)?.f_add(&offsets)?;
        let position = position.f_reshape([position.size()[0], position.size()[1] * (self.block / step)])?;
        let sequence = self.sequence.f_unsqueeze(1)?.f_expand(position.size(), false)?;
        Places::of(inputs, a, &sequence, &position)
    }
}

/// Returns `sequence` and `limit` of [`Selection`].
fn queries(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let s = Sequences::of(inputs, a)?;
    let count = a.total_q().unwrap_or(a.batch * a.seqlen_q);
    let (sequence, number) = owners(a, &s.q_start, a.total_q().is_some(), count)?;
    let of = |t: &Tensor| t.f_index_select(0, &sequence);
    let (end, seqlen_q) = (of(&s.end)?, of(&s.seqlen_q)?);
    let valid = all([of(&s.valid)?, number.f_ge(0)?, number.f_lt_tensor(&seqlen_q)?])?;
    let limit = match a.window.right {
        Some(_) => end.f_sub(&seqlen_q)?.f_add(&number)?.f_add_scalar(1)?.f_clamp_min(0)?,
        None => end,
    };
    Ok((sequence.shallow_clone(), limit.f_masked_fill(&valid.f_logical_not()?, -1)?))
}

/// Sorts lists of blocks, (queries, topk), as [`Selection`] has them. The first negative number ends a list. Leaves out repetitions, and
/// blocks that begin at the query's limit or after it.
fn sorted(lists: &Tensor, limit: &Tensor, block: i64) -> Result<Tensor> {
    let lists = lists.f_to_kind(Kind::Int64)?;
    let is_after_end = lists.f_lt(0)?.f_cumsum(-1, Kind::Int64)?.f_ge(1)?;
    let is_missing = lists.f_mul_scalar(block)?.f_ge_tensor(&limit.f_unsqueeze(1)?)?;
    let lists = lists.f_masked_fill(&is_after_end.f_logical_or(&is_missing)?, NO_BLOCK)?;
    let topk = lists.size()[1];
    if topk < 2 {
        return Ok(lists);
    }
    let (lists, _) = lists.f_sort(-1, false)?; // false: ascending
    let later = lists.f_narrow(1, 1, topk - 1)?;
    let once = later.f_masked_fill(&later.f_eq_tensor(&lists.f_narrow(1, 0, topk - 1)?)?, NO_BLOCK)?;
    Ok(Tensor::f_cat(&[lists.f_narrow(1, 0, 1)?, once], 1)?.f_sort(-1, false)?.0)
}

/// A view of a cache as small pages, so that a selected block is whole small pages. Several make a page or entry of the cache. Where these
/// are apart in memory, small pages in the gaps count too, though no block names them.
struct SmallPages {
    /// Tokens of a small page.
    tokens: i64,
    /// Small pages from the start of a page or entry to that of the next, in memory.
    distance: i64,
    /// Small pages of the view, with those in gaps.
    count: i64,
}

impl SmallPages {
    /// Divides the tensors of a cache (keys, values, scales), all of them alike. None: their strides do not allow it, or pages would have
    /// fewer tokens than kernels read together.
    fn of(tensors: &[&Tensor], cache: &Cache, block: i64) -> Option<SmallPages> {
        let tokens = gcd(cache.rows, block);
        if cache.entries == 0 || tokens == 0 || tokens % PAGE_SIZE_MULTIPLE != 0 {
            return None;
        }
        let own = cache.rows / tokens;
        let distance_of = |t: &&Tensor| {
            let of_page = t.stride()[1] * tokens;
            let is_whole = of_page > 0 && t.stride()[0] % of_page == 0;
            (is_whole && t.stride()[0] / of_page >= own).then(|| t.stride()[0] / of_page)
        };
        let distance = if cache.entries == 1 { Some(own) } else { tensors.first().and_then(distance_of) }?;
        let are_alike = cache.entries == 1 || tensors.iter().all(|t| distance_of(t) == Some(distance));
        let count = (cache.entries - 1) * distance + own;
        (are_alike && count <= MAX_SEQLEN).then_some(SmallPages { tokens, distance, count })
    }

    /// Views a tensor of the cache, (pages or entries, rows, ...), as small pages.
    fn view(&self, t: &Tensor) -> Result<Tensor> {
        let (mut sizes, mut strides) = (t.size(), t.stride());
        (sizes[0], sizes[1]) = (self.count, self.tokens);
        strides[0] = strides[1] * self.tokens;
        Ok(t.f_as_strided(sizes.as_slice(), strides.as_slice(), None)?)
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

/// Returns the problem of the calls that [`attend_to_lists`] makes: each query is a sequence of the tokens of its blocks.
pub fn problem(inputs: &Inputs, a: &Attention) -> Attention {
    let lists = inputs.options.kv_indices.as_ref().expect("the call has a selection").size();
    let (heads, topk) = (lists[lists.len() - 2], lists[lists.len() - 1]);
    // lists for each KV head: a call has one of them
    let [nheads, nheads_k] = if heads == 1 { [a.nheads, a.nheads_k] } else { [a.group(), 1] };
    Attention {
        batch: a.total_q().unwrap_or(a.batch * a.seqlen_q).min(MAX_SEQUENCES),
        seqlen_q: 1,
        seqlen_k: topk * inputs.options.kv_block,
        nheads,
        nheads_k,
        queries: Queries::Dense,
        window: Window::FULL,
        appended: Appended::default(),
        ..*a
    }
}

/// Computes a call without `kv_indices`: (out, softmax_lse).
type Attend<'a> = &'a dyn Fn(&Inputs) -> Result<(Tensor, Tensor)>;

/// Computes a call with `kv_indices`, after the append: (out, softmax_lse).
pub fn attend_to_lists(inputs: &Inputs, a: &Attention, attend: Attend) -> Result<(Tensor, Tensor)> {
    let o = &inputs.options;
    let count = a.total_q().unwrap_or(a.batch * a.seqlen_q);
    let lists = o.kv_indices.as_ref().expect("the call has a selection");
    let (heads, topk) = (lists.size()[lists.dim() - 2], lists.size()[lists.dim() - 1]);
    let lists = lists.f_reshape([count, heads, topk])?;
    // a cache without tokens has no blocks
    let lists = if a.cache().is_none_or(|c| c.entries == 0) || a.seqlen_k == 0 { lists.f_narrow(2, 0, 0)? } else { lists };
    let (sequence, limit) = queries(inputs, a)?;
    let mut found = Vec::new();
    for head in 0..heads {
        let group = if heads == 1 { None } else { Some(head) };
        let of_heads = of_heads(inputs, a, group)?;
        let blocks = sorted(&lists.f_select(1, head)?, &limit, o.kv_block)?;
        let selection = Selection { sequence: sequence.shallow_clone(), limit: limit.shallow_clone(), blocks, block: o.kv_block };
        found.push(attend_to_blocks(&of_heads, a, &selection, attend)?);
    }
    let (outs, lses): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let out = Tensor::f_cat(&outs, 1)?.f_reshape(a.query_shape(a.headdim_v))?;
    let lse = Tensor::f_cat(&lses, 1)?;
    let softmax_lse = match a.total_q() {
        Some(_) => lse.f_transpose(0, 1)?,
        None => lse.f_view([a.batch, a.seqlen_q, a.nheads])?.f_transpose(1, 2)?,
    };
    Ok((out, softmax_lse.f_contiguous()?))
}

/// Returns the inputs for KV head `head` and its query heads; None: all. q is (queries, 1, heads, headdim).
fn of_heads(inputs: &Inputs, a: &Attention, head: Option<i64>) -> Result<Inputs> {
    let group = a.group();
    let part = |t: &Tensor, dim: i64, each: i64| match head {
        Some(head) if t.size().get(dim as usize).is_some_and(|&size| size > 1) => t.f_narrow(dim, head * each, each),
        _ => Ok(t.shallow_clone()),
    };
    let o = &inputs.options;
    let of_tokens = |t: &Option<Tensor>| t.as_ref().map(|t| part(t, 2, 1)).transpose();
    // one number for all heads has no dimension, or one of size 1
    let of_sequences = |t: &Option<Tensor>| t.as_ref().map(|t| part(t, (t.dim() as i64 - 1).max(0), 1)).transpose();
    let options = Options {
        block_table: share(&o.block_table),
        cache_batch_idx: share(&o.cache_batch_idx),
        k_scale: of_tokens(&o.k_scale)?,
        v_scale: of_tokens(&o.v_scale)?,
        k_zero_point: of_tokens(&o.k_zero_point)?,
        v_zero_point: of_tokens(&o.v_zero_point)?,
        k_descale: of_sequences(&o.k_descale)?,
        v_descale: of_sequences(&o.v_descale)?,
        sinks: o.sinks.as_ref().map(|t| part(t, 0, group)).transpose()?,
        // the limit of each query is the length of its own sequence
        is_causal: false,
        window_right: -1, // no bound
        num_splits: o.num_splits,
        ..o.of_scores(Tensor::shallow_clone) // scale, softcap, ALiBi, ...; neither lengths nor the cache
    };
    let q = inputs.q.f_reshape([-1, 1, a.nheads, a.headdim])?;
    Ok(Inputs::new([part(&q, 2, group)?, part(&inputs.k, 2, 1)?, part(&inputs.v, 2, 1)?], options, inputs.stream))
}

/// Computes out (queries, heads, headdim_v) and softmax_lse (queries, heads), some queries at a time.
fn attend_to_blocks(inputs: &Inputs, a: &Attention, selection: &Selection, attend: Attend) -> Result<(Tensor, Tensor)> {
    let o = &inputs.options;
    let of_tokens = [&o.k_scale, &o.v_scale, &o.k_zero_point, &o.v_zero_point].into_iter().flatten();
    let caches = if a.has_latents() { vec![&inputs.k] } else { vec![&inputs.k, &inputs.v] };
    let tensors: Vec<_> = caches.into_iter().chain(of_tokens).collect();
    let pages = a.cache().and_then(|cache| SmallPages::of(&tensors, cache, selection.block));
    let [count, topk] = [selection.blocks.size()[0], selection.blocks.size()[1]];
    let at_once = match &pages {
        Some(_) => MAX_SEQUENCES,
        None => {
            let of_token = |t: &&Tensor| t.size()[2..].iter().product::<i64>() * t.kind().elt_size_in_bytes() as i64;
            const PLACE_BYTES: i64 = 32; // of a token: position, entry and row (int64), and masks
            let bytes = topk * selection.block * (tensors.iter().map(of_token).sum::<i64>() + PLACE_BYTES);
            (COPY_BYTES / bytes.max(1)).clamp(1, MAX_SEQUENCES)
        }
    };
    let mut parts = Vec::new();
    for first in (0..count.max(1)).step_by(at_once as usize) {
        let rows = at_once.min(count - first);
        let part = Inputs { q: inputs.q.f_narrow(0, first, rows)?, ..inputs.share() };
        let selection = selection.narrow(first, rows)?;
        let (out, lse) = attend(&match &pages {
            Some(pages) => in_pages(part, a, &selection, pages)?,
            None => copied(part, a, &selection)?,
        })?;
        parts.push((out.f_squeeze_dim(1)?, lse.f_squeeze_dim(2)?));
    }
    let (outs, lses): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Ok((Tensor::f_cat(&outs, 0)?, Tensor::f_cat(&lses, 0)?))
}

/// Returns the call in which each query is a sequence with pages of its own.
fn in_pages(mut inputs: Inputs, a: &Attention, selection: &Selection, pages: &SmallPages) -> Result<Inputs> {
    let Places { entry, row, exist } = selection.places(&inputs, a, pages.tokens)?;
    let number = entry.f_mul_scalar(pages.distance)?.f_add(&row.f_floor_divide_scalar(pages.tokens)?)?;
    let table = number.f_masked_fill(&exist.f_logical_not()?, -1)?.f_to_kind(Kind::Int)?;
    let lengths = selection.tokens()?.f_masked_fill(&selection.limit.f_lt(0)?, -1)?;
    of_queries(&mut inputs, a, selection, &lengths, &|t| pages.view(t))?;
    inputs.options.block_table = Some(table);
    Ok(inputs)
}

/// Returns the call in which each query is a sequence with a copy of its tokens.
fn copied(mut inputs: Inputs, a: &Attention, selection: &Selection) -> Result<Inputs> {
    let places = selection.places(&inputs, a, 1)?;
    let lengths = selection.tokens()?;
    let number = Tensor::f_arange(places.exist.size()[1], (Kind::Int64, lengths.device()))?;
    // a token before the query's last, of blocks in ascending order, that is in no page or entry: the block table is invalid
    let is_missing = all([places.exist.f_logical_not()?, number.f_lt_tensor(&lengths.f_unsqueeze(1)?)?])?;
    let missing = is_missing.f_sum_dim_intlist([1_i64].as_slice(), false, Kind::Int64)?;
    let is_invalid = missing.f_ge(1)?.f_logical_or(&selection.limit.f_lt(0)?)?;
    let lengths = lengths.f_masked_fill(&is_invalid, -1)?;
    of_queries(&mut inputs, a, selection, &lengths, &|t| {
        // ATen indexes bytes, but not every format
        let kind = t.kind();
        let is_byte = kind.elt_size_in_bytes() == 1;
        let taken = places.read(&bytes(t, if is_byte { CacheFormat::Int8 } else { CacheFormat::Unquantized })?)?;
        Ok(if is_byte { taken.f_view_dtype(kind)? } else { taken })
    })?;
    Ok(inputs)
}

/// Makes each query a sequence of `lengths` tokens. `cache` turns each tensor of the cache into that of the new call.
fn of_queries(
    inputs: &mut Inputs,
    a: &Attention,
    selection: &Selection,
    lengths: &Tensor,
    cache: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    inputs.k = cache(&inputs.k)?;
    inputs.v = if a.has_latents() { inputs.k.shallow_clone() } else { cache(&inputs.v)? };
    let o = &mut inputs.options;
    for t in [&mut o.k_scale, &mut o.v_scale, &mut o.k_zero_point, &mut o.v_zero_point] {
        *t = t.as_ref().map(cache).transpose()?;
    }
    for t in [&mut o.k_descale, &mut o.v_descale] {
        let of_sequences = t.as_ref().filter(|t| t.dim() == 2);
        if let Some(selected) = of_sequences.map(|t| t.f_index_select(0, &selection.sequence)).transpose()? {
            *t = Some(selected);
        }
    }
    (o.block_table, o.cache_batch_idx) = (None, None);
    o.cache_seqlens = Some(lengths.f_to_kind(Kind::Int)?);
    Ok(())
}
