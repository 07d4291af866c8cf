//! A block mask on the CPU, for chunked.rs: which keys it hides from query rows. Scores are in blocks of 128 queries by 64 keys.
//! - list: names the key blocks that a block of query rows sees, first in part, then in full (format: src/problem/block_mask.rs);
//! - tile: of bits, one for each score of a block seen in part;
//! - group: a KV head of a batch entry with its query heads; [`Chunk`]: some query positions of some groups, with a range of keys.

use super::chunk::{heads_per_group, Chunk};
use crate::error::Result;
use crate::ops::Inputs;
use crate::problem::{Attention, BLOCK_COLUMNS, BLOCK_ROWS, LIST_HEADER, TILE_WORDS};
use std::ops::Range;
use std::rc::Rc;
use tch::Tensor;

const ROWS: usize = BLOCK_ROWS as usize; // query rows of a block
const COLUMNS: usize = BLOCK_COLUMNS as usize; // keys of a block
const HEADER: usize = LIST_HEADER as usize; // numbers of a list before its key blocks
const WORDS: usize = TILE_WORDS as usize; // 32-bit words of a tile
const WORDS_PER_ROW: usize = WORDS / ROWS;

/// A call's block mask: its tensors' values, in the order of memory.
pub struct BlockMask {
    lists: Vec<i32>,
    bits: Vec<i32>, // tile after tile
    /// Entries and heads of the mask (fewer than the call's repeat), row blocks, and numbers of a list.
    sizes: [usize; 4],
}

/// A list: numbers of the key blocks that a block of rows sees in part and in full, both ascending.
struct List<'a> {
    partial: &'a [i32],
    full: &'a [i32],
    /// Bits of the partial blocks, tile after tile.
    bits: &'a [i32],
}

/// A chunk's part of a partial or full block of one query head. Groups, query positions and keys count from the chunk's first.
pub struct PresentBlock {
    pub group: i64,
    /// Number of the query head in its group.
    pub head: i64,
    /// Query positions.
    pub rows: Range<i64>,
    pub keys: Range<i64>,
}

impl BlockMask {
    /// Reads the mask of a call; None: it has none.
    pub fn of(inputs: &Inputs) -> Result<Option<Rc<BlockMask>>> {
        let Some(lists) = &inputs.options.block_lists else { return Ok(None) };
        let values = |t: &Tensor| Ok::<_, crate::error::Error>(Vec::<i32>::try_from(t.f_reshape([-1_i64].as_slice())?)?);
        let (batch, heads, rows, numbers) = lists.size4()?;
        Ok(Some(Rc::new(BlockMask {
            lists: values(lists)?,
            bits: inputs.options.block_bits.as_ref().map(values).transpose()?.unwrap_or_default(),
            sizes: [batch, heads, rows, numbers].map(|n| n as usize),
        })))
    }

    /// Returns the list of a batch entry of the call, a query head and a row block. It begins with the counts of partial and full blocks,
    /// the number of its first tile, and a number for kernels alone; then come the partial blocks, then the full ones.
    fn list(&self, entry: usize, head: usize, row_block: usize) -> List<'_> {
        let [batch, heads, rows, numbers] = self.sizes;
        let at = ((entry % batch * heads + head % heads) * rows + row_block) * numbers;
        let list = &self.lists[at..at + numbers];
        let [partials, fulls, first_tile] = [list[0], list[1], list[2]].map(|n| n as usize);
        let (partial, rest) = list[HEADER..].split_at(partials);
        let bits = if partial.is_empty() { &[][..] } else { &self.bits[first_tile * WORDS..][..partials * WORDS] };
        List { partial, full: &rest[..fulls], bits }
    }

    /// Returns the chunk with only those keys between the first and the last key block of any of its rows; None: no row has one. `first`:
    /// number in the call of the problem's first batch entry.
    pub fn narrowed(&self, a: &Attention, first: i64, c: Chunk) -> Option<Chunk> {
        let heads = heads_per_group(a);
        let row_blocks = c.row as usize / ROWS..=(c.row + c.rows - 1) as usize / ROWS;
        let (mut begin, mut end) = (i64::MAX, 0);
        for (entry, head) in (c.group * heads..(c.group + c.groups) * heads).map(|head| of_head(a, first, head)) {
            for row_block in row_blocks.clone() {
                let List { partial, full, .. } = self.list(entry, head, row_block);
                for &block in partial.iter().chain(full) {
                    begin = begin.min(i64::from(block));
                    end = end.max(i64::from(block) + 1);
                }
            }
        }
        let key = c.key.max(begin.saturating_mul(BLOCK_COLUMNS));
        let end = (c.key + c.keys).min(end * BLOCK_COLUMNS);
        (key < end).then_some(Chunk { key, keys: end - key, ..c })
    }

    /// Returns true for hidden scores of a chunk: (groups or 1, rows, heads of a group or 1, keys), 1 where the mask is broadcast.
    pub fn hidden(&self, a: &Attention, first: i64, c: &Chunk) -> Result<Tensor> {
        let [batch, heads, ..] = self.sizes;
        let per_group = heads_per_group(a);
        let of_group = if heads == 1 { 1 } else { per_group };
        let groups = if (batch, heads) == (1, 1) { 1 } else { c.groups };
        let keys = c.keys as usize;
        let mut hidden = vec![true; (groups * c.rows * of_group) as usize * keys];
        for (i, row) in hidden.chunks_mut(keys).enumerate() {
            let i = i as i64;
            let (group, position) = (c.group + i / (c.rows * of_group), (c.row + i / of_group % c.rows) as usize);
            let (entry, head) = of_head(a, first, group * per_group + i % of_group);
            self.show(&self.list(entry, head, position / ROWS), position % ROWS, c.key as usize, row);
        }
        Ok(Tensor::f_from_slice(&hidden)?.f_view([groups, c.rows, of_group, c.keys])?)
    }

    /// Returns a chunk's parts of partial and full blocks. Its other scores belong to absent blocks.
    pub fn present(&self, a: &Attention, first: i64, c: &Chunk) -> Vec<PresentBlock> {
        let per_group = heads_per_group(a);
        let mut found = Vec::new();
        for i in 0..c.groups * per_group {
            let (entry, head) = of_head(a, first, c.group * per_group + i);
            for row_block in c.row / BLOCK_ROWS..=(c.row + c.rows - 1) / BLOCK_ROWS {
                let rows = part_of_block(row_block, BLOCK_ROWS, c.row, c.rows);
                let List { partial, full, .. } = self.list(entry, head, row_block as usize);
                for &block in partial.iter().chain(full) {
                    let keys = part_of_block(i64::from(block), BLOCK_COLUMNS, c.key, c.keys);
                    if !keys.is_empty() {
                        found.push(PresentBlock { group: i / per_group, head: i % per_group, rows: rows.clone(), keys });
                    }
                }
            }
        }
        found
    }

    /// Sets `hidden` to false where row `row` of a row block sees a key. `key`: number of the first key of `hidden`.
    fn show(&self, list: &List<'_>, row: usize, key: usize, hidden: &mut [bool]) {
        let end = key + hidden.len();
        let seen = |block: i32| (block as usize * COLUMNS).max(key)..((block as usize + 1) * COLUMNS).min(end);
        for &block in list.full {
            seen(block).for_each(|i| hidden[i - key] = false);
        }
        for (&block, tile) in list.partial.iter().zip(list.bits.chunks_exact(WORDS)) {
            let words = &tile[row * WORDS_PER_ROW..][..WORDS_PER_ROW];
            seen(block).for_each(|i| hidden[i - key] = words[i % COLUMNS / 32] >> (i % 32) & 1 == 0);
        }
    }
}

/// Returns the batch entry of the call, and the query head in it, of a query head counted over all entries of the problem.
fn of_head(a: &Attention, first: i64, head: i64) -> (usize, usize) {
    ((first + head / a.nheads) as usize, (head % a.nheads) as usize)
}

/// Returns which of the `count` positions from `first` on belong to a block, counted from `first`. `block`: its number, `size`: of a block.
fn part_of_block(block: i64, size: i64, first: i64, count: i64) -> Range<i64> {
    (block * size - first).max(0)..((block + 1) * size - first).min(count)
}
