//! From a disassembled instruction to a decoded one.

use crate::decoder::{blank, Decoder};
use crate::disasm::RawInst;
use crate::isa::*;
use crate::ops;
use std::collections::HashMap;

/// Decodes one instruction. The error names the instruction and its pc.
pub fn decode(raw: &RawInst, labels: &HashMap<String, u32>) -> Result<Inst, String> {
    let mut d = Decoder::new(raw, labels)?;
    match ops::decode(&mut d)? {
        Some(op) => Ok(Inst { op, ..d.inst }),
        None => Err(d.fail("unknown opcode")),
    }
}

/// Stands in for an instruction that [`decode`] refused: executing it stops with `why`.
pub fn undecodable(raw: &RawInst, why: String) -> Inst {
    Inst { op: Op::Undecodable, unit: Unit::Ctl, mnemonic: "UNDECODABLE".to_string(), text: why, ..blank(raw) }
}
