//! Grids of equal shares: what the blocks of `csrc/volta/forward/stream_k.cuh` do, and in which order they start.
//!
//! A GPU has a number of places for blocks, and a grid of R blocks of rows that take equally long needs R / places rounds of it. The last
//! one may leave most places empty. So here only the full rounds are of whole blocks of rows: the others are cut along the keys, and every
//! place gets an equal share of them. Which block of the grid is which, decides nothing but when it starts: GPUs start blocks in the order
//! of the grid, each in the first free place, so a place takes the blocks that the plan has in mind for it, or as good ones.

use crate::limits::MAX_STREAM_K_SPLITS;
use crate::params::{FwdStreamKParams, StreamKSplit};
use std::cmp::Reverse;

/// What loading queries and writing the result takes of a block's time, in that of so many keys: 12 to 18 thousand clocks at headdims 64 and
/// 128, where two blocks of an SM take 79 and 164 clocks a key.
const FIXED_KEYS: u32 = 160;
/// What one piece more costs the block that joins them: 2 to 5 thousand clocks.
const JOIN_KEYS: u32 = 30;
/// Of the time of a block that shares its SM with another what it takes alone: 3/4 of each step at headdims 64 and 128, and a little more in all.
const ALONE: (u64, u64) = (4, 5);
/// The most pieces of a block of rows: one block reads the results of all.
const MAX_SPLITS_PER_TILE: u32 = 16;
const _: () = assert!(size_of::<FwdStreamKParams>() <= 4096, "what a kernel's parameters can have");
/// What such a grid has to gain, since no estimate is exact: 1 / 25.
const WORTH_IT: (u64, u64) = (24, 25);

/// How a grid's blocks of rows, all of as many steps of keys, are dealt to places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamKPlan {
    /// blocks that the GPU holds at once
    pub places: u32,
    /// blocks of rows that are not cut: full rounds
    pub data_parallel_tiles: u32,
    /// those that are
    pub stream_k_tiles: u32,
    /// of a block of rows
    pub steps: u32,
    /// keys of a step
    pub step: u32,
    /// shares of those that are cut: one for each place, or so many less that none of them has pieces of two blocks of rows
    pub shares: u32,
    /// of these shares
    pub pieces: u32,
}

/// Some steps of a block of rows that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    row_block: u32,
    first: u32,
    end: u32,
}

impl Piece {
    fn steps(&self) -> u32 {
        self.end - self.first
    }
}

/// The blocks of such a grid behind those of whole blocks of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamKSchedule {
    /// in the order of the grid
    pub pieces: Vec<StreamKSplit>,
    /// of one block of rows
    pub most_pieces: u32,
}

impl StreamKPlan {
    /// The best way to cut what full rounds leave of this grid, and whether that is expected to be faster than to cut nothing; None where
    /// there is nothing to cut, or no way to.
    pub fn of(row_blocks: u64, keys: u32, step: u32, sms: u32, places_per_sm: u32) -> Option<(StreamKPlan, bool)> {
        let (steps, places) = (keys.div_ceil(step), sms * places_per_sm);
        let (data_parallel_tiles, stream_k_tiles) =
            (row_blocks / u64::from(places) * u64::from(places), (row_blocks % u64::from(places)) as u32);
        if stream_k_tiles == 0 || steps > u32::from(u16::MAX) || row_blocks > i32::MAX as u64 / 2 {
            return None;
        }
        let with = |shares| {
            let cut =
                StreamKPlan { places, data_parallel_tiles: data_parallel_tiles as u32, stream_k_tiles, steps, step, shares, pieces: 0 };
            let (time, pieces) = cut.time_and_pieces()?;
            Some((time, StreamKPlan { pieces, ..cut }))
        };
        let evenly = (2..=(places / stream_k_tiles).min(MAX_SPLITS_PER_TILE)).map(|pieces| stream_k_tiles * pieces);
        let (time, best) = evenly.chain([places]).filter_map(with).min_by_key(|&(time, cut)| (time, cut.shares))?;
        let whole = row_blocks.div_ceil(u64::from(places)) * u64::from(keys + FIXED_KEYS);
        let are_alone = places_per_sm > 1 && row_blocks <= u64::from(sms);
        let whole = if are_alone { whole * ALONE.0 / ALONE.1 } else { whole };
        Some((best, time * WORTH_IT.1 < whole * WORTH_IT.0))
    }

    fn is_even(&self) -> bool {
        self.shares % self.stream_k_tiles == 0
    }

    /// The pieces of each share.
    ///
    /// Blocks of rows lie on a line, one behind the other, that is cut in equal lengths. Where shares go on from one to the next, such
    /// a share has two fixed parts: so each block of rows begins with as much of the line as that is worth.
    fn line(&self) -> Vec<Vec<Piece>> {
        let fixed = if self.is_even() { 0 } else { u64::from(FIXED_KEYS.div_ceil(self.step)) };
        let of_row = u64::from(self.steps) + fixed;
        let cut = |share: u32| u64::from(share) * u64::from(self.stream_k_tiles) * of_row / u64::from(self.shares);
        let mut shares = vec![Vec::with_capacity(2); self.shares as usize];
        for (number, share) in shares.iter_mut().enumerate() {
            let (mut at, end) = (cut(number as u32), cut(number as u32 + 1));
            while at < end {
                let row = at / of_row;
                let until = end.min((row + 1) * of_row);
                let step = |at: u64| (at - row * of_row).saturating_sub(fixed) as u32;
                let piece = Piece { row_block: row as u32, first: step(at), end: step(until) };
                if piece.steps() > 0 {
                    share.push(piece);
                }
                at = until;
            }
            // the longer one before the shorter
            share.sort_by_key(|piece| Reverse(piece.steps()));
        }
        shares
    }

    /// How many pieces the blocks of rows have.
    fn pieces_of_rows(&self, line: &[Vec<Piece>]) -> Vec<u32> {
        let mut pieces = vec![0; self.stream_k_tiles as usize];
        line.iter().flatten().for_each(|piece| pieces[piece.row_block as usize] += 1);
        pieces
    }

    /// When the last place is done, in keys, and the number of pieces; None where a kernel's parameters have no room for so many.
    fn time_and_pieces(&self) -> Option<(u64, u32)> {
        let keys_of = |pieces: usize, steps: u32| pieces as u32 * FIXED_KEYS + steps * self.step;
        let (longest, most, pieces) = if self.is_even() {
            let pieces = self.shares / self.stream_k_tiles;
            (keys_of(1, self.steps.div_ceil(pieces)), pieces.min(self.steps), self.shares.min(self.stream_k_tiles * self.steps))
        } else {
            let line = self.line();
            let longest = line.iter().map(|share| keys_of(share.len(), share.iter().map(Piece::steps).sum())).max()?;
            (longest, *self.pieces_of_rows(&line).iter().max()?, line.iter().map(Vec::len).sum::<usize>() as u32)
        };
        if pieces as usize > MAX_STREAM_K_SPLITS || most > MAX_SPLITS_PER_TILE {
            return None;
        }
        let rounds = u64::from(self.data_parallel_tiles / self.places);
        // without full rounds all begin together, and wait for their queries together
        let longest = if rounds == 0 { longest + if self.is_even() { 1 } else { 2 } * FIXED_KEYS } else { longest };
        Some((rounds * u64::from(keys_of(1, self.steps)) + u64::from(longest + most * JOIN_KEYS), pieces))
    }

    /// Blocks of the grid.
    pub fn blocks(&self) -> u32 {
        self.data_parallel_tiles + self.pieces
    }

    /// The pieces in the order in which they are meant to start.
    pub fn deal(&self) -> StreamKSchedule {
        let line = self.line();
        let pieces_of_rows = self.pieces_of_rows(&line);
        let mut pieces: Vec<_> = (line.iter())
            .flat_map(|share| {
                let begin = |i: usize| if i == 0 { 0 } else { FIXED_KEYS + share[i - 1].steps() * self.step };
                share.iter().enumerate().map(move |(i, piece)| (begin(i), piece))
            })
            .collect();
        pieces.sort_by_key(|&(begins, piece)| (begins, Reverse(piece.steps())));
        let number = |piece: &Piece| line.iter().flatten().filter(|x| x.row_block == piece.row_block && x.first < piece.first).count();
        let coded = |piece: &Piece| StreamKSplit {
            row_block: piece.row_block as u16,
            first: piece.first as u16,
            end: piece.end as u16,
            part: StreamKSplit::part(number(piece) as u16, pieces_of_rows[piece.row_block as usize] as u16),
        };
        let most_pieces = pieces_of_rows.iter().copied().max().unwrap_or(0);
        StreamKSchedule { pieces: pieces.into_iter().map(|(_, piece)| coded(piece)).collect(), most_pieces }
    }
}
