//! Attention over a cache with ATen operations and `volta_fa::fwd`: appends, copies each sequence's keys and values, attends to the copies.
//! kvcache/mod.rs, kernels.rs and latents.rs call it.
//!
//! The CPU computes every call this way, and tests compare kernels with it. On a GPU it serves caches that kernels cannot read in place:
//! many bf16 queries, headdims that are not multiples of 8, rows off 16-byte boundaries, many queries over a quantized cache (a kernel
//! makes that copy). The copies take memory for batch times the longest possible sequence.
//!
//! Nothing here synchronizes or trusts int32 tensors, except [`check_scales`]. Invalid lengths and pages result in NaN, and nothing outside
//! the tensors is read or written. A cache is entries of one sequence each, or pages of tokens that a block table assigns to sequences;
//! "entry" means either, and "row" a token in it, or of q, or of k and v to append. Positions count the tokens of a sequence.

use super::quantized::{bytes, Quantized};
use crate::error::Result;
use crate::limits::MAX_DRAFT_TOKENS; // 64
use crate::ops;
use crate::ops::inputs::{Inputs, Target}; // Target: ATen on the CPU, or kernels
use crate::options::scale_of_latents;
use crate::params::CacheFormat;
use crate::problem::{Appended, Attention, Cache, Keys, RequestedFeatures, Window};
use crate::tensor::{compute_kind, copied, share};
use tch::{Device, Kind, Tensor};

/// Returns the cache of the problem; all calls here have one.
fn cache_of(a: &Attention) -> &Cache {
    a.cache().expect("the keys are in a cache")
}

/// Returns the quantized caches of a call, k and v, with scales that broadcast to (entries, rows, heads) or, of fp8, (batch, 1, heads).
fn quantized_caches(inputs: &Inputs, format: CacheFormat) -> Result<[Quantized; 2]> {
    let o = &inputs.options;
    let scale = |of_tokens: &Option<Tensor>, of_sequences: &Option<Tensor>| -> Result<Option<Tensor>> {
        let given = if format.has_scales() { of_tokens } else { of_sequences };
        let Some(t) = given else { return Ok(None) };
        // (batch, nheads_k): tokens are a dimension between the two
        Ok(Some(if t.dim() == 2 { t.f_unsqueeze(1)? } else { t.shallow_clone() }))
    };
    let [keys, values] = format.parts();
    let (k_scale, v_scale) = (scale(&o.k_scale, &o.k_descale)?, scale(&o.v_scale, &o.v_descale)?);
    Ok([
        Quantized { format: keys, data: bytes(&inputs.k, keys)?, scale: k_scale, zero_point: share(&o.k_zero_point) },
        Quantized { format: values, data: bytes(&inputs.v, values)?, scale: v_scale, zero_point: share(&o.v_zero_point) },
    ])
}

/// Makes a number for each sequence, (batch) int64: from a tensor, or the same for all.
struct Numbers {
    batch: i64,
    device: Device,
}

impl Numbers {
    /// Returns the numbers of `t`; without a tensor, `default` for all.
    fn of(&self, t: &Option<Tensor>, default: i64) -> Result<Tensor> {
        Ok(match t {
            Some(t) => t.f_to_kind(Kind::Int64)?,
            None => Tensor::f_full([self.batch], default, (Kind::Int64, self.device))?,
        })
    }

    /// Returns each sequence's first row, number of rows and whether both are valid, from cu_seqlens of `total` rows, or `dense` rows each.
    fn ranges(&self, cu_seqlens: Option<&Tensor>, total: i64, dense: i64) -> Result<(Tensor, Tensor, Tensor)> {
        Ok(match cu_seqlens {
            Some(cu) => {
                let cu = cu.f_to_kind(Kind::Int64)?;
                let (begin, end) = (cu.f_narrow(0, 0, self.batch)?, cu.f_narrow(0, 1, self.batch)?);
                let valid = all([begin.f_ge(0)?, begin.f_le_tensor(&end)?, end.f_le(total)?])?;
                (begin.shallow_clone(), end.f_sub(&begin)?, valid)
            }
            None => {
                let count = self.of(&None, dense)?;
                // dense ranges are valid: all true
                (count.f_mul(&Tensor::f_arange(self.batch, (Kind::Int64, self.device))?)?, count, self.of(&None, 1)?.f_ge(1)?)
            }
        })
    }
}

/// Returns where all conditions hold.
pub(super) fn all<const N: usize>(conditions: [Tensor; N]) -> Result<Tensor> {
    let mut conditions = conditions.into_iter();
    let first = conditions.next().expect("there is a condition");
    conditions.try_fold(first, |a, b| Ok(a.f_logical_and(&b)?))
}

/// Lengths of a call's sequences before and after the append, and which are valid. All (batch).
pub(super) struct Sequences {
    /// Length before the append, with padding at its start.
    cached: Tensor,
    /// Tokens of padding at the start of the entry.
    leftpad: Tensor,
    /// Length after the append.
    pub end: Tensor,
    pub seqlen_q: Tensor,
    /// First rows of a sequence in q, and in k and v to append, counted over all sequences.
    pub q_start: Tensor,
    new_start: Tensor,
    /// True if the lengths are valid: not negative, and within the tensors.
    pub valid: Tensor,
}

impl Sequences {
    /// `a.appended`: `seqlen` new tokens of each sequence, or `total` packed ones (None: not packed).
    pub fn of(inputs: &Inputs, a: &Attention) -> Result<Sequences> {
        let o = &inputs.options;
        let numbers = Numbers { batch: a.batch, device: inputs.q.device() };
        let (q_start, seqlen_q, q_valid) = numbers.ranges(o.cu_seqlens_q.as_ref(), a.total_q().unwrap_or(0), a.seqlen_q)?;
        let cu_new = a.appended.total.and(o.cu_seqlens_k_new.as_ref().or(o.cu_seqlens_q.as_ref()));
        let (new_start, seqlen_new, new_valid) = numbers.ranges(cu_new, a.appended.total.unwrap_or(0), a.appended.seqlen)?;
        let (cached, leftpad) = (numbers.of(&o.cache_seqlens, a.seqlen_k)?, numbers.of(&o.leftpad_k, 0)?);
        let end = cached.f_add(&seqlen_new)?;
        let valid = all([leftpad.f_ge(0)?, leftpad.f_le_tensor(&cached)?, end.f_le(a.seqlen_k)?, q_valid, new_valid])?;
        Ok(Sequences { cached, leftpad, end, seqlen_q, q_start, new_start, valid })
    }
}

/// Entries and rows (int64) of tokens in the cache, and whether these exist (bool), in the shape of their positions. If a token does not
/// exist, entry and row are 0, which can be read.
pub(super) struct Places {
    pub entry: Tensor,
    pub row: Tensor,
    pub exist: Tensor,
}

impl Places {
    /// Finds the places of positions (int64) in sequences, whose numbers have the same shape.
    pub fn of(inputs: &Inputs, a: &Attention, sequence: &Tensor, position: &Tensor) -> Result<Places> {
        let inside = all([position.f_ge(0)?, position.f_lt(a.seqlen_k)?])?;
        let position = position.f_masked_fill(&inside.f_logical_not()?, 0)?;
        let (entry, row) = match &inputs.options.block_table {
            Some(table) => {
                let page = position.f_floor_divide_scalar(cache_of(a).rows)?;
                (table.f_index(&[Some(sequence), Some(&page)])?.f_to_kind(Kind::Int64)?, position.f_remainder(cache_of(a).rows)?)
            }
            None => match &inputs.options.cache_batch_idx {
                Some(entries) => (entries.f_index(&[Some(sequence)])?.f_to_kind(Kind::Int64)?, position),
                None => (sequence.shallow_clone(), position),
            },
        };
        let exist = all([inside, entry.f_ge(0)?, entry.f_lt(cache_of(a).entries)?])?;
        let missing = exist.f_logical_not()?;
        Ok(Places { entry: entry.f_masked_fill(&missing, 0)?, row: row.f_masked_fill(&missing, 0)?, exist })
    }

    /// Returns the tokens of a tensor (entries, rows, ...).
    pub fn read(&self, cache: &Tensor) -> Result<Tensor> {
        Ok(cache.f_index(&[Some(&self.entry), Some(&self.row)])?)
    }

    fn write(&self, cache: &Tensor, values: &Tensor) -> Result<()> {
        let _ = cache.shallow_clone().f_index_put_(&[Some(&self.entry), Some(&self.row)], values, false)?; // false: overwrites
        Ok(())
    }
}

/// Views a tensor as (tokens, heads, headdim).
fn tokens(t: &Tensor) -> Result<Tensor> {
    let sizes = t.size();
    let [tokens @ .., heads, columns] = &sizes[..] else { unreachable!("the operator has checked the rank") };
    Ok(t.f_reshape([tokens.iter().product(), *heads, *columns].as_slice())?)
}

/// Returns the sequence of each of `count` rows (of q, or of k and v to append), and the row's number there. `starts`: first row of each
/// sequence. A row of no packed sequence gets some sequence, and a number outside it. With unsorted starts, which are invalid, the search
/// may miss a row's sequence: the number is then outside the found one, or the row belongs to both.
pub(super) fn owners(a: &Attention, starts: &Tensor, packed: bool, count: i64) -> Result<(Tensor, Tensor)> {
    let token = Tensor::f_arange(count, (Kind::Int64, starts.device()))?;
    let sequence = match packed {
        // not int32; the last start at or before the token
        true => token.f_bucketize(starts, false, true)?.f_add_scalar(-1)?.f_clamp(0, (a.batch - 1).max(0))?,
        false => token.f_floor_divide_scalar(count / a.batch)?,
    };
    let number = token.f_sub(&starts.f_index_select(0, &sequence)?)?;
    Ok((sequence, number))
}

/// Rotates the first `rotary.dim` columns of `x` (tokens, heads, headdim) by positions (tokens). The tables have `rotary.rows` positions;
/// for others the columns become NaN.
fn rotate(x: &Tensor, position: &Tensor, inputs: &Inputs, a: &Attention) -> Result<Tensor> {
    let (Some(cos), Some(sin)) = (&inputs.options.rotary_cos, &inputs.options.rotary_sin) else { return Ok(x.shallow_clone()) };
    let rotated = copied(x, x.kind())?;
    let kind = compute_kind(x.kind());
    if a.appended.rotary.rows == 0 {
        let _ = rotated.f_narrow(-1, 0, a.appended.rotary.dim)?.f_fill_(f64::NAN)?;
        return Ok(rotated);
    }
    let missing = all([position.f_ge(0)?, position.f_lt(a.appended.rotary.rows)?])?.f_logical_not()?;
    let row = position.f_masked_fill(&missing, 0)?;
    // (tokens, 1, rotary_dim / 2): broadcast over heads
    let table = |t: &Tensor| -> Result<Tensor> {
        Ok(t.f_index_select(0, &row)?.f_to_kind(kind)?.f_masked_fill(&missing.f_unsqueeze(-1)?, f64::NAN)?.f_unsqueeze(1)?)
    };
    let (cos, sin) = (table(cos)?, table(sin)?);
    let half = a.appended.rotary.dim / 2;
    let pairs = |t: &Tensor| -> Result<[Tensor; 2]> {
        let t = t.f_narrow(-1, 0, a.appended.rotary.dim)?;
        let (t, of_pair) = match inputs.options.rotary_interleaved {
            true => (t.f_unflatten(-1, [half, 2].as_slice())?, -1),
            false => (t.f_unflatten(-1, [2, half].as_slice())?, -2),
        };
        Ok([t.f_select(of_pair, 0)?, t.f_select(of_pair, 1)?])
    };
    let [x0, x1] = pairs(x)?.map(|t| t.f_to_kind(kind));
    let (x0, x1) = (x0?, x1?);
    let [mut to0, mut to1] = pairs(&rotated)?;
    to0.f_copy_(&x0.f_mul(&cos)?.f_sub(&x1.f_mul(&sin)?)?)?;
    to1.f_copy_(&x0.f_mul(&sin)?.f_add(&x1.f_mul(&cos)?)?)?;
    Ok(rotated)
}

/// Writes k and v after the cached tokens of valid sequences.
fn append(inputs: &Inputs, a: &Attention, s: &Sequences) -> Result<()> {
    let Some([k, v]) = &inputs.appended else { return Ok(()) };
    let (k, v) = (tokens(k)?, tokens(v)?);
    let count = k.size()[0];
    if [count, cache_of(a).entries, cache_of(a).rows, a.nheads_k, a.seqlen_k].contains(&0) {
        return Ok(());
    }
    let (sequence, number) = owners(a, &s.new_start, a.appended.total.is_some(), count)?;
    let of = |t: &Tensor| t.f_index_select(0, &sequence);
    let position = of(&s.cached)?.f_add(&number)?;
    let mut places = Places::of(inputs, a, &sequence, &position)?;
    let written = all([places.exist.shallow_clone(), of(&s.valid)?, number.f_ge(0)?, position.f_lt_tensor(&of(&s.end)?)?])?;
    let k = rotate(&k, &position, inputs, a)?;
    // index_put_ writes every token. One that must not be written repeats the last that is: the same value twice, in any order. If there is
    // none, the cache's own values are written again.
    let last = Tensor::f_arange(count, (Kind::Int64, k.device()))?.f_masked_fill(&written.f_logical_not()?, -1)?;
    let last = last.f_amax([0_i64].as_slice(), true)?.f_clamp_min(0)?;
    let source = Tensor::f_arange(count, (Kind::Int64, k.device()))?.f_where_self(&written, &last)?;
    let any = written.f_index_select(0, &last)?.f_unsqueeze(-1)?.f_unsqueeze(-1)?;
    places.entry = places.entry.f_index_select(0, &source)?;
    places.row = places.row.f_index_select(0, &source)?;
    let write = |cache: &Tensor, values: &Tensor, any: &Tensor| {
        let values = values.f_index_select(0, &source)?.f_where_self(any, &places.read(cache)?)?;
        places.write(cache, &values)
    };
    if a.cache_format() == CacheFormat::Unquantized {
        write(&inputs.k, &k, &any)?;
        return write(&inputs.v, &v, &any);
    }
    let any_head = any.f_squeeze_dim(-1)?;
    for (cache, new) in quantized_caches(inputs, a.cache_format())?.into_iter().zip([&k, &v]) {
        // the scale of fp8 is that of the sequence or of all; other formats write theirs
        let scale = match &cache.scale {
            Some(scale) if !cache.format.has_scales() && scale.dim() == 3 => Some(scale.f_squeeze_dim(1)?.f_index_select(0, &sequence)?),
            other => share(other),
        };
        let values = Quantized::new(new, cache.format, scale.as_ref())?;
        write(&cache.data, &values.data, &any)?;
        for (to, from) in [(&cache.scale, &values.scale), (&cache.zero_point, &values.zero_point)] {
            if let (Some(to), Some(from)) = (to, from) {
                write(to, from, &any_head)?;
            }
        }
    }
    Ok(())
}

/// Returns q, rotated if requested.
fn queries(inputs: &Inputs, a: &Attention, s: &Sequences) -> Result<Tensor> {
    let q = &inputs.q;
    if a.appended.rotary.dim == 0 || a.has_no_output() {
        return Ok(q.shallow_clone());
    }
    let rows = tokens(q)?;
    let (sequence, number) = owners(a, &s.q_start, a.total_q().is_some(), rows.size()[0])?;
    let first = s.cached.f_index_select(0, &sequence)?;
    let position = if a.queries_have_positions() { first.f_add(&number)? } else { first };
    Ok(rotate(&rows, &position, inputs, a)?.f_view(q.size().as_slice())?)
}

/// Returns which tokens before `end` some query sees, (batch, seqlen_k) from each sequence's first token on, and their places.
fn seen(inputs: &Inputs, a: &Attention, s: &Sequences, end: &Tensor, seqlen_k: i64) -> Result<(Tensor, Places)> {
    let device = inputs.q.device();
    let position = Tensor::f_arange(seqlen_k, (Kind::Int64, device))?.f_unsqueeze(0)?.f_add(&s.leftpad.f_unsqueeze(1)?)?;
    let mut wanted = all([position.f_lt_tensor(&end.f_unsqueeze(1)?)?, s.valid.f_unsqueeze(1)?, s.seqlen_q.f_ge(1)?.f_unsqueeze(1)?])?;
    if let Some(left) = a.window.left {
        let first = s.end.f_sub(&s.seqlen_q)?.f_add_scalar(-left.min(a.seqlen_k))?;
        wanted = all([wanted, position.f_ge_tensor(&first.f_unsqueeze(1)?)?])?;
    }
    let sequence = Tensor::f_arange(a.batch, (Kind::Int64, device))?.f_unsqueeze(1)?.f_expand([a.batch, seqlen_k], false)?;
    let places = Places::of(inputs, a, &sequence, &position.f_masked_fill(&wanted.f_logical_not()?, 0)?)?;
    Ok((wanted, places))
}

/// Rejects invalid scales and zero points of visible tokens, and invalid fp8 scales. This synchronizes.
pub fn check_scales(inputs: &Inputs, a: &Attention, seqlen_k: i64) -> Result<()> {
    let o = &inputs.options;
    let of_heads = [("k_descale", &o.k_descale), ("v_descale", &o.v_descale)];
    let named = |name| if a.has_latents() { scale_of_latents(name).unwrap_or(name) } else { name };
    let reject = |name: &str, values: &Tensor| -> Result<()> {
        let may_be_negative = name.ends_with("zero_point");
        let finite = values.f_abs()?.f_le(f64::from(f32::MAX))?;
        let right = if may_be_negative { finite } else { all([finite, values.f_ge(0)?])? };
        if !bool::try_from(right.f_logical_not()?.f_any()?)? {
            return Ok(());
        }
        // the first of them, in the order of memory
        let at = right.f_reshape([-1_i64].as_slice())?.f_to_kind(Kind::Int)?.f_argmin(None, false)?;
        let found = f64::try_from(values.f_reshape([-1_i64].as_slice())?.f_index_select(0, &at.f_reshape([1_i64].as_slice())?)?)?;
        let allowed = if may_be_negative { "finite numbers" } else { "finite numbers from 0 on" };
        Err(crate::error::Error::value(name, found.to_string().to_lowercase(), allowed))
    };
    for (name, t) in of_heads {
        t.as_ref().map_or(Ok(()), |t| reject(named(name), t))?;
    }
    if !a.cache_format().has_scales() || [a.batch, cache_of(a).entries, cache_of(a).rows, a.nheads_k, seqlen_k].contains(&0) {
        return Ok(());
    }
    let s = Sequences::of(inputs, a)?;
    let (wanted, places) = seen(inputs, a, &s, &s.cached, seqlen_k)?;
    let missing = all([wanted, places.exist.shallow_clone()])?.f_logical_not()?.f_unsqueeze(-1)?;
    for (name, t) in o.token_scales() {
        t.as_ref().map_or(Ok(()), |t| reject(named(name), &places.read(t)?.f_masked_fill(&missing, 0.0)?))?;
    }
    Ok(())
}

/// Returns keys and values of each sequence, (batch, seqlen_k, nheads_k, headdim), from its first token on, and key counts, (batch) int32:
/// -1 for a sequence with invalid lengths, or with a visible token in no entry or page.
fn keys(inputs: &Inputs, a: &Attention, s: &Sequences, kind: Kind, seqlen_k: i64) -> Result<(Tensor, Tensor, Tensor)> {
    let o = &inputs.options;
    let counts = |valid: &Tensor| -> Result<Tensor> {
        Ok(s.end.f_sub(&s.leftpad)?.f_masked_fill(&valid.f_logical_not()?, -1)?.f_to_kind(Kind::Int)?)
    };
    let quantized = match a.cache_format() {
        CacheFormat::Unquantized => None,
        format => Some(quantized_caches(inputs, format)?),
    };
    // dequantizes what `part` takes of each tensor of a cache
    let dequantized = |cache: &Quantized, part: &dyn Fn(&Tensor) -> Result<Tensor>| -> Result<Tensor> {
        let of_tokens = |t: &Option<Tensor>| t.as_ref().map(part).transpose();
        let scale = if cache.format.has_scales() { of_tokens(&cache.scale)? } else { share(&cache.scale) };
        let taken = Quantized { format: cache.format, data: part(&cache.data)?, scale, zero_point: of_tokens(&cache.zero_point)? };
        taken.dequantize(kind)
    };
    // In a tree of draft tokens a window counts ancestors (csrc/decode/tree.cuh), so it begins at another key for each query. A mask then
    // takes its place. It hides the tokens before it, but `fwd` reads them, and NaN would reach the result: they must be zeros.
    let is_tree_in_window = a.features.tree && a.window.left.is_some();
    if o.block_table.is_none() && o.cache_batch_idx.is_none() && o.leftpad_k.is_none() && !is_tree_in_window {
        let first = |cache: &Tensor| -> Result<Tensor> { Ok(cache.f_narrow(1, 0, seqlen_k)?) };
        let (k, v) = match &quantized {
            None => (first(&inputs.k)?, first(&inputs.v)?),
            Some([k, v]) => (dequantized(k, &first)?, dequantized(v, &first)?),
        };
        return Ok((k, v, counts(&s.valid)?));
    }
    let device = inputs.q.device();
    if [cache_of(a).entries, cache_of(a).rows, seqlen_k, a.batch].contains(&0) {
        let zeros = |headdim| Tensor::f_zeros([a.batch, seqlen_k, a.nheads_k, headdim], (kind, device));
        let nothing_seen = s.end.f_sub(&s.leftpad)?.f_le(0)?.f_logical_or(&s.seqlen_q.f_le(0)?)?;
        return Ok((zeros(a.headdim)?, zeros(a.headdim_v)?, counts(&s.valid.f_logical_and(&nothing_seen)?)?));
    }
    let (wanted, places) = seen(inputs, a, s, &s.end, seqlen_k)?;
    let unwanted = wanted.f_logical_not()?;
    let hidden = all([wanted, places.exist.shallow_clone()])?.f_logical_not()?.f_unsqueeze(-1)?.f_unsqueeze(-1)?;
    // zeros for hidden tokens: the cache may hold NaN past the end of a sequence
    let (k, v) = match &quantized {
        None => (places.read(&inputs.k)?, places.read(&inputs.v)?),
        Some([k, v]) => (dequantized(k, &|t| places.read(t))?, dequantized(v, &|t| places.read(t))?),
    };
    let gathered = |mut tokens: Tensor| -> Result<Tensor> { Ok(tokens.f_masked_fill_(&hidden, 0.0)?) };
    let complete = places.exist.f_logical_or(&unwanted)?.f_to_kind(Kind::Int)?.f_amin([1_i64].as_slice(), false)?.f_ge(1)?;
    Ok((gathered(k)?, gathered(v)?, counts(&s.valid.f_logical_and(&complete)?)?))
}

/// Returns the keys of each sequence, (batch, seqlen_k, nheads_k, headdim), quantized ones as fp32, and key counts, as [`keys`] does.
pub fn collect_keys(inputs: &Inputs, a: &Attention, seqlen_k: i64) -> Result<(Tensor, Tensor)> {
    let kind = if a.cache_format() == CacheFormat::Unquantized { inputs.q.kind() } else { Kind::Float };
    let (k, _, used) = keys(inputs, a, &Sequences::of(inputs, a)?, kind, seqlen_k)?;
    Ok((k, used))
}

/// Writes k and v into the caches and returns the inputs with q rotated, if requested.
pub fn append_and_rotate(inputs: &Inputs, a: &Attention) -> Result<Inputs> {
    let s = Sequences::of(inputs, a)?;
    append(inputs, a, &s)?;
    Ok(Inputs { q: queries(inputs, a, &s)?, ..inputs.share() })
}

/// Computes the operator with ATen: (out, softmax_lse). `seqlen_k`: keys of the longest sequence, as far as it is known.
pub fn forward(inputs: &Inputs, a: &Attention, seqlen_k: i64) -> Result<(Tensor, Tensor)> {
    let s = Sequences::of(inputs, a)?;
    append(inputs, a, &s)?;
    let (q, kind) = (queries(inputs, a, &s)?, inputs.q.kind());
    // On the CPU dequantized values stay fp32. Kernels take 16-bit ones.
    let is_16_bit = matches!(kind, Kind::Half | Kind::BFloat16);
    let computes_in_fp32 = a.cache_format() != CacheFormat::Unquantized && is_16_bit && q.device() == Device::Cpu;
    let q = if computes_in_fp32 { q.f_to_kind(Kind::Float)? } else { q };
    let keys = keys(inputs, a, &s, q.kind(), seqlen_k)?;
    let (out, softmax_lse) = attend_to(&q, inputs, a, keys, seqlen_k)?;
    Ok((out.f_to_kind(kind)?, softmax_lse))
}

/// Computes the operator as [`forward`] does, after a kernel has appended k and v and rotated q.
pub fn attend(inputs: &Inputs, a: &Attention, seqlen_k: i64) -> Result<(Tensor, Tensor)> {
    let keys = keys(inputs, a, &Sequences::of(inputs, a)?, inputs.q.kind(), seqlen_k)?;
    attend_to(&inputs.q, inputs, a, keys, seqlen_k)
}

/// Returns the results of a problem whose results have no elements.
pub fn no_output(inputs: &Inputs, a: &Attention) -> Result<(Tensor, Tensor)> {
    let device = inputs.q.device();
    let out = Tensor::f_empty(a.query_shape(a.headdim_v), (inputs.q.kind(), device))?;
    Ok((out, Tensor::f_empty(a.lse_shape(), (Kind::Float, device))?))
}

/// Returns the problem of `fwd` over copies of `seqlen_k` keys of each sequence, as [`attend_to`] calls it.
pub fn dense(a: &Attention, seqlen_k: i64) -> Attention {
    let keys = a.total_q().map_or(Keys::Dense, |_| Keys::Packed { total: a.batch * seqlen_k });
    let features = RequestedFeatures { seqused_k: true, tree: false, attn_bias: a.features.tree, ..a.features };
    // a bias says what a query sees in a tree
    let window = if a.features.tree { Window::FULL } else { a.window };
    Attention { seqlen_k, keys, features, window, appended: Appended::default(), num_splits: 0, ..*a }
}

/// Attends `q`, the call's or rotated, to keys, values and key counts as [`keys`] returns them. `fwd` computes NaN for invalid counts.
pub fn attend_to(q: &Tensor, inputs: &Inputs, a: &Attention, keys: (Tensor, Tensor, Tensor), seqlen_k: i64) -> Result<(Tensor, Tensor)> {
    let ((mut k, mut v, used), device) = (keys, q.device());
    let o = &inputs.options;
    let mut options = o.of_scores(Tensor::shallow_clone); // bias, ALiBi, sinks, window, ...; neither lengths nor the cache
    if a.features.tree && seqlen_k > 0 && !a.has_no_output() {
        let s = Sequences::of(inputs, a)?;
        options.attn_bias = Some(seen_in_tree(inputs, a, [&s.q_start, &s.seqlen_q], &used, seqlen_k)?);
        // -1: no bound
        (options.is_causal, options.window_left, options.window_right) = (false, -1, -1);
    }
    options.seqused_k = Some(used);
    // `fwd` takes sinks of q's type, which may differ here from the call's, or fp32
    options.sinks = options.sinks.map(|t| if t.kind() == q.kind() { Ok(t) } else { t.f_to_kind(Kind::Float) }).transpose()?;
    if let Some(cu) = &o.cu_seqlens_q {
        options.cu_seqlens_q = Some(cu.shallow_clone());
        options.max_seqlen_q = if a.features.tree { Some(a.seqlen_q) } else { o.max_seqlen_q };
        options.cu_seqlens_k = Some(Tensor::f_arange(a.batch + 1, (Kind::Int, device))?.f_mul_scalar(seqlen_k)?);
        options.max_seqlen_k = Some(seqlen_k.max(1));
        (k, v) = (tokens(&k)?, tokens(&v)?);
    }
    let inputs = Inputs::new([q.shallow_clone(), k, v], options, inputs.stream);
    if a.has_latents() {
        // fwd has no kernels for this headdim; its CPU backend takes any
        return ops::forward_on(&Target::Cpu, &inputs, &dense(a, seqlen_k));
    }
    ops::forward(&inputs)
}

/// Returns which keys each query sees by the tree mask and the window, (batch, 1, seqlen_q, seqlen_k) bool. `first_q` and `seqlen_q`: rows
/// of each sequence in q, (batch) int64. `used`: key counts, (batch). There is a query and a key.
///
/// Draft tokens are a sequence's last seqlen_q keys. Bit j of a query's word shows it draft token j. Its depth is the number of its
/// ancestors, and a window counts by depth (csrc/decode/tree.cuh).
fn seen_in_tree(inputs: &Inputs, a: &Attention, [first_q, seqlen_q]: [&Tensor; 2], used: &Tensor, seqlen_k: i64) -> Result<Tensor> {
    let words = inputs.options.tree_mask.as_ref().expect("the call has a tree mask");
    let numbers = |n| Tensor::f_arange(n, (Kind::Int64, words.device()));
    let words = match a.total_q() {
        None => words.shallow_clone(),
        Some(total) => {
            let rows = first_q.f_unsqueeze(1)?.f_add(&numbers(a.seqlen_q)?)?.f_clamp(0, total - 1)?;
            words.f_index(&[Some(&rows)])?
        }
    };
    // (batch, seqlen_q, draft tokens)
    let draft = numbers(MAX_DRAFT_TOKENS)?;
    let count = seqlen_q.f_view([-1, 1, 1])?;
    let bits = words.f_unsqueeze(-1)?.f_bitwise_right_shift(&draft)?.f_bitwise_and(1)?.f_mul(&draft.f_lt_tensor(&count)?)?;
    let total = bits.f_sum_dim_intlist([-1_i64].as_slice(), true, Kind::Int64)?;
    let depth = total.f_clamp_min(1)?.f_add_scalar(-1)?;
    // draft tokens that the query sees after each
    let later = total.f_sub(&bits.f_cumsum(-1, Kind::Int64)?)?;
    // clamps to the widest useful bound, so that i64::MAX does not overflow
    let left = a.window.left.map_or(seqlen_k + MAX_DRAFT_TOKENS, |left| left.min(seqlen_k + MAX_DRAFT_TOKENS));
    let seen = bits.f_mul(&later.f_le(left)?)?.f_ge(1)?;
    let key = numbers(seqlen_k)?;
    let first_draft = used.f_to_kind(Kind::Int64)?.f_view([-1, 1, 1])?.f_sub(&count)?;
    let of_drafts = key.f_sub(&first_draft)?;
    let before = key.f_ge_tensor(&first_draft.f_add(&depth)?.f_add_scalar(-left)?)?;
    let index = of_drafts.f_clamp(0, MAX_DRAFT_TOKENS - 1)?.f_expand([a.batch, a.seqlen_q, seqlen_k], false)?;
    Ok(before.f_where_self(&of_drafts.f_lt(0)?, &seen.f_gather(2, &index, false)?)?.f_unsqueeze(1)?)
}
