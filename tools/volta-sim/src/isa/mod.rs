//! The instruction set as data: what operations there are ([`Op`]), what their operands and modifiers can be, and a decoded
//! instruction ([`Inst`]).

mod fields;
mod inst;
mod op;

pub use fields::*;
pub use inst::Inst;
pub use op::*;
