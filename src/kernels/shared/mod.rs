//! Rows of kernels whose source no family owns (`csrc/shared`), and what the families' decode kernels have in common.
//! Each is a function of the family that compiles it.

mod append;
mod decode;
mod dequantize;
mod merge;

pub use append::append;
pub use decode::{decode, in_both_types, DecodeTile};
pub use dequantize::dequantize;
pub use merge::merge;

use super::variants::{CacheFormat, Family, Pass, Variant};
