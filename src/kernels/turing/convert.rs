//! The kernel that makes numbers of a quantised KV cache: Volta's source, which no family owns, as machine code.

use super::super::volta;
use super::{Variant, TURING};

pub const CONVERT: &[Variant] = &[Variant { name: "turing_convert", family: TURING, registers: 46, ..volta::CONVERT[0] }];
