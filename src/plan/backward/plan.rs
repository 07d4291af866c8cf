//! The plan of a backward pass: mod.rs returns it, src/ops/device.rs launches it. P are probabilities, dS gradients of scores. Where both
//! are stored, for large headdims or fp32, [`StoredPlan`] divides them into tiles and launches, so that memory stays bounded.

use crate::kernels::{Scratch, Variant};
use crate::limits::MAX_GRID_YZ; // 65535
use crate::plan::kernel::{chunks, rounded, scratch, PlannedKernel};
use crate::problem::Attention;

/// The kernels of a backward pass, launched in this order, and the scratch memory that they share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardPlan {
    /// Computes row statistics from out, dout and softmax_lse, and zeroes dq's accumulators. None: `main` computes everything.
    pub preprocess: Option<PlannedKernel>,
    /// Computes dk and dv, and adds to dq's accumulators if there are any, in `main_launches` launches of this grid. With `stored`:
    /// computes P (probabilities) and dS (gradients of scores).
    pub main: PlannedKernel,
    /// Computes dq, from its accumulators if there are any; with `stored`, all gradients. None: `main` computes everything.
    pub postprocess: Option<PlannedKernel>,
    /// Whether each sum has a fixed order: by request, by tuning (measured choices of kernels), or because the kernels have no atomics.
    pub deterministic: bool,
    /// Launches of `main`, each for the next key blocks (keys of one block) of every head.
    pub main_launches: u32,
    /// Launch for the last keys of every head, if large blocks would need another wave for them.
    pub tail: Option<Tail>,
    /// Accumulators of dq. 0: `postprocess` computes dq without one, or `main` computes everything.
    pub dq_accum_splits: u32,
    /// Layout of the row statistics, which `preprocess` leaves in scratch memory.
    pub scratch: Scratch,
    /// Rows of an entry in dq's accumulators and in the row statistics; rows of all entries if packed.
    pub scratch_rows: i64,
    /// Columns of dq's accumulators; 0 without accumulators.
    pub headdim_rounded: i64,
    /// Memory between `main` and `postprocess` for large headdims or fp32, where each launch of `main` precedes one of `postprocess`.
    pub stored: Option<StoredPlan>,
}

impl BackwardPlan {
    /// Returns a plan of one kernel that computes everything, without atomics.
    pub(super) fn new(main: PlannedKernel, a: &Attention) -> BackwardPlan {
        BackwardPlan {
            preprocess: None,
            main,
            postprocess: None,
            deterministic: true,
            main_launches: 1,
            tail: None,
            dq_accum_splits: 0,
            scratch: scratch(main.variant),
            scratch_rows: scratch_rows(main.variant, a),
            headdim_rounded: 0,
            stored: None,
        }
    }

    /// Returns (first batch entry, number of entries) of each part of the batch; a part has its own launches of all kernels.
    pub fn batch_chunks(&self, batch: i64) -> impl Iterator<Item = (i64, i64)> {
        chunks(batch, self.stored.map_or(MAX_GRID_YZ, |s| s.batches))
    }

    /// Returns the most batch entries of a launch.
    pub fn launch_entries(&self, batch: i64) -> i64 {
        self.batch_chunks(batch).map(|(_, n)| n).max().unwrap_or(0)
    }

    /// Returns the launches of `main` in all parts of the batch.
    pub fn all_main_launches(&self, batch: i64) -> i64 {
        self.batch_chunks(batch).count() as i64 * i64::from(self.main_launches)
    }

    /// Returns all kernels in the order of their launches.
    pub fn kernels(&self) -> impl Iterator<Item = PlannedKernel> {
        [self.preprocess, Some(self.main), self.tail.map(|tail| tail.kernel), self.postprocess].into_iter().flatten()
    }
}

/// A last launch of the main kernel with smaller blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Kernel on a grid of the remaining key blocks.
    pub kernel: PlannedKernel,
    /// Number of its first key block, in units of its own block size.
    pub first_block: u32,
}

/// Returns the query rows of an entry in the scratch memory, or of all entries.
fn scratch_rows(v: &Variant, a: &Attention) -> i64 {
    let multiple = scratch(v).row_rounding;
    // A packed sequence begins at (its first row + its number * row_rounding), rounded down to a multiple (csrc/backward/scratch.cuh). So
    // each has room for its own rounding.
    a.total_q().map_or(rounded(a.seqlen_q, multiple), |total| rounded(total + a.batch * i64::from(multiple), multiple))
}

/// Keys, and queries, of a tile of stored scores; rows, and columns, of a tile of gradients (csrc/backward/stored_scores.cuh).
pub const STORED_ROWS: i64 = 128;
/// Most tiles of a launch, unless one key tile needs more. P and dS take 128 MiB then. Of fp32 tensors, whose numbers are sums of two with
/// a row of units (scales), they take 257 MiB (with [`MAX_GROWTH`] up to 1,028 MiB). With half as many tiles, blocks of headdim 256 leave
/// a fifth of the last wave (as many blocks as a GPU runs at once) empty.
const MAX_TILES: i64 = 2048;
/// Fewest blocks of gradients in a launch of fp32 tensors: four waves of a V100 (80 SMs with two blocks each). In a launch of fewer, most
/// of the GPU idles until the longest block ends.
const MIN_GRADIENT_BLOCKS: i64 = 640;
/// Launches of fp32 tensors with fewer than [`MIN_GRADIENT_BLOCKS`] may have twice [`MAX_TILES`], or this many times as many.
const MAX_GROWTH: i64 = 4;
/// Key tiles of a launch that fill a GPU. With fewer, the blocks that sum dk and dv are few and long.
const FULL_KEY_TILES: i64 = 16;

/// Tiles of P and dS (128 keys by 128 queries of a query head) of one launch. A launch has some batch entries, some of their KV heads, and
/// of these heads some keys with all queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPlan {
    /// Batch entries of a launch.
    pub batches: i64,
    /// KV heads of a launch, with the query heads of their groups.
    pub heads: i64,
    /// Key tiles of a launch, for each of its heads.
    pub key_tiles: i64,
    /// Launches for all keys of a head. Sums of dq stay in memory between them.
    pub key_launches: i64,
    /// Query tiles of a head in an entry, or of all sequences if packed.
    pub query_tiles: i64,
    /// Columns of dq, in tiles of 128.
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
    /// Returns the plan of a problem. `split`: its tensors are fp32, and launches may be larger to fill the GPU.
    pub(super) fn new(a: &Attention, split: bool) -> StoredPlan {
        let grown = |times| StoredPlan::with_tiles(a, split, times * MAX_TILES);
        if !split {
            return grown(1);
        }
        let fills = |plan: &StoredPlan| plan.batches.min(a.batch) * plan.heads * plan.blocks_of_head(a) >= MIN_GRADIENT_BLOCKS;
        [1, 2].map(grown).into_iter().find(fills).unwrap_or_else(|| grown(MAX_GROWTH))
    }

    /// Returns the blocks of a KV head's gradients in a launch.
    pub(super) fn blocks_of_head(&self, a: &Attention) -> i64 {
        self.key_tiles * (self.columns + tiles(a.headdim_v)) + a.nheads / a.nheads_k * tiles(a.seqlen_q) * self.columns
    }

    /// Returns the plan whose launches have at most `max_tiles` tiles, or one key tile of one KV head.
    fn with_tiles(a: &Attention, split: bool, max_tiles: i64) -> StoredPlan {
        // packed: the first tile of sequence i is number (its first row) / 128 + i (first_stored_tile in csrc/backward/stored_scores.cuh)
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
        STORED_ROWS + if self.split { STORED_ROWS + 1 } else { 0 } // low parts, and a row of units
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
