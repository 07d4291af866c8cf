//! Dropout: which probabilities are kept.
//!
//! Every (batch, head, row, column) has its own random number of 15 bits, whatever the tiles are. A call of Philox4x32 makes those of
//! four columns, from a multiple of 4 on, of two rows: `row`, which has no bit of 4, and `row + 4`. The seed is the key,
//! (column / 4, row, batch * nheads + head, offset) the counter, and the number of the row that is `4 * r` further and of column `c` of
//! the four is in word `2 * r + c % 2`, in its lower half where `c` is below 2, else in its upper half; the half's highest bit has no
//! part in it. Seven rounds are the fewest that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! So a lane of Volta's forward kernels finds all eight numbers of its part of a tile in one call, and lanes elsewhere share calls
//! by one or two shuffles. Without its highest bit a half is an fp16 number that is not negative, of the same order: one packed
//! comparison decides two. The kernels compute the same numbers (csrc/philox.cuh).

use crate::error::{Error, Result};
use tch::{Kind, Tensor};

const ROUNDS: usize = 7;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a key and a counter.
pub fn philox(mut key: [u32; 2], mut counter: [u32; 4]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let product = |i: usize| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]);
        let (low, high) = (product(0), product(1));
        counter = [(high >> 32) as u32 ^ counter[1] ^ key[0], high as u32, (low >> 32) as u32 ^ counter[3] ^ key[1], low as u32];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// How many random numbers there are.
const NUMBERS: f64 = 32768.0;

/// What a number decides. Those below a threshold get the rarer verdict: so it is never above half of all numbers, which as fp16 is 2,
/// and kernels compare with a finite number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// 0 to 2^14
    pub threshold: u32,
    /// whether probabilities are kept whose number is below it; else the others are
    pub keeps_below: bool,
}

impl Rule {
    /// The one whose share of dropped probabilities is the nearest to `dropout_p`: off by 2^-16 at most, but where that would drop all.
    pub fn new(dropout_p: f64) -> Rule {
        let keeps_below = dropout_p > 0.5;
        let threshold = (NUMBERS * if keeps_below { 1.0 - dropout_p } else { dropout_p }).round() as u32;
        Rule { threshold: if keeps_below { threshold.max(1) } else { threshold }, keeps_below }
    }

    /// Whether the probability with this number is kept.
    pub fn keeps(self, number: u32) -> bool {
        (number < self.threshold) == self.keeps_below
    }

    /// What kept probabilities are multiplied by: the inverse of the share that is kept, so that results are right in the mean whatever
    /// `dropout_p` was rounded to.
    pub fn scale(self) -> f64 {
        let kept = if self.keeps_below { f64::from(self.threshold) } else { NUMBERS - f64::from(self.threshold) };
        NUMBERS / kept
    }
}

/// The random numbers of one call.
#[derive(Clone, Copy)]
pub struct Dropout {
    key: [u32; 2],
    offset: u32,
    rule: Rule,
}

impl Dropout {
    /// From `rng_state`, (2) int64 on the CPU.
    ///
    /// # Errors
    /// A state of another shape.
    pub fn new(rng_state: &Tensor, dropout_p: f64) -> Result<Dropout> {
        let state = Vec::<i64>::try_from(rng_state)?;
        let [seed, offset] = state[..] else {
            return Err(Error::value("rng_state", format!("{} values", state.len()), "2, seed and offset"));
        };
        Ok(Dropout { key: [seed as u32, (seed >> 32) as u32], offset: offset as u32, rule: Rule::new(dropout_p) })
    }

    /// Whether each of the columns from `column` on of one row is kept; `head` counts over batch and heads.
    pub fn row(&self, head: u32, row: u32, column: u32, kept: &mut [bool]) {
        let (first_row, second) = (row & !4, row as usize / 4 % 2);
        let mut words = [0; 4];
        for (i, kept) in kept.iter_mut().enumerate() {
            let column = column + i as u32;
            if i == 0 || column % 4 == 0 {
                words = philox(self.key, [column / 4, first_row, head, self.offset]);
            }
            let (word, half) = (2 * second + column as usize % 2, column / 2 % 2);
            *kept = self.rule.keeps(words[word] >> (16 * half) & 0x7fff);
        }
    }
}

/// (batch, nheads, seqlen_q, seqlen_k): the whole verdict, for tests and `return_attn_probs`.
///
/// # Errors
/// Sizes below 0, or no memory.
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
