//! What the operands and modifiers of an instruction can be.

/// A register: R0 to R254, RZ, and from [`UR0`] the uniform registers of sm_75, one value a warp (kept as a register whose
/// lanes are equal, so that every instruction reads it as it reads any other; URZ is RZ).
pub type Reg = u16;
pub const RZ: Reg = 255;
pub const UR0: Reg = 256;
/// uniform registers, URZ not counted
pub const URZ: Reg = 63;

/// A predicate: P0 to P6, PT, and from [`UP0`] the uniform predicates of sm_75 (UPT is PT).
pub const PT: u8 = 7;
pub const UP0: u8 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SrcKind {
    Reg,
    Imm,
    Const,
}

/// Half / byte selector on a source register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sel {
    None,
    H0H0,
    H1H1,
    B(u8),
    H(u8),
    /// an fp32 constant that is read as fp16, in both halves
    F32,
}

#[derive(Clone, Copy, Debug)]
pub struct Src {
    pub kind: SrcKind,
    /// register number, immediate bits, or byte offset inside the constant bank
    pub val: u32,
    pub bank: u8,
    pub neg: bool,
    pub abs: bool,
    pub inv: bool,
    pub sel: Sel,
    pub reuse: bool,
}

impl Src {
    pub const ZERO: Src =
        Src { kind: SrcKind::Reg, val: RZ as u32, bank: 0, neg: false, abs: false, inv: false, sel: Sel::None, reuse: false };

    pub fn immediate(val: u32) -> Src {
        Src { kind: SrcKind::Imm, val, ..Src::ZERO }
    }
    /// The register of each thread's own that is read.
    pub fn reg(&self) -> Option<Reg> {
        (self.kind == SrcKind::Reg && self.val < RZ as u32).then_some(self.val as Reg)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct PredOp {
    pub idx: u8,
    pub neg: bool,
}
impl PredOp {
    pub const TRUE: PredOp = PredOp { idx: PT, neg: false };
    pub const FALSE: PredOp = PredOp { idx: PT, neg: true };
}

/// Control field of the 128-bit encoding (bits 105..125).
#[derive(Clone, Copy, Debug, Default)]
pub struct Ctrl {
    /// cycles before the warp's next instruction
    pub stall: u8,
    /// true: the scheduler is asked to prefer another warp (encoded as a cleared bit)
    pub yield_: bool,
    /// scoreboard released when the result is written (7 = none)
    pub wr_sb: u8,
    /// scoreboard released when the sources have been read (7 = none)
    pub rd_sb: u8,
    /// scoreboards that it waits for, a bit each
    pub wait: u8,
}

impl Ctrl {
    pub fn of(enc: u128) -> Ctrl {
        let c = (enc >> 105) as u32;
        Ctrl {
            stall: (c & 15) as u8,
            yield_: c >> 4 & 1 == 0,
            wr_sb: (c >> 5 & 7) as u8,
            rd_sb: (c >> 8 & 7) as u8,
            wait: (c >> 11 & 63) as u8, // bits 17..20 are the reuse flags, also printed as .reuse
        }
    }
}

/// Comparison of a *SETP or *SET; the U of Ltu to Neu: or unordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cmp {
    F,
    Lt,
    Eq,
    Le,
    Gt,
    Ne,
    Ge,
    Num,
    Nan,
    Ltu,
    Equ,
    Leu,
    Gtu,
    Neu,
    Geu,
    T,
}
/// What joins the result of a comparison and a source predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoolOp {
    And,
    Or,
    Xor,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    Rn,
    Rz,
    Rm,
    Rp,
}

/// Functional unit an instruction is issued to (timing model).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    Fma,
    Alu,
    Fp16,
    Fp64,
    Xu,
    Tensor,
    Lsu,
    /// the datapath of sm_75 that works once for all threads of a warp
    Uniform,
    Ctl,
}

#[derive(Clone, Copy, Debug)]
pub struct MemRef {
    pub base: Reg,
    /// 64-bit base register pair
    pub wide: bool,
    /// uniform register that is added to it
    pub uniform: Reg,
    /// of which there is a pair
    pub uniform_wide: bool,
    pub off: i64,
    /// log2 scale on the base register ([R4.X4+..])
    pub scale: u8,
}

impl MemRef {
    pub const ZERO: MemRef = MemRef { base: RZ, wide: false, uniform: RZ, uniform_wide: false, off: 0, scale: 0 };
}
