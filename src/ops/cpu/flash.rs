//! Computes attention with ATen's flash operator for the CPU (`_scaled_dot_product_flash_attention_for_cpu`), which computes all heads in
//! one parallel region. dense.rs calls it for the problems that it [`covers`]. The operator takes windows, ALiBi and biases as an additive
//! mask. This module divides such problems into [`Block`]s of query rows. So masks take O(seqlen) memory, and keys outside a block's window
//! cost nothing. A group is the query heads that share a KV head.

use super::chunk::{heads_per_group, window_offsets}; // window_offsets: (first, last), query i sees keys i + first..=i + last
use super::layout::{narrow, narrow_broadcast};
use super::part::Part;
// has_derivative: is there a softcap; LOWEST_SCORE: -2^24 * ln(2), a bias below it hides keys
use super::scores::{alibi_bias, has_derivative, LOWEST_SCORE};
use crate::error::Result;
use crate::tensor::{compute_kind, in_kind};
use tch::{Device, Kind, Tensor};

/// Mask elements of a block: 16 MiB in fp32, much less than a mask of all scores.
const MASK_ELEMENTS: i64 = 1 << 22;
/// Minimum rows of a block with a mask per head: the operator's tiles have 32 rows or more.
const MIN_ROWS: i64 = 64;
/// Query rows of a block with a mask: as many as its window is wide, but within this range. Then a block has about twice the keys that a
/// row sees. A block whose mask would exceed [`MASK_ELEMENTS`] has fewer rows.
const ROWS: std::ops::RangeInclusive<i64> = 256..=1024;
/// Most elements of a log-sum-exp for which one loop replaces ATen's operators: up to here ATen uses one thread too.
const MOST_LOOPED: usize = 1 << 15;
/// Largest |q| and |k| for which a score is finite in fp32, at headdims to 256 and scales to 1: -inf plus an infinite score is NaN.
const LARGEST_FACTOR: f64 = 1e18;

/// Returns true if the operator can compute the forward pass, and the backward pass without the gradients of a bias and of the log-sum-exp.
pub fn covers(part: &Part) -> bool {
    let a = &part.a;
    // the operator sets scores of hidden keys to -inf, then multiplies them by the scale
    let positive_scale = (a.softmax_scale as f32) > 0.0;
    let plain_scores = !has_derivative(a) && part.dropout.is_none() && part.blocks.is_none();
    a.headdim == a.headdim_v && positive_scale && plain_scores && a.seqlen_q > 0 && a.seqlen_k > 0
}

/// Query rows and the keys that any of them sees.
struct Block {
    row: i64, // the first
    rows: i64,
    key: i64, // the first
    keys: i64,
    /// Row `i` sees the keys up to `i`.
    is_causal: bool,
}

/// How a call of the operator sees grouped heads: it has a KV head for each query head, so a group's heads become rows, entries or calls.
#[derive(Clone, Copy, PartialEq)]
enum Fold {
    /// One query head per KV head.
    Heads,
    /// One query row per head: the group's heads are rows.
    Rows,
    /// One batch entry: the group's heads are batch entries.
    Entry(i64),
    /// One head of every group: a call for each number of a head in its group.
    Member(i64),
}

impl Fold {
    /// Returns the calls that cover all heads: one, or as many as batch entries or heads of a group, whichever are fewer.
    fn all(part: &Part) -> Vec<Fold> {
        let (group, batch) = (heads_per_group(&part.a), part.a.batch);
        match (group, part.a.seqlen_q) {
            (1, _) => vec![Fold::Heads],
            (_, 1) => vec![Fold::Rows],
            _ if batch <= group => (0..batch).map(Fold::Entry).collect(),
            _ => (0..group).map(Fold::Member).collect(),
        }
    }

    /// Views (batch, rows, nheads, headdim) as the operator's (batch, heads, rows, headdim).
    fn queries(self, t: &Tensor, nheads_k: i64) -> Result<Tensor> {
        let by_group = || t.f_unflatten(2, [nheads_k, -1]);
        Ok(match self {
            Fold::Heads => t.f_transpose(1, 2)?,
            Fold::Rows => by_group()?.f_select(1, 0)?,
            Fold::Entry(entry) => by_group()?.f_select(0, entry)?.f_permute([2, 1, 0, 3])?,
            Fold::Member(member) => by_group()?.f_select(3, member)?.f_transpose(1, 2)?,
        })
    }

    /// Views k or v, (batch, keys, nheads_k, headdim), with the same heads. Batch entries of a group share memory.
    fn keys(self, t: &Tensor, group: i64) -> Result<Tensor> {
        match self {
            Fold::Entry(_) => Ok(self.key_gradient(t)?.f_expand([group, -1, -1, -1], false)?),
            _ => self.key_gradient(t),
        }
    }

    /// Views the part of dk or dv to which [`Fold::add_keys`] adds.
    fn key_gradient(self, t: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Fold::Entry(entry) => t.f_narrow(0, entry, 1)?.f_transpose(1, 2)?,
            _ => t.f_transpose(1, 2)?,
        })
    }

    /// Adds the operator's gradient to dk or dv.
    fn add_keys(self, sum: &Tensor, gradient: &Tensor) -> Result<()> {
        let gradient = match self {
            Fold::Entry(_) => gradient.f_sum_dim_intlist([0_i64].as_slice(), true, gradient.kind())?,
            _ => gradient.shallow_clone(),
        };
        let _ = self.key_gradient(sum)?.f_add_(&gradient)?;
        Ok(())
    }

    /// Views (batch, nheads, rows) as the operator's (batch, heads, rows).
    fn lse(self, t: &Tensor, nheads_k: i64) -> Result<Tensor> {
        if self == Fold::Heads {
            return Ok(t.shallow_clone());
        }
        Ok(self.queries(&t.f_transpose(1, 2)?.f_unsqueeze(3)?, nheads_k)?.f_squeeze_dim(3)?)
    }

    /// Views a (batch, nheads, rows, keys) mask, whose sizes may be 1, for the operator.
    fn mask(self, t: &Tensor, nheads_k: i64) -> Result<Tensor> {
        let [entries, nheads, ..] = t.size()[..] else { unreachable!("a mask has four dimensions") };
        let of_entry = |entry: i64| t.f_narrow(0, if entries == 1 { 0 } else { entry }, 1);
        let by_group = |t: &Tensor| t.f_unflatten(1, [nheads_k, -1]);
        Ok(match self {
            Fold::Heads => t.shallow_clone(),
            Fold::Entry(entry) if nheads == 1 => of_entry(entry)?,
            Fold::Entry(entry) => by_group(&of_entry(entry)?)?.f_select(0, 0)?.f_transpose(0, 1)?,
            _ if nheads == 1 => t.shallow_clone(),
            Fold::Rows => by_group(t)?.f_select(3, 0)?,
            Fold::Member(member) => by_group(t)?.f_select(2, member)?,
        })
    }
}

/// A problem's tensors in the dtype and the strides that the operator computes with.
struct Problem<'a> {
    part: &'a Part,
    kind: Kind, // fp64 for fp64 tensors, else fp32
    /// Query heads of a KV head.
    group: i64,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Bias that the operator takes without a copy.
    plain_bias: Option<Tensor>,
}

/// Converts a (batch, seqlen, heads, headdim) tensor to `kind`. Also copies tensors that BLAS cannot read, with overlapping rows or strided
/// elements. Also copies rows that are no multiple of 16 bytes apart, because BLAS may round their products differently.
fn readable(t: &Tensor, kind: Kind) -> Result<Tensor> {
    let t = in_kind(t, kind)?;
    let (sizes, strides) = (t.size(), t.stride());
    let unit = 16 / t.kind().elt_size_in_bytes() as i64;
    let aligned = (0..3).all(|i| sizes[i] == 1 || strides[i] % unit == 0);
    let dense = (sizes[3] == 1 || strides[3] == 1) && (sizes[1] == 1 || strides[1] >= sizes[3]) && aligned;
    Ok(if dense { t } else { t.f_contiguous()? })
}

impl<'a> Problem<'a> {
    fn new(part: &'a Part) -> Result<Self> {
        let kind = compute_kind(part.q.kind());
        let (q, k, v) = (readable(&part.q, kind)?, readable(&part.k, kind)?, readable(&part.v, kind)?);
        let plain_bias = part.attn_bias.as_ref().map(|t| plain(t, kind)).transpose()?.flatten();
        Ok(Problem { part, kind, group: heads_per_group(&part.a), q, k, v, plain_bias })
    }

    /// Returns true if every element of q and k is finite, and so is every score.
    fn has_finite_scores(&self) -> Result<bool> {
        let (a, all): (_, [i64; 0]) = (&self.part.a, []);
        let largest = LARGEST_FACTOR / (a.softmax_scale.max(1.0) * (a.headdim as f64 / 256.0).max(1.0)).sqrt();
        for t in [&self.q, &self.k] {
            let small = t.f_amax(all, false)?.f_lt(largest)?.f_logical_and(&t.f_amin(all, false)?.f_neg()?.f_lt(largest)?)?;
            if small.f_int64_value(&[])? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns true if the operator gets masks.
    fn has_masks(&self, blocks: &[Block]) -> bool {
        let (first, last) = window_offsets(&self.part.a);
        self.part.alibi_slopes.is_some()
            || self.part.attn_bias.is_some()
            || blocks.iter().any(|b| !b.is_causal && (b.hidden_left(first).is_some() || b.hidden_right(last).is_some()))
    }

    /// Returns the number of masks of a block that need a row per query row; 0: one row applies to all, or the bias is taken as it is.
    fn stored_masks(&self, has_window: bool) -> i64 {
        let bias = self.part.attn_bias.as_ref().map(|t| t.size());
        let alibi = self.part.alibi_slopes.as_ref().map(|t| t.size());
        let sizes = |i: usize| bias.as_ref().map_or(1, |s| s[i]).max(alibi.as_ref().map_or(1, |s| s[i]));
        let one_row = !has_window && alibi.is_none() && (self.plain_bias.is_some() || bias.as_ref().is_none_or(|s| s[2] == 1));
        i64::from(!one_row) * sizes(0) * sizes(1)
    }

    /// Divides the query rows that see a key into blocks: one for all if there is no mask to store.
    fn blocks(&self) -> Vec<Block> {
        let a = &self.part.a;
        let (first, last) = window_offsets(a);
        // the rows that see a key
        let (start, end) = ((-last).max(0), (a.seqlen_k - first).min(a.seqlen_q));
        let hides_left = end - 1 + first > 0;
        let has_window = hides_left || start + last < a.seqlen_k - 1;
        let has_mask = self.part.alibi_slopes.is_some() || self.part.attn_bias.is_some();
        let is_causal = last == 0 && !hides_left && !has_mask && a.seqlen_q > 1 && a.seqlen_q <= a.seqlen_k;
        let masks = if is_causal { 0 } else { self.stored_masks(has_window) };
        let rows = if masks == 0 {
            a.seqlen_q
        } else {
            let width = (last - first + 1).min(a.seqlen_k);
            let rows = width.clamp(*ROWS.start(), *ROWS.end());
            let keys = a.seqlen_k.min(width + rows);
            rows.min((MASK_ELEMENTS / (masks * keys)).max(MIN_ROWS))
        };
        (start..end)
            .step_by(rows.max(1) as usize)
            .map(|row| {
                let rows = rows.min(end - row);
                let key = (row + first).max(0);
                Block { row, rows, key, keys: (row + rows + last).min(a.seqlen_k) - key, is_causal }
            })
            .collect()
    }

    /// Returns the additive mask of the block: (batch or 1, nheads or 1, rows or 1, keys or 1).
    fn mask(&self, b: &Block) -> Result<Option<Tensor>> {
        if b.is_causal {
            return Ok(None);
        }
        let bias = match (&self.plain_bias, &self.part.attn_bias) {
            (Some(plain), _) => Some(b.of_bias(plain)?),
            (None, bias) => bias.as_ref().map(|t| additive(&b.of_bias(t)?, self.kind)).transpose()?,
        };
        let alibi = self.part.alibi_slopes.as_ref().map(|t| alibi_bias(t, &self.part.a, [b.row, b.rows], [b.key, b.keys], self.kind));
        let scores = match (bias, alibi.transpose()?) {
            (Some(bias), Some(alibi)) => Some(alibi.f_add(&bias)?),
            (bias, alibi) => bias.or(alibi),
        };
        let window = window_offsets(&self.part.a);
        let mask = match scores {
            None => b.hidden(window, f64::NEG_INFINITY, self.kind)?,
            Some(scores) => Some(match b.hidden(window, 1.0, Kind::Bool)? {
                None => scores,
                Some(hidden) => scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?,
            }),
        };
        // the operator requires contiguous rows
        mask.map(|t| Ok(if t.size()[3] == 1 || t.stride()[3] == 1 { t } else { t.f_contiguous()? })).transpose()
    }

    /// Views the block's rows of q, out or dout as the operator takes them.
    fn query_rows(&self, t: &Tensor, b: &Block, fold: Fold) -> Result<Tensor> {
        fold.queries(&narrow(t, 1, b.row, b.rows)?, self.part.a.nheads_k)
    }

    /// Views the block's rows of k or v.
    fn key_rows(&self, t: &Tensor, b: &Block, fold: Fold) -> Result<Tensor> {
        fold.keys(&narrow(t, 1, b.key, b.keys)?, self.group)
    }

    /// Views the block's part of a softmax_lse.
    fn lse_rows(&self, t: &Tensor, b: &Block, fold: Fold) -> Result<Tensor> {
        fold.lse(&narrow(t, 2, b.row, b.rows)?, self.part.a.nheads_k)
    }
}

impl Block {
    /// Returns the diagonal from which on a window hides later keys; None if it hides none.
    fn hidden_right(&self, last: i64) -> Option<i64> {
        let diagonal = self.row + last - self.key + 1;
        (diagonal < self.keys).then_some(diagonal)
    }

    /// Returns the diagonal up to which a window hides earlier keys; None if it hides none.
    fn hidden_left(&self, first: i64) -> Option<i64> {
        let diagonal = self.row + first - self.key - 1;
        (diagonal > -self.rows).then_some(diagonal)
    }

    /// Returns `value` where the window hides a key from a row and 0 elsewhere, (1, 1, rows, keys); None if it hides none.
    ///
    /// The numbers depend on key - row alone. So each row is the one before it moved by one column: a view of one line, repeated without
    /// its last column. That is one parallel region; one for each comparison would cost more than the attention of some hundred rows.
    fn hidden(&self, (first, last): (i64, i64), value: f64, kind: Kind) -> Result<Option<Tensor>> {
        let (left, right) = (self.hidden_left(first), self.hidden_right(last));
        if left.is_none() && right.is_none() {
            return Ok(None);
        }
        // column of key - row = 0
        let middle = self.rows - 1;
        let columns = self.rows + self.keys;
        let start = left.map_or(0, |diagonal| middle + diagonal + 1);
        let end = right.map_or(columns, |diagonal| middle + diagonal);
        let line = Tensor::f_full([columns], value, (kind, Device::Cpu))?;
        let _ = line.f_narrow(0, start, end - start)?.f_zero_()?;
        let lines = line.f_expand([self.rows, columns], false)?.f_contiguous()?;
        Ok(Some(lines.f_as_strided([1, 1, self.rows, self.keys], [0, 0, columns - 1, 1], middle)?))
    }

    /// Returns the block's part of a bias. Dimensions of size 1 stay.
    fn of_bias(&self, bias: &Tensor) -> Result<Tensor> {
        narrow_broadcast(bias, [(2, self.row, self.rows), (3, self.key, self.keys)])
    }

    /// Returns true if the call with this fold computes all rows and heads in the problem's own layout.
    fn is_whole(&self, part: &Part, fold: Fold) -> bool {
        fold == Fold::Heads && self.rows == part.a.seqlen_q
    }
}

/// Returns the bias if the operator can take it without a copy, because no number has to change.
fn plain(bias: &Tensor, kind: Kind) -> Result<Option<Tensor>> {
    if bias.kind() != kind || (bias.size()[3] > 1 && bias.stride()[3] != 1) {
        return Ok(None);
    }
    let all: [i64; 0] = [];
    let changes = bias.f_amin(all, false)?.f_lt(LOWEST_SCORE)?.f_int64_value(&[])? != 0;
    Ok((!changes).then(|| bias.shallow_clone()))
}

/// Converts a bias to numbers of type `kind`; -inf for hidden keys. fp16 has no numbers down to LOWEST_SCORE.
fn additive(bias: &Tensor, kind: Kind) -> Result<Tensor> {
    if bias.kind() == Kind::Bool {
        return Ok(Tensor::f_zeros(bias.size(), (kind, Device::Cpu))?.f_masked_fill_(&bias.f_logical_not()?, f64::NEG_INFINITY)?);
    }
    let numbers = bias.f_to_kind(kind)?;
    Ok(if bias.kind() == Kind::Half { numbers } else { numbers.f_threshold(LOWEST_SCORE, f64::NEG_INFINITY)? })
}

/// Copies a (batch, heads, rows) log-sum-exp to contiguous memory. Also returns true if no number is 0 (which may mean a row without keys)
/// and, under a mask, none is NaN (of a hidden infinite score).
fn contiguous_lse(lse: &Tensor, has_mask: bool) -> Result<(Tensor, bool)> {
    // ATen's operators take more time than one loop of one thread, because their code left the caches during the attention: 2% of that of
    // (batch, nheads, seqlen, headdim) = (8, 4, 128, 32). For many rows they use all threads.
    if lse.numel() <= MOST_LOOPED && lse.kind() == Kind::Float {
        return looped_lse(lse, has_mask);
    }
    let all: [i64; 0] = [];
    let every_dim: Option<i64> = None;
    let lse = lse.f_contiguous()?;
    // NaN counts as nonzero. ATen's `all` would convert each number to a bool first.
    let has_zero = lse.f_count_nonzero(every_dim)?.f_int64_value(&[])? < lse.numel() as i64;
    let is_settled = !has_zero && (!has_mask || lse.f_amax(all, false)?.f_ge(f64::NEG_INFINITY)?.f_int64_value(&[])? != 0);
    Ok((lse, is_settled))
}

/// Computes [`contiguous_lse`] of an fp32 tensor on the CPU in one loop.
fn looped_lse(lse: &Tensor, has_mask: bool) -> Result<(Tensor, bool)> {
    let (batch, heads, rows) = lse.size3()?;
    let (of_batch, of_head, of_row) = lse.stride3()?;
    let copy = Tensor::f_empty(lse.size(), (Kind::Float, Device::Cpu))?;
    let (from, to) = (lse.data_ptr() as *const f32, copy.data_ptr() as *mut f32);
    let mut is_settled = true;
    for (number, start) in (0..batch).flat_map(|entry| (0..heads).map(move |head| entry * of_batch + head * of_head)).enumerate() {
        for row in 0..rows {
            // SAFETY: entry, head and row are within the sizes of `lse`, which is fp32 in the CPU's memory.
            let x = unsafe { *from.offset((start + row * of_row) as isize) };
            // SAFETY: `copy` is contiguous and fp32; the loops count its elements from 0 on.
            unsafe { *to.add(number * rows as usize + row as usize) = x };
            is_settled &= x != 0.0 && !(has_mask && x.is_nan());
        }
    }
    Ok((copy, is_settled))
}

/// Returns the log-sum-exp, contiguous, with +inf in fully masked rows, where the operator has 0. None: other rows have 0, or NaN under a
/// mask, so the caller must not use the results.
fn settled(lse: &Tensor, mask: Option<&Tensor>) -> Result<Option<Tensor>> {
    let (lse, is_settled) = contiguous_lse(lse, mask.is_some())?;
    if is_settled {
        return Ok(Some(lse));
    }
    let Some(mask) = mask else { return Ok(None) };
    let hidden = mask.f_amax(-1, false)?.f_eq(f64::NEG_INFINITY)?.f_logical_and(&lse.f_eq(0.0)?)?;
    let (lse, is_settled) = contiguous_lse(&lse.f_masked_fill(&hidden, f64::INFINITY)?, true)?; // true: there is a mask
    Ok(is_settled.then_some(lse))
}

/// Computes out (batch, seqlen_q, nheads, headdim) and the log-sum-exp (batch, nheads, seqlen_q).
///
/// None if masks meet scores that are not finite, or if a log-sum-exp is exactly 0: the operator also returns 0 for rows with only -inf.
pub fn forward(part: &Part) -> Result<Option<(Tensor, Tensor)>> {
    let (p, a) = (Problem::new(part)?, &part.a);
    let mut results = None;
    let blocks = p.blocks();
    let every_row_sees_a_key = blocks.iter().map(|b| b.rows).sum::<i64>() == a.seqlen_q;
    for b in blocks {
        let mask = p.mask(&b)?;
        for fold in Fold::all(part) {
            let mask = mask.as_ref().map(|t| fold.mask(t, a.nheads_k)).transpose()?;
            let (out, lse) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                &p.query_rows(&p.q, &b, fold)?,
                &p.key_rows(&p.k, &b, fold)?,
                &p.key_rows(&p.v, &b, fold)?,
                0.0, // dropout_p
                b.is_causal,
                mask.as_ref(),
                a.softmax_scale,
            )?;
            let Some(lse) = settled(&lse, mask.as_ref())? else { return Ok(None) };
            if b.is_whole(part, fold) {
                return Ok(Some((out.f_transpose(1, 2)?, lse)));
            }
            let (whole_out, whole_lse) = match &results {
                Some(results) => results,
                None => results.insert(if every_row_sees_a_key { unwritten(&p)? } else { without_keys(&p)? }),
            };
            p.query_rows(whole_out, &b, fold)?.f_copy_(&out)?;
            p.lse_rows(whole_lse, &b, fold)?.f_copy_(&lse)?;
        }
    }
    results.map_or_else(|| without_keys(&p), Ok).map(Some)
}

/// Allocates out and softmax_lse of the whole problem.
fn unwritten(p: &Problem) -> Result<(Tensor, Tensor)> {
    let (a, options) = (&p.part.a, (p.kind, Device::Cpu));
    let out = Tensor::f_empty([a.batch, a.seqlen_q, a.nheads, a.headdim], options)?;
    Ok((out, Tensor::f_empty([a.batch, a.nheads, a.seqlen_q], options)?))
}

/// Returns the results of a problem in which no row sees a key.
fn without_keys(p: &Problem) -> Result<(Tensor, Tensor)> {
    let (mut out, mut softmax_lse) = unwritten(p)?;
    Ok((out.f_zero_()?, softmax_lse.f_fill_(f64::INFINITY)?))
}

/// Computes dq, dk and dv with the shapes of q, k and v. `lse` has the type of the arithmetic.
///
/// None if masks would meet scores that are not finite.
pub fn backward(part: &Part, dout: &Tensor, out: &Tensor, lse: &Tensor) -> Result<Option<[Tensor; 3]>> {
    let (p, a) = (Problem::new(part)?, &part.a);
    let blocks = p.blocks();
    if p.has_masks(&blocks) && !p.has_finite_scores()? {
        return Ok(None);
    }
    let (dout, out) = (readable(dout, p.kind)?, readable(out, p.kind)?);
    let mut sums = None;
    for b in blocks {
        let mask = p.mask(&b)?;
        for fold in Fold::all(part) {
            let mask = mask.as_ref().map(|t| fold.mask(t, a.nheads_k)).transpose()?;
            let (dq, dk, dv) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                &p.query_rows(&dout, &b, fold)?,
                &p.query_rows(&p.q, &b, fold)?,
                &p.key_rows(&p.k, &b, fold)?,
                &p.key_rows(&p.v, &b, fold)?,
                &p.query_rows(&out, &b, fold)?,
                &p.lse_rows(lse, &b, fold)?,
                0.0, // dropout_p
                b.is_causal,
                mask.as_ref(),
                a.softmax_scale,
            )?;
            if b.is_whole(part, fold) && b.keys == a.seqlen_k {
                return Ok(Some([dq.f_transpose(1, 2)?, dk.f_transpose(1, 2)?, dv.f_transpose(1, 2)?]));
            }
            let [dq_sum, dk_sum, dv_sum] = match &sums {
                Some(sums) => sums,
                None => sums.insert(zeros(&p)?),
            };
            p.query_rows(dq_sum, &b, fold)?.f_copy_(&dq)?;
            fold.add_keys(&dk_sum.f_narrow(1, b.key, b.keys)?, &dk)?;
            fold.add_keys(&dv_sum.f_narrow(1, b.key, b.keys)?, &dv)?;
        }
    }
    sums.map_or_else(|| zeros(&p), Ok).map(Some)
}

fn zeros(p: &Problem) -> Result<[Tensor; 3]> {
    let zeros = |t: &Tensor| Tensor::f_zeros(t.size(), (p.kind, Device::Cpu));
    Ok([zeros(&p.q)?, zeros(&p.k)?, zeros(&p.v)?])
}
