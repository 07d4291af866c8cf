//! Modifiers of a chunk's scores between the two matrix products of the CPU backend (chunked.rs): a score function, ALiBi, bias, dropout.
//! - [`Part`]: a dense problem of some batch entries; group: a KV head of an entry with its query heads;
//! - [`Chunk`]: query positions of some groups, and their keys. Its scores are a matrix (groups, rows * heads of a group, keys).

use super::chunk::{heads_per_group, Chunk};
use super::layout::narrow_broadcast; // a view of (dim, start, count) parts; dimensions of size 1 stay
use super::part::Part;
use crate::error::Result;
use crate::ops::dropout;
use crate::problem::{Attention, ScoreFunction};
use tch::{Device, Kind, Tensor};

/// Fewest random numbers that pay for a thread.
const NUMBERS_PER_THREAD: usize = 1 << 16;

/// Returns one group's part of a bias or its gradient: (heads or 1, rows or 1, keys or 1).
pub fn bias_of_group(bias: &Tensor, part: &Part, c: &Chunk, group: i64) -> Result<Tensor> {
    let heads = heads_per_group(&part.a);
    let (entry, key_head) = (group / part.a.nheads_k, group % part.a.nheads_k);
    let parts = [(0, entry, 1), (1, key_head * heads, heads), (2, c.row, c.rows), (3, c.key, c.keys)];
    Ok(narrow_broadcast(bias, parts)?.f_squeeze_dim(0)?)
}

/// Views one group of a chunk's (groups, rows * heads, keys) matrix in the order of a bias: (heads, rows, keys).
pub fn group_of(matrix: &Tensor, part: &Part, c: &Chunk, group: i64) -> Result<Tensor> {
    let heads = heads_per_group(&part.a);
    Ok(matrix.f_select(0, group - c.group)?.f_view([c.rows, heads, c.keys])?.f_transpose(0, 1)?)
}

/// Returns true if modified scores have another derivative than 1: with a score function. ALiBi and a bias only add.
pub fn has_derivative(a: &Attention) -> bool {
    a.features.score_function.is_some()
}

/// Applies the score function, ALiBi and bias in place. Stores in `kept` what [`multiply_derivative`] takes, if given.
pub fn modify(scores: &mut Tensor, part: &Part, c: &Chunk, kept: Option<&mut Tensor>) -> Result<()> {
    if let Some(function) = part.a.features.score_function {
        apply(function, scores, kept)?;
    }
    if let Some(slopes) = &part.alibi_slopes {
        add_alibi(scores, slopes, part, c)?;
    }
    part.attn_bias.as_ref().map_or(Ok(()), |bias| add_bias(scores, bias, part, c))
}

/// Applies a score function in place. Stores the tanh in `tanh`, if given, for the gradient.
fn apply(function: ScoreFunction, scores: &mut Tensor, tanh: Option<&mut Tensor>) -> Result<()> {
    let ScoreFunction::Softcap(cap) = function;
    let _ = scores.f_div_scalar_(cap)?.f_tanh_()?;
    if let Some(tanh) = tanh {
        tanh.f_copy_(scores)?;
    }
    let _ = scores.f_mul_scalar_(cap)?;
    Ok(())
}

/// Multiplies `ds` by the derivative of [`modify`]: that of the score function, `1 - tanh^2`. `tanh` is what `modify` stored; destroys it.
pub fn multiply_derivative(ds: &mut Tensor, tanh: &mut Tensor) -> Result<()> {
    let _ = ds.f_mul_(&tanh.f_square_()?.f_neg_()?.f_add_scalar_(1.0)?)?;
    Ok(())
}

/// Returns ALiBi's bias, -slope * distance, for slopes of any shape (m, n): (m, n, rows, keys). `rows` and `keys` are [first, count].
pub fn alibi_bias(slopes: &Tensor, a: &Attention, rows: [i64; 2], keys: [i64; 2], kind: Kind) -> Result<Tensor> {
    let positions = |[start, count]: [i64; 2]| Tensor::f_arange_start(start, start + count, (kind, Device::Cpu));
    let rows = positions([rows[0] + a.seqlen_k - a.seqlen_q, rows[1]])?.f_unsqueeze(1)?;
    let distances = rows.f_sub(&positions(keys)?)?.f_abs_()?;
    Ok(slopes.f_to_kind(kind)?.f_neg()?.f_unsqueeze(2)?.f_unsqueeze(3)?.f_mul(&distances)?)
}

fn add_alibi(scores: &Tensor, slopes: &Tensor, part: &Part, c: &Chunk) -> Result<()> {
    let (a, heads) = (&part.a, heads_per_group(&part.a));
    let slopes = slopes.f_expand([a.batch, a.nheads], false)?.f_reshape([-1, heads])?.f_narrow(0, c.group, c.groups)?;
    let bias = alibi_bias(&slopes, a, [c.row, c.rows], [c.key, c.keys], scores.kind())?;
    let _ = scores.f_view([c.groups, c.rows, heads, c.keys])?.f_transpose(1, 2)?.f_add_(&bias)?;
    Ok(())
}

/// Minimum score: lower ones come from a bias that hides keys, and count as -inf. At that size fp32 loses the product of q and k, and an
/// fp32 softmax_lse cannot hold ln of the number of such keys for backward. Kernels use the same -2^24 in log2 units (`csrc/softmax.cuh`).
pub const LOWEST_SCORE: f64 = -16777216.0 * std::f64::consts::LN_2;

/// Adds a bias in place; -inf for False in a bool bias.
fn add_bias(scores: &Tensor, bias: &Tensor, part: &Part, c: &Chunk) -> Result<()> {
    for group in c.group..c.group + c.groups {
        let (mut scores, bias) = (group_of(scores, part, c, group)?, bias_of_group(bias, part, c, group)?);
        let _ = if bias.kind() == Kind::Bool {
            scores.f_masked_fill_(&bias.f_logical_not()?, f64::NEG_INFINITY)?
        } else {
            let mut scores = scores.f_add_(&bias)?;
            // LOWEST_SCORE is outside the range of fp16
            if bias.kind() == Kind::Half {
                continue;
            }
            scores.f_masked_fill_(&scores.f_lt(LOWEST_SCORE)?, f64::NEG_INFINITY)?
        };
    }
    Ok(())
}

/// Returns the dropout factor of each probability of the chunk: 0 if dropped, else the inverse of the kept share. Threads share the rows.
pub fn dropout_factors(dropout: &dropout::Dropout, part: &Part, c: &Chunk, kind: Kind) -> Result<Tensor> {
    let heads = heads_per_group(&part.a);
    let first_head = part.first * part.a.nheads;
    let (rows, keys) = (c.rows * heads, c.keys as usize);
    let mut kept = vec![false; (c.groups * rows) as usize * keys];
    let fill = |first: usize, part_of: &mut [bool]| {
        for (i, row) in part_of.chunks_mut(keys).enumerate() {
            let i = (first + i) as i64;
            let (group, row_of_group) = (c.group + i / rows, i % rows);
            let head = first_head + group * heads + row_of_group % heads;
            dropout.row(head as u32, (c.row + row_of_group / heads) as u32, c.key as u32, row);
        }
    };
    let threads = (tch::get_num_threads() as usize).min(kept.len() / NUMBERS_PER_THREAD).max(1);
    let share = ((c.groups * rows) as usize).div_ceil(threads);
    let fill = &fill;
    std::thread::scope(|scope| {
        let mut shares = kept.chunks_mut(share * keys).enumerate();
        let own = shares.next();
        for (i, other) in shares {
            scope.spawn(move || fill(i * share, other));
        }
        if let Some((_, own)) = own {
            fill(0, own);
        }
    });
    let factors = Tensor::f_from_slice(&kept)?.f_view([c.groups, rows, c.keys])?.f_to_kind(kind)?;
    Ok(factors.f_mul_scalar(dropout::Rule::new(part.a.features.dropout_p).scale())?)
}
