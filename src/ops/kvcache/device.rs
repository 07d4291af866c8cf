//! The kernels that attend to a cache.

use super::Call;
use crate::error::{Error, Result};
use crate::launch::Launcher;
use crate::problem::CachedAttention;
use tch::Tensor;

/// (out, softmax_lse) of `q`, which is the call's, rotated if asked, and not empty.
pub fn attend(_q: &Tensor, _call: &Call, _a: &CachedAttention, _launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    Err(Error::unsupported("no kernel reads a cache yet"))
}
