//! The kernel that makes numbers of a quantized KV cache: Volta's source, which no family owns, as machine code.

use super::super::volta;
use super::{Variant, TURING};

pub const DEQUANTIZE: &[Variant] = &[Variant { name: "turing_dequantize", family: TURING, registers: 46, ..volta::DEQUANTIZE[0] }];
