//! Validates the values of a KV-cache call's int32 tensors (lengths, entries, pages), where src/ops/kvcache/mod.rs has copied them to the
//! host: on the CPU backend always, else if the call or the environment asks for it. Otherwise kernels write NaN as the output of sequences
//! with invalid values, and access nothing outside the tensors.

use super::attention::{Attention, Cache, CacheLayout, Window};
use super::lengths::check_cu_seqlens_values;
use crate::error::{Error, Result};

/// Values of a call's int32 tensors, as far as read; None: not given. cu_seqlens have batch + 1 numbers, fields without a comment batch.
#[derive(Clone, Debug, Default)]
pub struct CacheValues {
    pub cache_seqlens: Option<Vec<i32>>,
    pub cu_seqlens_q: Option<Vec<i32>>,
    pub cu_seqlens_k_new: Option<Vec<i32>>,
    /// (batch, max_pages), row-major.
    pub block_table: Option<Vec<i32>>,
    pub cache_batch_idx: Option<Vec<i32>>,
    pub leftpad_k: Option<Vec<i32>>,
}

/// Validated lengths of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedSequence {
    pub seqlen_q: i64,
    /// Tokens that the call appends.
    pub seqlen_new: i64,
    /// Tokens in the cache before the append, leftpad included.
    pub cached: i64,
    /// Padding tokens at the start of the entry (`leftpad_k`).
    pub leftpad: i64,
}

impl CachedSequence {
    /// Returns the number of keys after the append, leftpad excluded.
    pub fn seqlen_k(&self) -> i64 {
        self.cached + self.seqlen_new - self.leftpad
    }

    /// Returns the range [first, end) of positions, from the first that a query sees to the last token, appended ones included. A
    /// right window does not shorten it. Pages outside it need not exist: servers free pages that a sliding window has passed.
    pub fn visible(&self, window: Window) -> (i64, i64) {
        let end = self.cached + self.seqlen_new;
        if self.seqlen_q == 0 {
            return (end, end);
        }
        let first = window.left.map_or(0, |left| (end - self.seqlen_q).saturating_sub(left));
        (first.max(self.leftpad).min(end), end)
    }
}

/// Checks the values in a call's int32 tensors and returns the lengths of each sequence.
pub fn validate_kvcache_values(a: &Attention, values: &CacheValues) -> Result<Vec<CachedSequence>> {
    let Some(cache) = a.cache() else { return Ok(Vec::new()) };
    if let (Some(cu), Some(total)) = (&values.cu_seqlens_q, a.total_q()) {
        check_cu_seqlens_values("cu_seqlens_q", cu, total, "max_seqlen_q", a.seqlen_q)?;
    }
    if let (Some(cu), Some(total)) = (&values.cu_seqlens_k_new, a.appended.total) {
        check_cu_seqlens_values("cu_seqlens_k_new", cu, total, "k", total)?;
    }
    (0..a.batch as usize)
        .map(|b| {
            let sequence = lengths(a, values, b)?;
            check_rotary_positions(a, &sequence, b)?;
            check_entry(a, cache, values, b)?;
            check_pages(a, cache, values, &sequence, b)?;
            Ok(sequence)
        })
        .collect()
}

/// Returns element `b`, that of sequence `b`; `default` without a tensor.
fn value_at(t: &Option<Vec<i32>>, b: usize, default: i64) -> i64 {
    t.as_ref().map_or(default, |t| i64::from(t[b]))
}

/// Checks and returns the lengths of sequence `b`.
fn lengths(a: &Attention, values: &CacheValues, b: usize) -> Result<CachedSequence> {
    let length = |cu: &Option<Vec<i32>>, dense: i64| cu.as_ref().map_or(dense, |cu| i64::from(cu[b + 1] - cu[b]));
    let is_packed_as_q = a.appended.total.is_some() && values.cu_seqlens_k_new.is_none();
    let cu_new = if is_packed_as_q { &values.cu_seqlens_q } else { &values.cu_seqlens_k_new };
    let (seqlen_q, seqlen_new) = (length(&values.cu_seqlens_q, a.seqlen_q), length(cu_new, a.appended.seqlen));
    let cached = value_at(&values.cache_seqlens, b, a.seqlen_k);
    // most tokens that can be cached before the append
    let room = a.seqlen_k - seqlen_new;
    if !(0..=room).contains(&cached) {
        let room_for_new = match seqlen_new {
            0 => String::new(),
            _ => format!(", after which {seqlen_new} more fit into {}", a.seqlen_k),
        };
        let remedy = match a.cache().map(|cache| cache.layout) {
            Some(CacheLayout::Pages { .. }) => ": longer sequences need more columns in block_table",
            _ => "",
        };
        let allowed = format!("a length from 0 to {room}{room_for_new}{remedy}");
        return Err(Error::value("cache_seqlens", format!("{cached} (sequence {b})"), allowed));
    }
    let leftpad = value_at(&values.leftpad_k, b, 0);
    if !(0..=cached).contains(&leftpad) {
        let allowed = format!("a number from 0 to {cached}, the cached tokens of the sequence");
        return Err(Error::value("leftpad_k", format!("{leftpad} (sequence {b})"), allowed));
    }
    Ok(CachedSequence { seqlen_q, seqlen_new, cached, leftpad })
}

fn check_rotary_positions(a: &Attention, s: &CachedSequence, b: usize) -> Result<()> {
    let rotary = a.appended.rotary;
    // without a mask all queries rotate at the first position
    let of_queries = if a.queries_have_positions() { s.seqlen_q } else { s.seqlen_q.min(1) };
    let positions = s.cached + s.seqlen_new.max(of_queries);
    if rotary.dim > 0 && positions > rotary.rows {
        let given = format!("{} positions", rotary.rows);
        return Err(Error::value("rotary_cos", given, format!("at least {positions}, which sequence {b} reaches")));
    }
    Ok(())
}

fn check_entry(a: &Attention, cache: &Cache, values: &CacheValues, b: usize) -> Result<()> {
    let entry = value_at(&values.cache_batch_idx, b, b as i64);
    if cache.layout == CacheLayout::Entries && !(0..cache.entries).contains(&entry) {
        let allowed = format!("a number below {}, the entries of {}", cache.entries, a.key_names()[0]);
        return Err(Error::value("cache_batch_idx", format!("{entry} (sequence {b})"), allowed));
    }
    Ok(())
}

/// Checks the pages that a sequence reads and those that it writes. `cache.rows` is the page size.
fn check_pages(a: &Attention, cache: &Cache, values: &CacheValues, s: &CachedSequence, b: usize) -> Result<()> {
    let (Some(table), CacheLayout::Pages { max_pages }) = (&values.block_table, cache.layout) else { return Ok(()) };
    for (first, end) in [s.visible(a.window), (s.cached, s.cached + s.seqlen_new)] {
        let pages = first / cache.rows..(end + cache.rows - 1) / cache.rows;
        for i in pages.filter(|_| first < end) {
            let page = table[b * max_pages as usize + i as usize];
            if !(0..cache.entries).contains(&i64::from(page)) {
                let allowed = format!("a number below {}, the pages of {}", cache.entries, a.key_names()[0]);
                return Err(Error::value("block_table", format!("{page} (page {i} of sequence {b})"), allowed));
            }
        }
    }
    Ok(())
}
