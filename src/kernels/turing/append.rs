//! The kernel that appends to a KV cache: Volta's source, which no family owns, as machine code.

use super::super::volta;
use super::{Variant, TURING};

pub const APPEND: &[Variant] = &[Variant { name: "turing_append", family: TURING, registers: 52, ..volta::APPEND[0] }];
