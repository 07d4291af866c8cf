//! The interface of a class of instructions. Each file of this folder implements it for enums of `isa/op.rs`; `mod.rs` calls it.

use crate::decoder::{Decoded, Decoder};
use crate::step::{SimResult, Step};

/// A class of instructions; a value is one operation with its modifiers.
pub trait Class: Copy {
    /// Returns None for mnemonics of other classes. Reads operands and unit into `d.inst`.
    fn decode(d: &mut Decoder) -> Decoded;

    /// Executes it for the lanes of `s.active`. To be inlined: it is compiled for each instruction set of the host.
    fn execute(self, s: &mut Step) -> SimResult<()>;
}
