//! A decoded instruction.

use super::fields::*;
use super::op::Op;

#[derive(Clone, Debug)]
pub struct Inst {
    pub pc: u32,
    pub op: Op,
    pub guard: PredOp,
    /// threads it writes for even where they take another path: all, if its result is the warp's (see [`UR0`])
    pub everywhere: u32,
    pub dst: Reg,
    pub pdst: [u8; 2],
    pub src: [Src; 3],
    pub psrc: [PredOp; 3],
    pub mem: MemRef,
    pub bank: u8,
    pub target: u32,
    pub ctrl: Ctrl,
    pub unit: Unit,
    pub mnemonic: String,
    pub text: String,
}
