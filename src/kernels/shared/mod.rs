//! Rows of the kernel tables for sources that no family owns (`csrc/shared`), and what rows of decode kernels have in common.
//! Each function takes the family that compiles the source, and returns its row or rows.

mod append;
mod cast;
mod decode;
mod dequantize;
mod merge;
mod stored;

pub use append::append;
pub use cast::cast;
pub use decode::{column_groups, decode, in_both_types, with_tree, DecodeTile};
pub use dequantize::dequantize;
pub use merge::merge;
pub use stored::stored_backward;

use super::variants::{CacheFormat, Family, Feature, FeatureSet, Pass, Variant};
