//! Dropout: which probabilities are kept.
//!
//! Every (batch, head, row, column) has its own random number, whatever the tiles are: word `column % 4` of
//! Philox4x32 with the seed as key and (column / 4, row, batch * nheads + head, offset) as counter. Seven rounds are
//! the fewest that pass BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The kernels
//! compute the same numbers (csrc/philox.cuh).

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

/// A probability is kept where its number is not below this: dropped with probability `dropout_p`, exact to 2^-32.
pub fn threshold(dropout_p: f64) -> u32 {
    (dropout_p * 4294967296.0) as u32
}

/// What kept probabilities are multiplied by.
pub fn scale(dropout_p: f64) -> f64 {
    1.0 / (1.0 - dropout_p)
}

/// The random numbers of one call.
#[derive(Clone, Copy)]
pub struct Dropout {
    key: [u32; 2],
    offset: u32,
    threshold: u32,
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
        Ok(Dropout { key: [seed as u32, (seed >> 32) as u32], offset: offset as u32, threshold: threshold(dropout_p) })
    }

    /// Whether each of the columns from `column` on of one row is kept; `head` counts over batch and heads.
    pub fn row(&self, head: u32, row: u32, column: u32, kept: &mut [bool]) {
        let mut words = [0; 4];
        for (i, kept) in kept.iter_mut().enumerate() {
            let column = column + i as u32;
            if i == 0 || column % 4 == 0 {
                words = philox(self.key, [column / 4, row, head, self.offset]);
            }
            *kept = words[column as usize % 4] >= self.threshold;
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
