//! Decoded instruction representation.

/// Index of RZ / PT.
pub const RZ: u8 = 255;
pub const PT: u8 = 7;

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
    pub fn reg(&self) -> Option<u8> {
        (self.kind == SrcKind::Reg && self.val != RZ as u32).then_some(self.val as u8)
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
    pub stall: u8,
    /// true: the scheduler is asked to prefer another warp (encoded as a cleared bit)
    pub yield_: bool,
    /// scoreboard released when the result is written (7 = none)
    pub wr_sb: u8,
    /// scoreboard released when the sources have been read (7 = none)
    pub rd_sb: u8,
    pub wait: u8,
}

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mufu {
    Rcp,
    Rsq,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Sqrt,
    Rcp64h,
    Rsq64h,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShflMode {
    Idx,
    Up,
    Down,
    Bfly,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomTy {
    U32,
    S32,
    U64,
    S64,
    F32,
    F16x2,
}
/// Numeric type used by conversions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumTy {
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F64,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    Local,
    Const,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarMode {
    Sync,
    Arv,
    RedPopc,
    RedAnd,
    RedOr,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SReg {
    Tid(u8),
    Ctaid(u8),
    LaneId,
    WarpId,
    Clock,
    ClockHi,
    EqMask,
    LtMask,
    LeMask,
    GtMask,
    GeMask,
    Zero,
    NCtaId(u8),
    SmId,
    GlobalTimer,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    // data movement / integer
    Mov,
    Sel,
    Iadd3 {
        x: bool,
    },
    Imad {
        x: bool,
    },
    ImadWide {
        signed: bool,
        x: bool,
    },
    ImadHi {
        signed: bool,
    },
    Lea {
        hi: bool,
        x: bool,
        sx32: bool,
        shift: u8,
    },
    Lop3 {
        lut: u8,
        pand: bool,
    },
    Plop3 {
        lut: u8,
        lut2: u8,
    },
    Shf {
        left: bool,
        wrap: bool,
        hi: bool,
        signed: bool,
        wide: bool,
    },
    Isetp {
        cmp: Cmp,
        signed: bool,
        bop: BoolOp,
        ex: bool,
    },
    Imnmx {
        signed: bool,
    },
    Prmt,
    Iabs,
    Popc,
    Flo {
        signed: bool,
        sh: bool,
    },
    Brev,
    Vabsdiff {
        signed: bool,
    },
    /// predicates into the byte that begins at bit `shift`
    P2r {
        shift: u32,
    },
    R2p,
    Bmsk {
        wrap: bool,
    },
    Sgxt {
        signed: bool,
    },
    // float
    Fadd {
        ftz: bool,
        sat: bool,
        rnd: Round,
    },
    Fmul {
        ftz: bool,
        sat: bool,
        rnd: Round,
    },
    Ffma {
        ftz: bool,
        sat: bool,
        rnd: Round,
    },
    Fmnmx {
        ftz: bool,
    },
    Fsetp {
        cmp: Cmp,
        bop: BoolOp,
        ftz: bool,
    },
    Fset {
        cmp: Cmp,
        bop: BoolOp,
        ftz: bool,
        bf: bool,
    },
    Fsel,
    Fchk,
    Mufu(Mufu),
    Dadd,
    Dmul,
    Dfma,
    Dsetp {
        cmp: Cmp,
        bop: BoolOp,
    },
    // half
    Hadd2 {
        f32: bool,
        sat: bool,
        ftz: bool,
        mrg: u8,
    },
    Hmul2 {
        sat: bool,
        ftz: bool,
        mrg: u8,
    },
    Hfma2 {
        sat: bool,
        ftz: bool,
        mrg: u8,
    },
    Hsetp2 {
        cmp: Cmp,
        bop: BoolOp,
        hand: bool,
    },
    Hset2 {
        cmp: Cmp,
        bop: BoolOp,
        bf: bool,
    },
    Hmma {
        f32: bool,
        step: u8,
        a_col: bool,
        b_col: bool,
    },
    // conversions
    I2f {
        from: NumTy,
        to: NumTy,
        rnd: Round,
    },
    F2i {
        from: NumTy,
        to: NumTy,
        rnd: F2iRound,
        ftz: bool,
    },
    F2f {
        from: NumTy,
        to: NumTy,
        rnd: Round,
        ftz: bool,
    },
    Frnd {
        rnd: F2iRound,
    },
    // warp level
    Shfl(ShflMode),
    Vote {
        all: bool,
        eq: bool,
    },
    Match {
        all: bool,
    },
    // memory
    Ld {
        space: Space,
        bytes: u8,
        sext: bool,
    },
    St {
        space: Space,
        bytes: u8,
    },
    Atom {
        space: Space,
        op: AtomOp,
        ty: AtomTy,
        ret: bool,
        spin: bool,
    },
    Qspc,
    S2r(SReg),
    Cs2r {
        sreg: SReg,
        wide: bool,
    },
    Bar(BarMode),
    B2r,
    Membar,
    Depbar {
        sb: u8,
        n: u8,
    },
    // control
    Nop,
    /// could not be decoded; the reason is in the instruction's text, execution stops with it
    Undecodable,
    Bra,
    /// BRA.CONV / BRA.DIV: taken when all live threads of the warp are here / when they are not
    BraIf {
        converged: bool,
    },
    Brx,
    Exit,
    Bssy(u8),
    Bsync(u8),
    Break(u8),
    BmovToReg {
        b: u8,
        clear: bool,
    },
    BmovFromReg(u8),
    Warpsync,
    Call,
    Ret,
    Yield,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum F2iRound {
    Near,
    Trunc,
    Floor,
    Ceil,
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
    Ctl,
}

#[derive(Clone, Copy, Debug)]
pub struct MemRef {
    pub base: u8,
    /// 64-bit base register pair
    pub wide: bool,
    pub off: i64,
    /// log2 scale on the base register ([R4.X4+..])
    pub scale: u8,
}

#[derive(Clone, Debug)]
pub struct Inst {
    pub pc: u32,
    pub op: Op,
    pub guard: PredOp,
    pub dst: u8,
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
