//! What the operands and modifiers of an instruction can be.

/// Defines enums, with the traits that all have.
macro_rules! enums {
    ($($(#[$doc:meta])* $name:ident { $($variants:tt)* })*) => {
        $($(#[$doc])* #[derive(Clone, Copy, Debug, PartialEq, Eq)] pub enum $name { $($variants)* })*
    };
}
pub(super) use enums;

/// A register: R0 to R254, RZ (always 0), and from [`UR0`] on the uniform registers of sm_75, which have one value per warp. They are kept
/// as registers whose lanes are equal, so that instructions read them as any other. URZ is RZ.
pub type Reg = u16;
pub const RZ: Reg = 255;
pub const UR0: Reg = 256;
/// number of the uniform register that is always 0, after UR0 to UR62
pub const URZ: Reg = 63;

/// A predicate: P0 to P6, PT (always true), and from [`UP0`] the uniform predicates of sm_75 (UPT is PT).
pub const PT: u8 = 7;
pub const UP0: u8 = 8;

enums! {
    SrcKind { Reg, Imm, Const }

    /// Which parts of a source register are read.
    Sel {
        /// all of it
        None,
        /// the low half, or the high one, as both halves
        H0H0,
        H1H1,
        /// byte of this number (0 to 3)
        B(u8),
        /// half of this number (0: low, 1: high)
        H(u8),
        /// an fp32 constant that is read as fp16, in both halves
        F32,
    }
}

/// A source operand. `neg`, `abs` and `inv` are the signs `-`, `|..|` and `~` before it.
#[derive(Clone, Copy, Debug)]
pub struct Src {
    pub kind: SrcKind,
    /// register number, immediate bits, or byte offset inside constant bank `bank`
    pub val: u32,
    pub bank: u8,
    pub neg: bool,
    pub abs: bool,
    pub inv: bool,
    pub sel: Sel,
    /// the register stays in the operand cache for the next instruction (.reuse)
    pub reuse: bool,
}

impl Src {
    pub const ZERO: Src =
        Src { kind: SrcKind::Reg, val: RZ as u32, bank: 0, neg: false, abs: false, inv: false, sel: Sel::None, reuse: false };

    pub fn immediate(val: u32) -> Src {
        Src { kind: SrcKind::Imm, val, ..Src::ZERO }
    }
    /// Returns the register that is read, None for RZ and uniform registers.
    pub fn reg(&self) -> Option<Reg> {
        (self.kind == SrcKind::Reg && self.val < RZ as u32).then_some(self.val as Reg)
    }
}

/// A predicate that is read, negated if `neg`.
#[derive(Clone, Copy, Debug)]
pub struct PredOp {
    pub idx: u8,
    pub neg: bool,
}
impl PredOp {
    pub const TRUE: PredOp = PredOp { idx: PT, neg: false };
    pub const FALSE: PredOp = PredOp { idx: PT, neg: true };
}

/// Control field of the 128-bit encoding (bits 105..125), by which ptxas schedules. A scoreboard is one of six counters of a warp: an
/// instruction of variable latency holds one, and later instructions wait for it.
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

enums! {
    /// Comparison of a *SETP or *SET. F: never, T: always, Num: neither is NaN, Nan: one is; the U of Ltu to Geu: or one is NaN.
    Cmp { F, Lt, Eq, Le, Gt, Ne, Ge, Num, Nan, Ltu, Equ, Leu, Gtu, Neu, Geu, T }

    /// What joins the result of a comparison and a source predicate.
    BoolOp { And, Or, Xor }

    /// Rounding to nearest even, toward zero, down (to minus infinity), up.
    Round { Rn, Rz, Rm, Rp }

    /// Functional unit an instruction is issued to (timing model): XU has special functions, LSU memory and shuffles, Ctl branches.
    Unit {
        Fma, Alu, Fp16, Fp64, Xu, Tensor, Lsu,
        /// the datapath of sm_75 that works once for all threads of a warp
        Uniform,
        Ctl,
    }
}

/// An address in bytes: (base << scale) + uniform + off.
#[derive(Clone, Copy, Debug)]
pub struct MemRef {
    pub base: Reg,
    /// the base is a 64-bit register pair
    pub wide: bool,
    pub uniform: Reg,
    /// the uniform register is a pair too
    pub uniform_wide: bool,
    pub off: i64,
    /// log2 scale on the base register ([R4.X4+..])
    pub scale: u8,
}

impl MemRef {
    pub const ZERO: MemRef = MemRef { base: RZ, wide: false, uniform: RZ, uniform_wide: false, off: 0, scale: 0 };
}
