//! From a call's tensors to what the parameter blocks say of them.
//!
//! [`readable`] makes every tensor one that the kernels can read; the rest are pointers into those. The tensors are held for as
//! long as launches are enqueued; the caching allocator keeps the memory for their stream.

use super::{dropout, Inputs};
use crate::error::Result;
use crate::launch::MemoryRange;
use crate::params::{Cache, Lengths, Operand, ScoreOptions};
use crate::problem::Attention;
use crate::tensor::{self, memory_range};
use tch::{Kind, Tensor};

/// The kernels read a bias in groups of four keys.
const BIAS_GROUP: i64 = 4;
/// ... and its rows from 16-byte boundaries.
const BIAS_ALIGNMENT: usize = 16;

/// Of kernels whose keys and values are no cache's.
pub const NO_CACHE: Cache = {
    const NOTHING: Operand = Operand { ptr: std::ptr::null(), batch_stride: 0, row_stride: 0, head_stride: 0 };
    Cache {
        k: NOTHING,
        v: NOTHING,
        entries: 0,
        rows: 0,
        block_table: std::ptr::null(),
        block_table_stride: 0,
        max_pages: 0,
        cache_batch_idx: std::ptr::null(),
        leftpad_k: std::ptr::null(),
        cache_seqlens: std::ptr::null(),
        cu_seqlens_k_new: std::ptr::null(),
        seqlen_new: 0,
        total_new: 0,
    }
};

/// The same inputs in types and layouts that the kernels read; those that already are, as they are.
pub fn readable(inputs: &Inputs, a: &Attention) -> Result<Inputs> {
    let mut inputs = inputs.shallow_clone();
    for t in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
        *t = tensor::readable(t)?;
    }
    let o = &mut inputs.options;
    for (t, change) in [
        (&mut o.attn_bias, &(|t: &Tensor| readable_bias(t, a.seqlen_k)) as &dyn Fn(&Tensor) -> Result<Tensor>),
        (&mut o.alibi_slopes, &|t: &Tensor| Ok(t.f_contiguous()?)),
        (&mut o.sinks, &|t: &Tensor| Ok(t.f_to_kind(Kind::Float)?.f_contiguous()?)),
    ] {
        *t = t.as_ref().map(change).transpose()?;
    }
    inputs.rng_state = inputs.rng_state.filter(|_| a.features.dropout_p > 0.0);
    Ok(inputs)
}

/// What the kernels may read.
pub fn ranges(inputs: &Inputs) -> impl Iterator<Item = MemoryRange> + '_ {
    [("q", &inputs.q), ("k", &inputs.k), ("v", &inputs.v)]
        .into_iter()
        .chain(inputs.rng_state.as_ref().map(|t| ("rng_state", t)))
        .chain(inputs.options.tensors())
        .map(|(name, t)| memory_range(name, t, false))
}

/// For a launch whose first batch entry is `first`.
pub fn lengths(inputs: &Inputs, a: &Attention, first: i64, scratch_rows: i64) -> Lengths {
    let totals = a.packed.map_or((0, 0), |p| (p.total_q as i32, p.total_k as i32));
    Lengths {
        cu_seqlens_q: element(&inputs.options.cu_seqlens_q, first),
        cu_seqlens_k: element(&inputs.options.cu_seqlens_k, first),
        seqused_k: element(&inputs.options.seqused_k, first),
        total_q: totals.0,
        total_k: totals.1,
        scratch_rows: scratch_rows as i32,
        first_batch: first as i32,
    }
}

/// For a launch whose first batch entry is `first`.
pub fn score_options(inputs: &Inputs, a: &Attention, first: i64) -> ScoreOptions {
    let bias = &inputs.options.attn_bias;
    let [batch, head, row, _] = bias.as_ref().map_or([0; 4], broadcast_strides);
    let slopes = &inputs.options.alibi_slopes;
    let alibi_batch_stride = slopes.as_ref().map_or(0, |t| if t.dim() == 2 { a.nheads } else { 0 });
    let dropout = dropout::Rule::new(a.features.dropout_p);
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
        dropout_threshold: dropout.threshold * 0x10001,
        dropout_inverted: if dropout.keeps_below { u32::MAX } else { 0 },
        dropout_scale: dropout.scale() as f32,
        softcap: a.features.softcap as f32,
        inverse_softcap: if a.features.softcap > 0.0 { (1.0 / a.features.softcap) as f32 } else { 0.0 },
    }
}

fn element_size(t: &Tensor) -> i64 {
    t.kind().elt_size_in_bytes() as i64
}

/// Pointer to an element; null where the tensor is not there.
fn element<T>(t: &Option<Tensor>, i: i64) -> *const T {
    t.as_ref().map_or(std::ptr::null(), |t| (t.data_ptr() as *const T).wrapping_offset(i as isize))
}

/// Strides in which dimensions of size 1 repeat.
pub fn broadcast_strides(t: &Tensor) -> [i64; 4] {
    let (sizes, strides) = (t.size(), t.stride());
    std::array::from_fn(|i| if sizes[i] == 1 { 0 } else { strides[i] })
}

/// The bias in fp16 or fp32, -inf for False, a row of `seqlen_k` keys contiguous, aligned and padded to whole groups: itself, or
/// a copy where it is not so. Broadcast dimensions other than the keys stay of size 1.
fn readable_bias(bias: &Tensor, seqlen_k: i64) -> Result<Tensor> {
    let as_it_is = matches!(bias.kind(), Kind::Half | Kind::Float);
    let strides = bias.stride();
    let multiple = (BIAS_ALIGNMENT as i64) / element_size(bias);
    let aligned = bias.data_ptr() as usize % BIAS_ALIGNMENT == 0
        && bias.size()[3] % BIAS_GROUP == 0
        && bias.size()[3] >= seqlen_k
        && strides[3] == 1
        && (0..3).all(|i| bias.size()[i] == 1 || strides[i] % multiple == 0);
    if as_it_is && aligned {
        return Ok(bias.shallow_clone());
    }
    let kind = match bias.kind() {
        Kind::Bool | Kind::Half => Kind::Half,
        _ => Kind::Float,
    };
    let mut sizes = bias.size();
    // rows on 16-byte boundaries in either type
    sizes[3] = (seqlen_k + 7) / 8 * 8;
    // packed, it may be longer than all keys together
    let mut once = if bias.size()[3] > seqlen_k { bias.f_narrow(3, 0, seqlen_k)? } else { bias.shallow_clone() };
    for i in 0..3 {
        // an expanded mask: its copy repeats as well, and stays small
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
