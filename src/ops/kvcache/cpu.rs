//! The CPU backend: tokens are gathered from the cache, and each sequence is a dense problem.

use super::Call;
use crate::error::{Error, Result};
use crate::problem::{CachedAttention, CachedSequence};
use tch::Tensor;

/// (out, softmax_lse).
pub fn forward(_call: &Call, _a: &CachedAttention, _sequences: &[CachedSequence]) -> Result<(Tensor, Tensor)> {
    Err(Error::unsupported("the CPU does not read a cache yet"))
}
