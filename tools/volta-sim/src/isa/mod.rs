//! SASS of sm_70 and sm_75 as data: the operations ([`Op`]), their operands and modifiers, and a decoded instruction ([`Inst`]).

mod fields;
mod op;

pub use fields::*;
pub use op::*;

/// A decoded instruction. `ops` executes it, `timing` charges its cycles.
#[derive(Clone, Debug)]
pub struct Inst {
    /// bytes from the kernel's first instruction; each has 16
    pub pc: u32,
    pub op: Op,
    pub guard: PredOp,
    /// mask of threads for which it writes even if they are not active: all for a uniform destination (see [`UR0`]), else none
    pub everywhere: u32,
    /// destinations and sources, RZ and PT where there are fewer; `pred_`: predicates
    pub dst: Reg,
    pub pred_dst: [u8; 2],
    pub src: [Src; 3],
    pub pred_src: [PredOp; 3],
    /// address of a memory access
    pub mem: MemRef,
    /// constant bank of a load through `mem`
    pub bank: u8,
    /// pc of the target of a branch or convergence barrier; BRX adds a register to it; `u32::MAX`: none
    pub target: u32,
    /// stall cycles and scoreboards
    pub ctrl: Ctrl,
    /// the unit that executes it
    pub unit: Unit,
    pub mnemonic: String,
    /// the instruction as nvdisasm prints it
    pub text: String,
}
