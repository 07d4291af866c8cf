//! Stream-K grids of the forward pass: which splits (TileSplit, csrc/forward/tile_split.cuh) blocks take, and in which order they start.
//! forward.rs asks whether such a grid pays; src/ops/stream_k.rs takes the schedule to the kernel.
//!
//! A tile is the query rows of one block; an iteration is a step of the block's keys. Resident blocks are those that the GPU holds at once.
//! A grid of R equal tiles takes R / resident_blocks waves, and the last wave may leave most of the GPU idle. A stream-K grid computes only
//! full waves with one block per tile. It divides the keys of the other tiles evenly among the resident blocks, into shares; a share's part
//! of one tile is a split, and a block. GPUs start blocks in the grid's order, each on the first free slot.
//!
//! Times are in keys: 1 is the time in which a block computes one key. Tests: tests/test_stream_k.py.

use crate::limits::MAX_STREAM_K_SPLITS; // 440
use crate::params::{FwdStreamKParams, StreamKSplit};
use std::cmp::Reverse;

/// Time to load queries and write a result, in keys: 12 to 18 thousand cycles at headdims 64 and 128, whose keys take 79 and 164 cycles.
/// fp32 at headdim 512 takes the same constants.
const FIXED_KEYS: u32 = 160;
/// Time that the combining block needs per split, in keys: 2 to 5 thousand cycles.
const COMBINE_KEYS: u32 = 30;
/// Time of a block alone on its SM, percent of that of one of two co-resident blocks. Per iteration it is 75 at headdims 64 and 128.
const ALONE_PERCENT: u64 = 80;
/// Maximum splits of a tile, because one block reads the results of all.
const MAX_SPLITS_PER_TILE: u32 = 16;
const _: () = assert!(size_of::<FwdStreamKParams>() <= 4096, "kernel parameters have at most 4096 bytes");
/// Estimated time of a stream-K grid, percent of that of one block per tile, from which it is not taken, because estimates are inexact.
const PAYING_PERCENT: u64 = 96;

/// Returns true if a stream-K grid, which takes `time`, is enough faster than one block per tile, which takes `undivided`.
pub(super) fn pays(time: u64, undivided: u64) -> bool {
    time * 100 < undivided * PAYING_PERCENT
}

/// How a grid of row tiles with equal iterations is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamKPlan {
    /// Blocks that the GPU holds at once.
    pub resident_blocks: u32,
    /// Tiles that one block computes: full waves.
    pub data_parallel_tiles: u32,
    /// Tiles that several blocks compute.
    pub stream_k_tiles: u32,
    /// Iterations of a tile.
    pub iterations: u32,
    /// Keys of an iteration.
    pub step: u32,
    /// Equal shares of the stream-K tiles: one per resident block, or fewer, if then no share spans two tiles.
    pub shares: u32,
    /// Splits of all stream-K tiles, a block each.
    pub splits: u32,
}

/// Some iterations of a stream-K tile, of one block.
#[derive(Clone, Copy)]
struct Split {
    tile: u32,
    first: u32,
    /// The iteration after the last.
    end: u32,
}

impl Split {
    fn iterations(&self) -> u32 {
        self.end - self.first
    }
}

/// The blocks of a stream-K grid after those of whole tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamKSchedule {
    /// In the order of the grid.
    pub splits: Vec<StreamKSplit>,
    /// Maximum splits of a tile.
    pub max_splits: u32,
}

impl StreamKPlan {
    /// Returns the best division of a grid of `tiles` with `keys` each, and whether it should be faster than one block per tile. None:
    /// there is nothing to divide, or numbers are too large for a split.
    pub fn of(tiles: u64, keys: u32, step: u32, sms: u32, blocks_per_sm: u32) -> Option<(StreamKPlan, bool)> {
        let (iterations, resident_blocks) = (keys.div_ceil(step), sms * blocks_per_sm);
        let resident = u64::from(resident_blocks);
        let (data_parallel_tiles, stream_k_tiles) = ((tiles / resident * resident) as u32, (tiles % resident) as u32);
        if stream_k_tiles == 0 || iterations > u32::from(u16::MAX) || tiles > i32::MAX as u64 / 2 {
            return None;
        }
        let with = |shares| {
            let plan = StreamKPlan { resident_blocks, data_parallel_tiles, stream_k_tiles, iterations, step, shares, splits: 0 };
            let (time, splits) = plan.time_and_splits()?;
            Some((time, StreamKPlan { splits, ..plan }))
        };
        let evenly = (2..=(resident_blocks / stream_k_tiles).min(MAX_SPLITS_PER_TILE)).map(|splits| stream_k_tiles * splits);
        let (time, best) = evenly.chain([resident_blocks]).filter_map(with).min_by_key(|&(time, plan)| (time, plan.shares))?;
        let undivided = tiles.div_ceil(resident) * u64::from(keys + FIXED_KEYS);
        let are_alone = blocks_per_sm > 1 && tiles <= u64::from(sms);
        let undivided = if are_alone { undivided * ALONE_PERCENT / 100 } else { undivided };
        Some((best, pays(time, undivided)))
    }

    /// Returns true if no share spans two tiles.
    fn is_even(&self) -> bool {
        self.shares % self.stream_k_tiles == 0
    }

    /// Returns the splits of each share.
    ///
    /// Lays all stream-K tiles on a line of iterations and cuts it into equal lengths. A share that continues in the next tile has the
    /// fixed time twice, so there each tile begins with the length of that time.
    fn splits_of_shares(&self) -> Vec<Vec<Split>> {
        let fixed = if self.is_even() { 0 } else { u64::from(FIXED_KEYS.div_ceil(self.step)) };
        let of_tile = u64::from(self.iterations) + fixed;
        let cut = |share: u32| u64::from(share) * u64::from(self.stream_k_tiles) * of_tile / u64::from(self.shares);
        let mut shares = vec![Vec::with_capacity(2); self.shares as usize];
        for (number, share) in shares.iter_mut().enumerate() {
            let (mut at, end) = (cut(number as u32), cut(number as u32 + 1));
            while at < end {
                let tile = at / of_tile;
                let until = end.min((tile + 1) * of_tile);
                let iteration = |at: u64| (at - tile * of_tile).saturating_sub(fixed) as u32;
                let split = Split { tile: tile as u32, first: iteration(at), end: iteration(until) };
                if split.iterations() > 0 {
                    share.push(split);
                }
                at = until;
            }
            // the longer one before the shorter
            share.sort_by_key(|split| Reverse(split.iterations()));
        }
        shares
    }

    /// Returns the number of splits of each stream-K tile.
    fn splits_of_tiles(&self, shares: &[Vec<Split>]) -> Vec<u32> {
        let mut splits = vec![0; self.stream_k_tiles as usize];
        shares.iter().flatten().for_each(|split| splits[split.tile as usize] += 1);
        splits
    }

    /// Returns when the last block ends, in keys, and the number of splits; None: too many, of a tile or for a kernel's parameters.
    fn time_and_splits(&self) -> Option<(u64, u32)> {
        let keys_of = |splits: usize, iterations: u32| splits as u32 * FIXED_KEYS + iterations * self.step;
        let (longest, max_of_tile, splits) = if self.is_even() {
            let splits = self.shares / self.stream_k_tiles;
            let all = self.shares.min(self.stream_k_tiles * self.iterations);
            (keys_of(1, self.iterations.div_ceil(splits)), splits.min(self.iterations), all)
        } else {
            let shares = self.splits_of_shares();
            let longest = shares.iter().map(|share| keys_of(share.len(), share.iter().map(Split::iterations).sum())).max()?;
            (longest, *self.splits_of_tiles(&shares).iter().max()?, shares.iter().map(Vec::len).sum::<usize>() as u32)
        };
        if splits as usize > MAX_STREAM_K_SPLITS || max_of_tile > MAX_SPLITS_PER_TILE {
            return None;
        }
        let waves = u64::from(self.data_parallel_tiles / self.resident_blocks);
        // without full waves all blocks begin together, and load their queries together
        let longest = if waves == 0 { longest + if self.is_even() { 1 } else { 2 } * FIXED_KEYS } else { longest };
        Some((waves * u64::from(keys_of(1, self.iterations)) + u64::from(longest + max_of_tile * COMBINE_KEYS), splits))
    }

    pub fn blocks(&self) -> u32 {
        self.data_parallel_tiles + self.splits
    }

    /// Returns the splits in the order in which they should start.
    pub fn schedule(&self) -> StreamKSchedule {
        let shares = self.splits_of_shares();
        let splits_of_tiles = self.splits_of_tiles(&shares);
        let mut splits: Vec<_> = (shares.iter())
            .flat_map(|share| {
                let begin = |i: usize| if i == 0 { 0 } else { FIXED_KEYS + share[i - 1].iterations() * self.step };
                share.iter().enumerate().map(move |(i, split)| (begin(i), split))
            })
            .collect();
        splits.sort_by_key(|&(begins, split)| (begins, Reverse(split.iterations())));
        let number = |split: &Split| shares.iter().flatten().filter(|x| x.tile == split.tile && x.first < split.first).count();
        let encoded = |split: &Split| StreamKSplit {
            tile: split.tile as u16,
            first: split.first as u16,
            end: split.end as u16,
            // both in one number: 256 * the split's number in its tile + the tile's splits
            part: StreamKSplit::part(number(split) as u16, splits_of_tiles[split.tile as usize] as u16),
        };
        let max_splits = splits_of_tiles.iter().copied().max().unwrap_or(0);
        StreamKSchedule { splits: splits.into_iter().map(|(_, split)| encoded(split)).collect(), max_splits }
    }
}
