//! Stream-K grids of the backward pass: which splits the blocks of `csrc/volta/backward/stream_k.cuh` compute, and in which order. parts.rs
//! asks whether such a grid pays; src/ops/stream_k.rs takes the schedule to the kernel.
//!
//! A key block, the keys of one block, has the steps of queries of all query heads of its KV head. With grouped heads there are few key
//! blocks of many steps, and under a causal mask the first have the most: one of them may take longer than all work divided by the resident
//! blocks (those that the GPU holds at once). A stream-K grid splits key blocks with more steps than a limit; each split is a block.

use crate::kernels::Variant;
use crate::limits::MAX_BACKWARD_SPLITS; // 384
use crate::params::StreamKSplit;
use crate::plan::device::DeviceLimits;
use crate::plan::features::problem_block; // the problem's sizes, with a window whose sides are always numbers
use crate::problem::Attention;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Time of a step, 32 queries by [`LARGE_BLOCK`] keys. A tenth of it is the unit of all times here.
const STEP: u64 = 10;
/// Time to load K and V and to write dK and dV: 2.1 to 2.5 steps at headdims 64 and 128.
const FIXED: u64 = 22;
/// Time to write the fp32 gradients of a split, or to read them.
const PARTIAL: u64 = 25;
/// Most waves (as many blocks as are resident) of a usual grid that may be divided: larger grids lose little in the last wave.
const MAX_WAVES: u64 = 8;
/// Maximum scratch memory of splits: 64 MiB, in bytes.
const MAX_SCRATCH: u64 = 64 << 20;
/// Keys of a block.
const LARGE_BLOCK: u32 = 128;
/// Time of smaller blocks, percent of that of large ones. At headdim 64, with 1024 queries and keys and 32 heads on 8 KV heads, a step
/// takes 3.1 us instead of 5.2. There smaller blocks have two roles of warps (P and dV; dS and dK), large ones have one.
const SMALL_PERCENT: u64 = 60;
/// A plan limits the steps of a split. Tried are 2 to 19 twentieths of the steps of the longest key block.
const PARTS: u32 = 20;

/// How the key blocks of each head are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardStreamKPlan {
    /// KV heads of all entries: each is divided alike.
    pub heads: u32,
    /// Key blocks of a head.
    pub key_blocks: u32,
    /// Key blocks before this one are not split. Later ones are if they have more steps than `limit`.
    pub first_split: u32,
    /// Maximum steps of a split.
    pub limit: u32,
    /// From which the steps of each key block follow.
    shape: Shape,
}

/// A block of a stream-K grid: some steps of a key block.
struct Split {
    key_block: u32,
    first_step: u32,
    /// The step after the last.
    end_step: u32,
    /// Number among the splits of the key block.
    number: u32,
    /// Splits of the key block; 1: it is whole.
    of: u32,
}

impl Split {
    fn steps(&self) -> u32 {
        self.end_step - self.first_step
    }
}

/// What decides the steps of a key block (`QueryRange` in csrc/backward/iteration_range.cuh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    seqlen_q: i32,
    seqlen_k: i32,
    /// Query i sees the keys from i + low to i + high.
    low: i32,
    high: i32,
    /// Query heads of a KV head.
    group: u32,
    /// Keys of a block.
    block_rows: i32,
    /// Queries of a step.
    step: i32,
}

impl Shape {
    /// Returns the steps of a key block over the queries that see one of its keys, of all query heads of a KV head.
    fn steps(&self, block: u32) -> u32 {
        let key = block as i32 * self.block_rows;
        let first = (key - self.high).max(0) / self.step * self.step;
        let end = ((key + self.block_rows).min(self.seqlen_k) - self.low).min(self.seqlen_q);
        ((end - first).max(0) as u32).div_ceil(self.step as u32) * self.group
    }
}

/// The blocks of a stream-K grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackwardStreamKSchedule {
    /// Of each head, in the order of the grid; a key block that is not split counts as one.
    pub splits: Vec<StreamKSplit>,
    /// First key block that is split.
    pub first_tile: u32,
    /// Key blocks from this one to the last that is split.
    pub tiles: u32,
    pub max_splits: u32,
}

impl BackwardStreamKPlan {
    /// Returns one block for each key block.
    fn undivided(a: &Attention, v: &Variant) -> BackwardStreamKPlan {
        let p = problem_block(a, a.batch);
        let offset = p.seqlen_k - p.seqlen_q;
        let shape = Shape {
            seqlen_q: p.seqlen_q,
            seqlen_k: p.seqlen_k,
            low: offset - p.window_left,
            high: offset + p.window_right,
            group: (p.nheads / p.nheads_k) as u32,
            block_rows: v.block_rows as i32,
            step: v.step as i32,
        };
        let key_blocks = (p.seqlen_k as u32).div_ceil(v.block_rows);
        BackwardStreamKPlan { heads: p.nheads_k as u32 * p.batch as u32, key_blocks, first_split: key_blocks, limit: u32::MAX, shape }
    }

    /// Returns the time of a main kernel with one block for each key block; None: too many for an estimate.
    pub(super) fn undivided_time(a: &Attention, v: &Variant, d: &DeviceLimits) -> Option<u64> {
        BackwardStreamKPlan::undivided(a, v).time(v, d)
    }

    /// Returns the fastest division of this grid, which may leave all key blocks whole, and its time; None: it has no limits to try, enough
    /// waves, or more key blocks or steps than parameters can hold.
    pub(super) fn of(a: &Attention, v: &Variant, d: &DeviceLimits) -> Option<(BackwardStreamKPlan, u64)> {
        let whole = BackwardStreamKPlan::undivided(a, v);
        let BackwardStreamKPlan { heads, key_blocks, .. } = whole;
        let resident = d.resident_blocks(v);
        let blocks = u64::from(key_blocks) * u64::from(heads);
        if key_blocks as usize > MAX_BACKWARD_SPLITS || blocks > MAX_WAVES * resident {
            return None;
        }
        let longest = (0..key_blocks).map(|block| whole.shape.steps(block)).max().filter(|&steps| steps <= u16::MAX.into())?;
        // all key blocks, or at most those of the last partial wave, or of that and a full one before
        let of_waves = |waves: u64| (blocks % resident + waves * resident).div_ceil(u64::from(heads)) as u32;
        let mut first_splits: Vec<_> = [0, 1].map(|waves| key_blocks.saturating_sub(of_waves(waves))).into_iter().chain([0]).collect();
        first_splits.dedup();
        let limits = (2..PARTS).map(|part| (longest * part).div_ceil(PARTS)).filter(|&limit| limit < longest);
        let plans =
            limits.flat_map(|limit| first_splits.iter().map(move |&first_split| BackwardStreamKPlan { first_split, limit, ..whole }));
        let timed = plans.filter(|plan| plan.scratch_bytes(v) <= MAX_SCRATCH).filter_map(|plan| Some((plan.time(v, d)?, plan)));
        let (time, best) = timed.min_by_key(|&(time, plan)| (time, Reverse(plan.limit)))?;
        Some((best, time))
    }

    /// Returns the number of splits of a key block; 1: it is whole.
    fn splits(&self, block: u32) -> u32 {
        match block < self.first_split {
            true => 1,
            false => self.shape.steps(block).div_ceil(self.limit).max(1),
        }
    }

    /// Returns the blocks of a head, the longest first.
    fn blocks(&self) -> Vec<Split> {
        let of_key_block = |key_block| {
            let (steps, of) = (self.shape.steps(key_block), self.splits(key_block));
            let limit = if of == 1 { steps } else { self.limit };
            let end = move |number: u32| ((number + 1) * limit).min(steps);
            (0..of).map(move |number| Split { key_block, first_step: number * limit, end_step: end(number), number, of })
        };
        let mut blocks: Vec<_> = (0..self.key_blocks).flat_map(of_key_block).collect();
        blocks.sort_by_key(|split| Reverse(split.steps()));
        blocks
    }

    /// Estimates the time of the kernel, in tenths of a step, with the sums of splits; None: too many splits for its parameters. Blocks
    /// take the GPU's places in their order, each as soon as one is free.
    fn time(&self, v: &Variant, d: &DeviceLimits) -> Option<u64> {
        if self.key_blocks as usize > MAX_BACKWARD_SPLITS {
            return None; // before it lists the blocks, which may be many
        }
        let blocks = self.blocks();
        if blocks.len() > MAX_BACKWARD_SPLITS {
            return None;
        }
        let (sms, resident) = (u64::from(d.sms), d.resident_blocks(v));
        // number of the GPU's places for blocks, by the time from which they are free
        let mut free = BTreeMap::from([(0, resident)]);
        let mut end = 0;
        for split in &blocks {
            let time = FIXED + u64::from(split.steps()) * STEP + if split.of > 1 { PARTIAL } else { 0 };
            let mut heads = u64::from(self.heads);
            while heads > 0 {
                let (begin, places) = free.pop_first()?;
                let taken = places.min(heads);
                if places > taken {
                    free.insert(begin, places - taken);
                }
                *free.entry(begin + time).or_default() += taken;
                end = end.max(begin + time);
                heads -= taken;
            }
        }
        // splits that the last block of a key block reads from scratch memory; of two it keeps its own in registers
        let read = |splits: u32| if splits > 2 { splits } else { splits - 1 };
        let most_read = blocks.iter().map(|split| read(split.of)).max().unwrap_or(0);
        let end = end + u64::from(most_read) * PARTIAL;
        // blocks alone on their SMs take 3/4 of the time
        let are_alone = resident > sms && blocks.len() as u64 * u64::from(self.heads) <= sms;
        let end = if are_alone { end * 3 / 4 } else { end };
        Some(if v.block_rows < LARGE_BLOCK { end * SMALL_PERCENT / 100 } else { end })
    }

    /// Returns the first key block that is split, the number from this one to the last, and the most splits of one.
    fn split_blocks(&self) -> (u32, u32, u32) {
        let is_split = |block: &u32| self.splits(*block) > 1;
        let first = (0..self.key_blocks).find(is_split).unwrap_or(0);
        let blocks = (0..self.key_blocks).rev().find(is_split).map_or(0, |last| last + 1 - first);
        (first, blocks, (0..self.key_blocks).map(|block| self.splits(block)).max().unwrap_or(1))
    }

    fn scratch_bytes(&self, v: &Variant) -> u64 {
        let (_, blocks, max_splits) = self.split_blocks();
        4 * u64::from(self.heads * blocks * max_splits) * u64::from(v.block_rows * (v.headdim + v.headdim_v))
    }

    /// Returns the blocks of the grid for each head.
    pub fn blocks_of_head(&self) -> u32 {
        (0..self.key_blocks).map(|block| self.splits(block)).sum()
    }

    /// Returns the blocks in the order in which they should start.
    pub fn schedule(&self) -> BackwardStreamKSchedule {
        let encoded = |split: &Split| StreamKSplit {
            tile: split.key_block as u16,
            first: split.first_step as u16,
            end: split.end_step as u16,
            part: StreamKSplit::part(split.number as u16, split.of as u16), // 256 * number + splits
        };
        let (first_tile, tiles, max_splits) = self.split_blocks();
        BackwardStreamKSchedule { splits: self.blocks().iter().map(encoded).collect(), first_tile, tiles, max_splits }
    }
}
