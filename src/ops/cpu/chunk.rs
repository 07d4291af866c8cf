//! How a problem is cut.

use crate::problem::Attention;

/// Score rows of a group that a chunk takes when memory allows: each element of K and V that the matrix
/// products load is used this often. From 128 up, a product of this shape runs at the speed of a large one.
const CHUNK_ROWS: i64 = 128;
/// The fewest rows of a chunk, at any length: below, the products degrade to matrix-vector speed.
pub const MIN_CHUNK_ROWS: i64 = 16;
/// Scores of a chunk: 2^20 fp32 scores are 4 MiB, the caches (L2 of the cores together, or a share of
/// the L3) of the machines that this runs on. Four passes read them back after the product wrote them.
pub const CHUNK_SCORES: i64 = 1 << 20;

/// Some query positions of some groups, against every key that any of these rows sees.
///
/// A chunk has at most `max(CHUNK_SCORES, seqlen_k * max(MIN_CHUNK_ROWS, heads per group))` scores, so
/// the buffers that hold them are O(seqlen).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// the first group, counted over batch entries and their key heads
    pub group: i64,
    /// so many groups, one after the other
    pub groups: i64,
    /// the first query position
    pub row: i64,
    /// so many positions, each a score row for every query head of a group
    pub rows: i64,
    /// the first key
    pub key: i64,
    /// so many keys
    pub keys: i64,
}

/// The window as offsets from the row index: row `i` sees the keys `i + first ..= i + last`.
pub(super) fn window_offsets(a: &Attention) -> (i64, i64) {
    let offset = a.seqlen_k - a.seqlen_q;
    // no bound is wider than this; clamping keeps a user's i64::MAX from overflowing
    let reach = a.seqlen_q + a.seqlen_k;
    let clamp = |bound: Option<i64>| bound.map_or(reach, |w| w.min(reach));
    (offset - clamp(a.window.left), offset + clamp(a.window.right))
}

/// Query heads of a group.
pub(super) fn heads_per_group(a: &Attention) -> i64 {
    if a.nheads_k == 0 {
        1
    } else {
        a.nheads / a.nheads_k
    }
}

/// Cut the problem into chunks. Rows without any key are in none of them.
pub fn chunks(a: &Attention) -> Vec<Chunk> {
    let groups = a.batch * a.nheads_k;
    let heads = heads_per_group(a).max(1);
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
