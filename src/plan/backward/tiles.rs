//! Divides P and dS of a backward pass for large headdims into tiles and launches.

use crate::limits::MAX_GRID_YZ;
use crate::problem::Attention;

/// Keys, and queries, of a tile of stored scores; rows, and columns, of a tile of gradients (csrc/backward/stored_scores.cuh).
pub const STORED_ROWS: i64 = 128;
/// Tiles of P and of dS in 128 MiB, as sums of two numbers in 256 MiB ([`MOST_TIMES`]: to 1 GiB). At headdim 256 half as many leave a fifth
/// of the last wave's places empty.
const MAX_TILES: i64 = 2048;
/// Blocks of gradients of a launch that fill a GPU four times: with fewer, the longest blocks of a launch leave others idle.
const FULL_BLOCKS: i64 = 640;
/// Launches of fp32 tensors with fewer blocks have up to this many times [`MAX_TILES`].
const MOST_TIMES: i64 = 4;
/// Key tiles of a launch that fill a GPU. With fewer, the blocks of dK and dV are few and long.
const FULL_KEY_TILES: i64 = 16;

/// Tiles of P and dS of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPlan {
    /// Batch entries of a launch.
    pub batches: i64,
    /// KV heads of a launch.
    pub heads: i64,
    /// Key tiles of a launch.
    pub key_tiles: i64,
    /// Launches for all keys of a head. Sums of dq stay in memory between them.
    pub key_launches: i64,
    /// Query tiles of a head in an entry, or of all sequences if packed.
    pub query_tiles: i64,
    /// Column tiles of dq.
    pub columns: i64,
    /// Tensors are fp32, and their numbers sums of two fp16 numbers.
    pub split: bool,
}

/// Returns the tiles that these rows, or columns, need.
pub(super) fn tiles(rows: i64) -> i64 {
    (rows as u64).div_ceil(STORED_ROWS as u64) as i64
}

/// Divides `n` evenly into the fewest parts of at most `most` (at least 1), and returns the size of the largest part.
fn even(n: i64, most: i64) -> i64 {
    let parts = (n as u64).div_ceil(most.max(1) as u64);
    (n as u64).div_ceil(parts) as i64
}

impl StoredPlan {
    pub(super) fn new(a: &Attention, split: bool) -> StoredPlan {
        let of = |more| StoredPlan::of_most(a, split, more * MAX_TILES);
        if !split {
            return of(1);
        }
        let fills = |plan: &StoredPlan| plan.batches.min(a.batch) * plan.heads * plan.blocks_of_head(a) >= FULL_BLOCKS;
        [1, 2].map(of).into_iter().find(fills).unwrap_or_else(|| of(MOST_TIMES))
    }

    /// Returns the blocks of a KV head's gradients in a launch.
    pub(super) fn blocks_of_head(&self, a: &Attention) -> i64 {
        self.key_tiles * (self.columns + tiles(a.headdim_v)) + a.nheads / a.nheads_k * tiles(a.seqlen_q) * self.columns
    }

    fn of_most(a: &Attention, split: bool, max_tiles: i64) -> StoredPlan {
        // packed: the first tile of sequence i is number q_offset / 128 + i (first_stored_tile)
        let query_tiles = a.total_q().map_or(tiles(a.seqlen_q), |total| total / STORED_ROWS + a.batch + 1);
        let of_entry = a.nheads / a.nheads_k * query_tiles;
        let all_keys = tiles(a.seqlen_k);
        // All keys of some heads, because sums of dq cost memory traffic. If one head has too many tiles, some of its keys.
        let batches = match a.total_q() {
            Some(_) => MAX_GRID_YZ,
            None => even(a.batch, MAX_GRID_YZ.min(max_tiles / (of_entry * all_keys))),
        };
        let of_launch = of_entry * if a.total_q().is_some() { 1 } else { batches };
        let heads = even(a.nheads_k, max_tiles / (of_launch * all_keys));
        let key_tiles = if of_launch * all_keys <= max_tiles { all_keys } else { even(all_keys, max_tiles / of_launch) };
        let key_launches = (all_keys as u64).div_ceil(key_tiles as u64) as i64;
        StoredPlan { batches, heads, key_tiles, key_launches, query_tiles, columns: tiles(a.headdim), split }
    }

    /// Returns the rows, of [`STORED_ROWS`] fp16 numbers, of a tile (`kStoredTile` in csrc/backward/stored_scores.cuh).
    pub fn tile_rows(&self) -> i64 {
        if self.split {
            2 * STORED_ROWS + 1
        } else {
            STORED_ROWS
        }
    }

    /// Returns true if each launch fills a GPU, as far as the problem does.
    pub(super) fn fills_launches(&self) -> bool {
        self.key_launches == 1 || self.key_tiles >= FULL_KEY_TILES
    }

    /// Returns (first KV head, first key tile) of each launch for `nheads_k` heads.
    pub fn launches(self, nheads_k: i64) -> impl Iterator<Item = (i64, i64)> {
        let heads = (0..nheads_k).step_by(self.heads as usize);
        heads.flat_map(move |head| (0..self.key_launches).map(move |launch| (head, launch * self.key_tiles)))
    }
}
