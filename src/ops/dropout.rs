//! Dropout: decides which probabilities are kept. The CPU backend calls it, and `_dropout_mask` publishes it. Kernels compute the same
//! numbers (csrc/philox.cuh) from seed and offset, so forward and backward of any backend agree.
//!
//! Every (batch, head, row, column) has its own 15-bit random number, independent of tiles. One call of Philox4x32 computes the numbers of
//! four columns, starting at a multiple of 4, in two rows: `row`, whose bit 2 is clear, and `row + 4`. The key is the seed. The counter is
//! (column / 4, row, batch * nheads + head, offset). The number of row `row + 4 * r` and column `c` of the four is in word
//! `2 * r + c % 2`: in its lower half if `c < 2`, else in its upper half. The highest bit of a half is unused. Seven rounds are the fewest
//! that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! So a lane of Volta's forward kernels gets the eight numbers of its scores from one call. In other layouts, lanes share calls by one or
//! two shuffles. Kernels compare two numbers with the threshold in one instruction, as if they were fp16. That is right: up to 0x7c00
//! (infinity) fp16 has the order of the integers. Larger ones are NaN, for which the comparison "not below" is true, as it must be: the
//! threshold is at most 0x4000.

use crate::error::{Error, Result};
use tch::{Kind, Tensor};

// Philox4x32's rounds and constants
const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Computes four random words from a key and a counter.
pub fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let product = |i: usize| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]);
        let (low, high) = (product(0), product(1));
        counter = [(high >> 32) as u32 ^ counter[1] ^ key[0], high as u32, (low >> 32) as u32 ^ counter[3] ^ key[1], low as u32];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// Number of different random numbers: 2^15.
const NUMBERS: f64 = 32768.0;

/// Which random numbers keep a probability. Numbers below the threshold get the rarer outcome, so the threshold is at most 2^14, half of
/// all numbers. Read as fp16, that is 2, so kernels compare with a finite number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// 0 to 2^14.
    pub threshold: u32,
    /// True: numbers below the threshold keep; false: the others do.
    pub keeps_below: bool,
}

impl Rule {
    /// Returns the rule that drops a share nearest to `dropout_p`, within 2^-16 unless that would drop everything.
    pub fn new(dropout_p: f64) -> Rule {
        let keeps_below = dropout_p > 0.5;
        let threshold = (NUMBERS * if keeps_below { 1.0 - dropout_p } else { dropout_p }).round() as u32;
        Rule { threshold: if keeps_below { threshold.max(1) } else { threshold }, keeps_below }
    }

    pub fn keeps(self, number: u32) -> bool {
        (number < self.threshold) == self.keeps_below
    }

    /// Returns the factor of kept probabilities: the inverse of the share that the rounded threshold keeps, so results have the right mean.
    pub fn scale(self) -> f64 {
        let kept = if self.keeps_below { f64::from(self.threshold) } else { NUMBERS - f64::from(self.threshold) };
        NUMBERS / kept
    }
}

/// The decisions of one call: seed, offset and rule.
#[derive(Clone, Copy)]
pub struct Dropout {
    key: [u32; 2], // the seed, its lower half first
    offset: u32,   // its lower 32 bits
    rule: Rule,
}

impl Dropout {
    /// Reads `rng_state`, (2) int64 on the CPU.
    pub fn new(rng_state: &Tensor, dropout_p: f64) -> Result<Dropout> {
        let state = Vec::<i64>::try_from(rng_state)?;
        let [seed, offset] = state[..] else {
            return Err(Error::value("rng_state", format!("{} values", state.len()), "2, seed and offset"));
        };
        Ok(Dropout { key: [seed as u32, (seed >> 32) as u32], offset: offset as u32, rule: Rule::new(dropout_p) })
    }

    /// Writes whether the probabilities of a row are kept, from `column` on. `head` counts over batch and heads.
    pub fn row(&self, head: u32, row: u32, column: u32, kept: &mut [bool]) {
        let (first_row, of_second_row) = (row & !4, row as usize / 4 % 2);
        let mut words = [0; 4];
        for (i, kept) in kept.iter_mut().enumerate() {
            let column = column + i as u32;
            if i == 0 || column % 4 == 0 {
                words = philox(self.key, [column / 4, first_row, head, self.offset]);
            }
            let (word, half) = (2 * of_second_row + column as usize % 2, column / 2 % 2);
            *kept = self.rule.keeps(words[word] >> (16 * half) & 0x7fff);
        }
    }
}

/// Returns which probabilities are kept, (batch, nheads, seqlen_q, seqlen_k), for tests and `return_attn_probs`.
pub fn mask(rng_state: &Tensor, shape: [i64; 4], dropout_p: f64) -> Result<Tensor> {
    if let Some(size) = shape.iter().find(|&&n| n < 0) {
        return Err(Error::value("shape", size, "sizes of 0 or more"));
    }
    let dropout = Dropout::new(rng_state, dropout_p)?;
    let [batch, nheads, rows, columns] = shape;
    let mut kept = vec![false; (batch * nheads * rows * columns) as usize];
    for (i, row) in kept.chunks_mut(columns.max(1) as usize).enumerate() {
        dropout.row((i as i64 / rows) as u32, (i as i64 % rows) as u32, 0, row);
    }
    Ok(Tensor::f_from_slice(&kept)?.f_to_kind(Kind::Bool)?.f_view(shape)?)
}
