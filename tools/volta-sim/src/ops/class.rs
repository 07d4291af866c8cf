//! What a class of instructions defines.

use crate::decoder::{Decoded, Decoder};
use crate::step::{SimResult, Step};

/// A class of instructions; a value is one operation with its modifiers.
pub trait Class: Copy {
    fn decode(d: &mut Decoder) -> Decoded;

    /// To be inlined: it is compiled for each instruction set of the host.
    fn execute(self, s: &mut Step) -> SimResult<()>;
}
