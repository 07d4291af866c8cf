//! Cuts a problem into chunks, the parts that the CPU backend (chunked.rs) computes one after the other. A group is one KV head of one
//! batch entry, with the query heads that read it. A score row is one query position of one query head.

use crate::problem::Attention;

/// Maximum score rows of each group in a chunk, except that a chunk has at least one query position, of all heads of the group. Matrix
/// products use each loaded element of K and V once per row, and with more than 128 rows are no faster.
const CHUNK_ROWS: i64 = 128;
/// Minimum score rows of each group in a chunk, rounded down to whole query positions (at least one), unless the problem has fewer. It
/// holds even if the scores then exceed [`CHUNK_SCORES`]. With fewer rows, products degrade to matrix-vector speed.
pub const MIN_CHUNK_ROWS: i64 = 16;
/// Maximum scores of a chunk, where the limits above allow it: 2^20 fp32 scores are 4 MiB and fit a CPU's caches (L2 of all cores, or a
/// part of L3). Four passes read them again after the product.
pub const CHUNK_SCORES: i64 = 1 << 20;

/// Query positions of some groups, and all keys that any of these rows sees.
///
/// A chunk has at most `max(CHUNK_SCORES, seqlen_k * max(MIN_CHUNK_ROWS, heads per group))` scores, so buffers for them are O(seqlen).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// First group, counted over batch entries and their KV heads.
    pub group: i64,
    pub groups: i64, // number of them
    /// First query position.
    pub row: i64,
    /// Number of query positions. Each has a score row per query head of a group.
    pub rows: i64,
    /// First key.
    pub key: i64,
    pub keys: i64, // number of them
}

/// Returns the window as offsets (first, last) from the query position: query `i` sees the keys `i + first ..= i + last`.
pub(super) fn window_offsets(a: &Attention) -> (i64, i64) {
    let offset = a.seqlen_k - a.seqlen_q;
    // clamps to the widest useful bound, so that i64::MAX does not overflow
    let reach = a.seqlen_q + a.seqlen_k;
    let clamp = |bound: Option<i64>| bound.map_or(reach, |w| w.min(reach));
    (offset - clamp(a.window.left), offset + clamp(a.window.right))
}

/// Returns the query heads of a group; 1 if there are none.
pub(super) fn heads_per_group(a: &Attention) -> i64 {
    a.group().max(1)
}

/// Cuts the problem into chunks. Omits chunks whose rows all see no key.
pub fn chunks(a: &Attention) -> Vec<Chunk> {
    let groups = a.batch * a.nheads_k;
    let heads = heads_per_group(a);
    let (first, last) = window_offsets(a);
    let most_rows = (CHUNK_ROWS / heads).max(1);
    let most_keys = a.seqlen_k.min(last - first + most_rows).max(1);
    let min_rows = (MIN_CHUNK_ROWS / heads).clamp(1, most_rows);
    let rows = (CHUNK_SCORES / (heads * most_keys)).clamp(min_rows, most_rows);
    let most_groups = (CHUNK_SCORES / (rows.min(a.seqlen_q).max(1) * heads * most_keys)).max(1);

    let mut chunks = Vec::new();
    for group in (0..groups).step_by(most_groups as usize) {
        for row in (0..a.seqlen_q).step_by(rows as usize) {
            let rows = rows.min(a.seqlen_q - row);
            let key = (row + first).max(0);
            let end = (row + rows + last).min(a.seqlen_k);
            if key < end {
                chunks.push(Chunk { group, groups: most_groups.min(groups - group), row, rows, key, keys: end - key });
            }
        }
    }
    chunks
}
