//! Fills the parts that kernels' parameter blocks (src/params/) share, from a call's tensors and problem, for all launches of attention.
//!
//! [`readable`] copies tensors that kernels cannot read in place. [`Blocks`] points into the others. Callers hold the tensors while
//! launches are enqueued; PyTorch's caching allocator then keeps the memory for their stream. An entry is an element of the batch.
//! `total_q()` and `total_k()` of an [`Attention`] are the rows of packed q and k, None if they are not packed.

use super::block_mask::readable_bits;
use super::dropout;
use super::inputs::Inputs;
use crate::error::Result;
use crate::options::Options;
use crate::params::{Cache, CacheScale, CacheScales, ElementType, Lengths, Operand, Problem, ScoreOptions};
use crate::plan;
use crate::problem::{Attention, CacheLayout, ScoreFunction};
// operand: address and strides, from an entry on; Absent: NONE, a block of null pointers and zeros
use crate::tensor::{self, is_readable, operand, Absent};
use std::ptr::null;
use tch::{Kind, Tensor};

/// Keys of a bias that kernels read together.
const BIAS_GROUP: i64 = 4;
/// Alignment of the rows of a bias, bytes.
const BIAS_ALIGNMENT: usize = 16;

/// The parts of parameter blocks that kernels share, for a launch of some batch entries.
pub struct Blocks {
    pub q: Operand,
    /// Keys, or the cache that holds them.
    pub k: Operand,
    /// Values, or the cache that holds them.
    pub v: Operand,
    /// Sizes, window and scale.
    pub problem: Problem,
    /// Where sequences begin and end.
    pub lengths: Lengths,
    pub score_options: ScoreOptions,
    /// Layout of a KV cache, and what the call appends; `NONE` without a cache.
    pub cache: Cache,
    /// Of a quantized cache.
    pub scales: CacheScales,
    /// fp16 or bf16: of q.
    pub element: ElementType,
}

impl Blocks {
    /// Fills the blocks for a launch of `batches` entries from entry `first` on. The inputs come from [`readable`].
    pub fn new(inputs: &Inputs, a: &Attention, (first, batches): (i64, i64)) -> Blocks {
        let o = &inputs.options;
        // The first entry of a cache that the launch may read: any if tensors say which entries or pages belong to a sequence. Otherwise
        // sequence `i` has entry `i`.
        let first_entry = if o.block_table.is_some() || o.cache_batch_idx.is_some() { 0 } else { first };
        let [k, v] = [&inputs.k, &inputs.v].map(|t| operand(t, if a.cache().is_some() { first_entry } else { first }));
        Blocks {
            q: operand(&inputs.q, first),
            k,
            v,
            problem: plan::problem_block(a, batches),
            lengths: lengths(o, a, first),
            score_options: score_options(inputs, a, first),
            cache: cache(o, a, [k, v], first, first_entry),
            scales: scales(o, a, first, first_entry),
            element: tensor::element_type(&inputs.q),
        }
    }
}

/// Describes the lengths of sequences, from batch entry `first` on.
fn lengths(o: &Options<Tensor>, a: &Attention, first: i64) -> Lengths {
    Lengths {
        cu_seqlens_q: element(&o.cu_seqlens_q, first),
        cu_seqlens_k: element(&o.cu_seqlens_k, first),
        seqused_k: element(&o.seqused_k, first),
        total_q: a.total_q().unwrap_or(0) as i32,
        total_k: a.total_k().unwrap_or(0) as i32,
        // only the backward pass has scratch memory, and sets it
        scratch_rows: 0,
        first_batch: first as i32,
    }
}

/// Describes the cache, from batch entry `first` and its entry `first_entry` on.
fn cache(o: &Options<Tensor>, a: &Attention, [k, v]: [Operand; 2], first: i64, first_entry: i64) -> Cache {
    let Some(cache) = a.cache() else { return Cache::NONE };
    let block_table_stride = o.block_table.as_ref().map_or(0, |t| t.stride()[0]);
    // new tokens are packed like q unless they have cu_seqlens of their own
    let cu_seqlens_k_new = if o.cu_seqlens_k_new.is_some() { &o.cu_seqlens_k_new } else { &o.cu_seqlens_q };
    Cache {
        k,
        v,
        entries: (cache.entries - first_entry) as i32,
        rows: cache.rows as i32,
        block_table: element(&o.block_table, first * block_table_stride),
        block_table_stride,
        max_pages: if let CacheLayout::Pages { max_pages } = cache.layout { max_pages as i32 } else { 0 },
        cache_batch_idx: element(&o.cache_batch_idx, first),
        leftpad_k: element(&o.leftpad_k, first),
        cache_seqlens: element(&o.cache_seqlens, first),
        cu_seqlens_k_new: if a.appended.total.is_some() { element(cu_seqlens_k_new, first) } else { null() },
        seqlen_new: a.appended.seqlen as i32,
        total_new: a.appended.total.unwrap_or(0) as i32,
    }
}

/// Returns the scales and zero points of a quantized cache. Shapes: (entries, rows, heads); fp8: (sequences, heads), (heads), (1), ().
fn scales(o: &Options<Tensor>, a: &Attention, first: i64, first_entry: i64) -> CacheScales {
    let scale = |t: &Option<Tensor>| {
        let Some(t) = t else { return CacheScale::NONE };
        let (sizes, strides) = (t.size(), t.stride());
        let (strides, first) = match strides[..] {
            [entry, row, head] => ([entry, row, head], first_entry),
            [sequence, head] => ([sequence, 0, head], first),
            [head] => ([0, 0, if sizes[0] == 1 { 0 } else { head }], 0),
            _ => ([0; 3], 0),
        };
        let [batch_stride, row_stride, head_stride] = strides;
        let ptr = (t.data_ptr() as *mut f32).wrapping_offset((first * batch_stride) as isize);
        CacheScale { ptr, batch_stride, row_stride, head_stride }
    };
    let format = a.cache_format();
    // int8 and int4 have a scale for each token and head, fp8 a descale for each head
    let own = |of_tokens: &Option<Tensor>, of_heads: &Option<Tensor>| scale(if format.has_scales() { of_tokens } else { of_heads });
    CacheScales {
        format,
        k: own(&o.k_scale, &o.k_descale),
        v: own(&o.v_scale, &o.v_descale),
        k_zero_point: scale(&o.k_zero_point),
        v_zero_point: scale(&o.v_zero_point),
    }
}

/// Describes what changes scores and probabilities (bias, ALiBi, sinks, dropout, softcap), from batch entry `first` on.
fn score_options(inputs: &Inputs, a: &Attention, first: i64) -> ScoreOptions {
    // A tree mask takes the place of the bias: a 64-bit word for each query, with a bit for each draft token (csrc/decode/tree.cuh).
    let bias = if a.features.tree { &inputs.options.tree_mask } else { &inputs.options.attn_bias };
    let [batch, head, row, _] = match bias.as_ref() {
        // packed sequences find their words by their first query
        Some(words) if a.features.tree => [if words.dim() == 2 { words.stride()[0] } else { 0 }, 0, 0, 0],
        Some(bias) => broadcast_strides(bias),
        None => [0; 4],
    };
    let slopes = &inputs.options.alibi_slopes;
    let alibi_batch_stride = slopes.as_ref().map_or(0, |t| if t.dim() == 2 { a.nheads } else { 0 });
    let dropout = dropout::Rule::new(a.features.dropout_p);
    let parameter = a.features.score_function.map(ScoreFunction::parameter);
    ScoreOptions {
        bias: element::<u8>(bias, bias.as_ref().map_or(0, |t| first * batch * element_size(t))).cast(),
        bias_batch_stride: batch,
        bias_head_stride: head,
        bias_row_stride: row,
        bias_is_fp32: bias.as_ref().is_some_and(|t| t.kind() == Kind::Float) as i32,
        alibi_slopes: element(slopes, first * alibi_batch_stride),
        alibi_batch_stride,
        sinks: element(&inputs.options.sinks, 0),
        rng_state: element(&inputs.rng_state, 0),
        // Kernels compare two 16-bit random numbers at once, so both halves hold the threshold; dropout_inverted flips the results.
        dropout_threshold: dropout.threshold * 0x10001,
        dropout_inverted: if dropout.keeps_below { u32::MAX } else { 0 },
        dropout_scale: dropout.scale() as f32,
        function_parameter: parameter.unwrap_or(0.0) as f32,
        inverse_function_parameter: parameter.map_or(0.0, |x| 1.0 / x) as f32,
    }
}

/// Returns the inputs in types and layouts that kernels read; None: they are already, and no tensor changes the scores.
pub fn readable(inputs: &Inputs, a: &Attention) -> Result<Option<Inputs>> {
    let o = &inputs.options;
    let has_score_options = [&o.attn_bias, &o.alibi_slopes, &o.sinks, &o.block_lists, &inputs.rng_state].into_iter().any(Option::is_some);
    if !has_score_options && [&inputs.q, &inputs.k, &inputs.v].into_iter().all(is_readable) {
        return Ok(None);
    }
    let mut inputs = with_readable_operands(inputs)?;
    let o = &mut inputs.options;
    for (t, change) in [
        (&mut o.attn_bias, &(|t: &Tensor| readable_bias(t, a.seqlen_k)) as &dyn Fn(&Tensor) -> Result<Tensor>),
        (&mut o.alibi_slopes, &|t: &Tensor| Ok(t.f_contiguous()?)),
        (&mut o.sinks, &|t: &Tensor| Ok(t.f_to_kind(Kind::Float)?.f_contiguous()?)),
        (&mut o.block_bits, &readable_bits),
        (&mut o.block_bits_t, &readable_bits),
    ] {
        *t = t.as_ref().map(change).transpose()?;
    }
    inputs.rng_state = inputs.rng_state.filter(|_| a.features.dropout_p > 0.0);
    Ok(Some(inputs))
}

/// Returns inputs with q, k and v in layouts that kernels read.
pub fn with_readable_operands(inputs: &Inputs) -> Result<Inputs> {
    let mut inputs = inputs.share();
    for t in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
        *t = tensor::readable(t)?;
    }
    Ok(inputs)
}

/// Returns a pointer to an element of an fp32 tensor.
pub fn at(t: &Tensor, element: i64) -> *mut f32 {
    (t.data_ptr() as *mut f32).wrapping_offset(element as isize)
}

/// Returns the address of softmax_lse for a launch's first batch entry. Kernels find packed sequences themselves.
pub fn lse_at(softmax_lse: &Tensor, a: &Attention, first: i64) -> *mut f32 {
    at(softmax_lse, if a.total_q().is_some() { 0 } else { first * a.nheads * a.seqlen_q })
}

fn element_size(t: &Tensor) -> i64 {
    t.kind().elt_size_in_bytes() as i64
}

/// Returns a pointer to element `i` of a tensor of `T`; null without a tensor.
fn element<T>(t: &Option<Tensor>, i: i64) -> *const T {
    t.as_ref().map_or(null(), |t| (t.data_ptr() as *const T).wrapping_offset(i as isize))
}

/// Returns strides that are 0 in dimensions of size 1, so that kernels read such a dimension as broadcast.
pub fn broadcast_strides(t: &Tensor) -> [i64; 4] {
    let (sizes, strides) = (t.size(), t.stride());
    std::array::from_fn(|i| if sizes[i] == 1 { 0 } else { strides[i] })
}

/// Returns the bias in fp16 or fp32, with contiguous, 16-byte aligned rows of `seqlen_k` keys or more. Copies it if necessary; a copy has
/// -inf for False, and broadcast dimensions other than the keys keep size 1.
fn readable_bias(bias: &Tensor, seqlen_k: i64) -> Result<Tensor> {
    let has_kind = matches!(bias.kind(), Kind::Half | Kind::Float);
    let strides = bias.stride();
    let multiple = (BIAS_ALIGNMENT as i64) / element_size(bias);
    let is_aligned = bias.data_ptr() as usize % BIAS_ALIGNMENT == 0
        && bias.size()[3] % BIAS_GROUP == 0
        && bias.size()[3] >= seqlen_k
        && strides[3] == 1
        && (0..3).all(|i| bias.size()[i] == 1 || strides[i] % multiple == 0);
    if has_kind && is_aligned {
        return Ok(bias.shallow_clone());
    }
    let kind = match bias.kind() {
        Kind::Bool | Kind::Half => Kind::Half,
        _ => Kind::Float,
    };
    let mut sizes = bias.size();
    // eight fp16 numbers are 16 bytes, so rows are on 16-byte boundaries in either type
    sizes[3] = (seqlen_k + 7) / 8 * 8;
    // beside packed sequences it has max_seqlen_k keys, which may be more than there are
    let mut once = if bias.size()[3] > seqlen_k { bias.f_narrow(3, 0, seqlen_k)? } else { bias.shallow_clone() };
    for i in 0..3 {
        // the copy of an expanded mask repeats too, and stays small
        if strides[i] == 0 && sizes[i] > 1 {
            once = once.f_narrow(i as i64, 0, 1)?;
            sizes[i] = 1;
        }
    }
    let copy = Tensor::f_zeros(&sizes, (kind, bias.device()))?;
    let mut keys = copy.f_narrow(3, 0, seqlen_k)?;
    if bias.kind() == Kind::Bool {
        let _ = keys.f_masked_fill_(&once.f_logical_not()?, f64::NEG_INFINITY)?;
    } else {
        keys.f_copy_(&once)?;
    }
    Ok(copy)
}
