//! Rules of sequence lengths: cu_seqlens (offsets of packed sequences, one after the other), max_seqlen (the longest of them) and seqused_k
//! (keys of a sequence that count). src/ops/ passes values too if it has copied them to the host. Unknown sizes pass.

use super::attention::{Attention, Queries};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::operands::{Packing, Sizes}; // Packing: whether tensors are packed, and the argument that decides it
use super::tensor::{Backend, DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{MAX_GIVEN_SEQLEN, MAX_SEQUENCES}; // 2^31 - 1 and 2^25
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Batch size and longest sequences of a call.
pub struct Lengths {
    pub batch: i64,
    /// Queries of the longest one.
    pub longest_q: i64,
    /// Keys of the longest one.
    pub longest_k: i64,
}

/// Checks an int32 vector, cu_seqlens or seqused_k. `what`: its shape. `count`: its size, if another argument decides it.
pub fn check_lengths_vector(name: &str, d: &TensorDesc, q: &TensorDesc, count: Option<i64>, what: &str) -> Result<()> {
    check_dtype(name, d, DType::Int32)?;
    let wrong = |found: i64| count.map_or(found != UNKNOWN && found < 1, |n| !same_size(found, n));
    if d.sizes.len() != 1 || wrong(d.sizes[0]) {
        let n = count.map_or(String::new(), |n| format!(", here ({},)", number(n)));
        return Err(Error::value(name, shape(d), format!("shape {what}{n}")));
    }
    reject_if!(d.sizes[0] > 1 && !same_size(d.strides[0], 1), name, format!("stride {}", d.strides[0]), "a contiguous tensor");
    check_device(name, d, q)
}

/// Returns the number of sequences that a vector of cu_seqlens has.
fn sequences(name: &str, cu: &TensorDesc) -> Result<i64> {
    let batch = if cu.sizes[0] == UNKNOWN { UNKNOWN } else { cu.sizes[0] - 1 };
    reject_if!(batch > MAX_SEQUENCES, name, shape(cu), format!("at most {MAX_SEQUENCES} sequences"));
    Ok(batch)
}

/// Rejects rows without a sequence: with batch 0 no values of cu_seqlens can be right.
fn check_rows_belong(name: &str, cu: &TensorDesc, batch: i64, rows: i64) -> Result<()> {
    if batch == 0 && rows > 0 {
        let allowed = format!("shape (batch + 1,) of one sequence or more, to which the {rows} rows belong");
        return Err(Error::value(name, shape(cu), allowed));
    }
    Ok(())
}

/// Checks max_seqlen_q or max_seqlen_k of packed tensors. `since`: the argument that makes them packed.
fn check_longest(name: &str, given: Option<i64>, rows: i64, since: &str, backend: Backend) -> Result<i64> {
    match given {
        None => Err(Error::value(name, "None", format!("the length of the longest sequence, since {since} is given"))),
        Some(UNKNOWN) if backend == Backend::Meta => Ok(UNKNOWN),
        Some(n) if !(0..=MAX_GIVEN_SEQLEN).contains(&n) => Err(Error::value(name, n, format!("a length from 0 to {MAX_GIVEN_SEQLEN}"))),
        Some(0) if rows > 0 => Err(Error::value(name, 0, format!("the length of the longest sequence, at least 1: there are {rows} rows"))),
        Some(n) => Ok(n),
    }
}

/// Rejects max_seqlen beside dense tensors. `missing`: the argument that would make them packed.
fn check_no_longest(name: &str, given: Option<i64>, missing: &str) -> Result<()> {
    match given {
        None => Ok(()),
        Some(n) => Err(Error::value(name, number(n), format!("None, since {missing} is not given"))),
    }
}

/// Checks lengths of queries and of keys that are dense or packed with them. `qs`, `ks`: sizes of q and k; rows of all sequences if packed.
pub fn check(q: &TensorDesc, o: &Options, packing: Packing<'_>, [qs, ks]: [&Sizes; 2], backend: Backend) -> Result<Lengths> {
    if !packing.is_packed() {
        check_no_longest("max_seqlen_q", o.max_seqlen_q, "cu_seqlens_q")?;
        check_no_longest("max_seqlen_k", o.max_seqlen_k, "cu_seqlens_k")?;
        return Ok(Lengths { batch: qs.batch, longest_q: qs.rows, longest_k: ks.rows });
    }
    let both = "a tensor, since the other of cu_seqlens_q and cu_seqlens_k is given";
    let cu_q = o.cu_seqlens_q.as_ref().ok_or_else(|| Error::value("cu_seqlens_q", "None", both))?;
    let cu_k = o.cu_seqlens_k.as_ref().ok_or_else(|| Error::value("cu_seqlens_k", "None", both))?;
    check_lengths_vector("cu_seqlens_q", cu_q, q, None, "(batch + 1,)")?;
    check_lengths_vector("cu_seqlens_k", cu_k, q, Some(cu_q.sizes[0]), "(batch + 1,), that of cu_seqlens_q")?;
    let batch = sequences("cu_seqlens_q", cu_q)?;
    check_rows_belong("cu_seqlens_q", cu_q, batch, qs.rows)?;
    check_rows_belong("cu_seqlens_k", cu_k, batch, ks.rows)?;
    Ok(Lengths {
        batch,
        longest_q: check_longest("max_seqlen_q", o.max_seqlen_q, qs.rows, "cu_seqlens_q", backend)?,
        longest_k: check_longest("max_seqlen_k", o.max_seqlen_k, ks.rows, "cu_seqlens_k", backend)?,
    })
}

/// Checks lengths of queries beside a cache. Returns batch size, queries of the longest sequence, and storage of q.
pub fn check_queries(q: &TensorDesc, o: &Options, qs: &Sizes, backend: Backend) -> Result<(i64, i64, Queries)> {
    let Some(cu) = &o.cu_seqlens_q else {
        check_no_longest("max_seqlen_q", o.max_seqlen_q, "cu_seqlens_q")?;
        check_at_most("q", "batch", qs.batch, MAX_SEQUENCES)?;
        return Ok((qs.batch, qs.rows, Queries::Dense));
    };
    check_lengths_vector("cu_seqlens_q", cu, q, None, "(batch + 1,)")?;
    let batch = sequences("cu_seqlens_q", cu)?;
    check_rows_belong("cu_seqlens_q", cu, batch, qs.rows)?;
    let longest = check_longest("max_seqlen_q", o.max_seqlen_q, qs.rows, "cu_seqlens_q", backend)?;
    Ok((batch, longest.min(qs.rows), Queries::Packed { total: qs.rows }))
}

/// Checks the values of cu_seqlens for `total` rows in sequences of at most `longest`, the value of `longest_name`.
pub fn check_cu_seqlens_values(name: &str, cu: &[i32], total: i64, longest_name: &str, longest: i64) -> Result<()> {
    reject_if!(cu[0] != 0, name, format!("{} as its first value", cu[0]), "0");
    if let Some(i) = (1..cu.len()).find(|&i| cu[i] < cu[i - 1]) {
        return Err(Error::value(name, format!("{} after {} (entry {i})", cu[i], cu[i - 1]), "values that never descend"));
    }
    if i64::from(cu[cu.len() - 1]) != total {
        return Err(Error::value(name, format!("{} as its last value", cu[cu.len() - 1]), format!("{total}, the number of rows")));
    }
    if let Some(i) = (1..cu.len()).find(|&i| i64::from(cu[i] - cu[i - 1]) > longest) {
        return Err(Error::value(longest_name, longest, format!("at least {}, the length of sequence {}", cu[i] - cu[i - 1], i - 1)));
    }
    Ok(())
}

/// Checks the values in the length tensors of `fwd` and `bwd`: cu_seqlens_q, cu_seqlens_k and seqused_k.
pub fn validate_lengths(a: &Attention, cu_q: Option<&[i32]>, cu_k: Option<&[i32]>, seqused_k: Option<&[i32]>) -> Result<()> {
    if let (Some(cu), Some(total)) = (cu_q, a.total_q()) {
        check_cu_seqlens_values("cu_seqlens_q", cu, total, "max_seqlen_q", a.seqlen_q)?;
    }
    if let (Some(cu), Some(total)) = (cu_k, a.total_k()) {
        check_cu_seqlens_values("cu_seqlens_k", cu, total, "max_seqlen_k", a.seqlen_k)?;
    }
    for (b, &n) in seqused_k.unwrap_or_default().iter().enumerate() {
        let stored = cu_k.map_or(a.seqlen_k, |cu| i64::from(cu[b + 1] - cu[b]));
        reject_if!(!(0..=stored).contains(&i64::from(n)), "seqused_k", format!("{n} (entry {b})"), format!("a length from 0 to {stored}"));
    }
    Ok(())
}
