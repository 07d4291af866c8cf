//! The operations, an enum for each class of instructions: a value is one operation with its modifiers.
//! `crate::ops` has a file for each class that decodes and executes it.
//!
//! Variants and fields have the names of nvdisasm's mnemonics and modifiers: `x` is .X, `bf` .BF, `hand` .H_AND, `mrg` .MRG_H0 or .MRG_H1.
//! `signed` is false with .U32. fields.rs has the operands and the other modifiers.

use super::fields::*;

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    Nop,
    /// could not be decoded; the reason is in the instruction's text, execution stops with it
    Undecodable,
    Integer(Integer),
    Bits(Bits),
    Predicate(Predicate),
    Select(Select),
    Float(Float),
    SpecialFunction(SpecialFunction),
    Double(Double),
    PackedHalf(PackedHalf),
    Tensor(Tensor),
    Conversion(Conversion),
    WarpWide(WarpWide),
    Memory(Memory),
    Atomic(Atomic),
    SpecialRegister(SpecialRegister),
    Barrier(Barrier),
    Branch(Branch),
    Convergence(Convergence),
    Uniform(Uniform),
}

/// Integer arithmetic and comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Integer {
    Iadd3 { x: bool },
    Imad { x: bool },
    ImadWide { signed: bool, x: bool },
    ImadHi { signed: bool, x: bool },
    Lea { hi: bool, x: bool, sx32: bool, shift: u8 },
    Isetp { cmp: Cmp, signed: bool, bop: BoolOp, ex: bool },
    Imnmx { signed: bool },
    Iabs,
    Vabsdiff { signed: bool },
}

/// Logic, shifts, and what moves or counts bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bits {
    Lop3 { lut: u8, pand: bool },
    Shf { left: bool, wrap: bool, hi: bool, signed: bool, wide: bool },
    Prmt,
    Popc,
    Brev,
    Flo { signed: bool, sh: bool },
    Bmsk { wrap: bool },
    Sgxt { signed: bool },
}

/// Logic on predicates, and predicates as bits of a register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Predicate {
    Plop3 {
        lut: u8,
        lut2: u8,
    },
    /// predicates from number `first` on into the byte that begins at bit `shift`
    P2r {
        shift: u32,
        first: u8,
    },
    R2p {
        first: u8,
    },
}

/// Moves, and choices between two registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Select {
    Mov,
    Sel,
    Fsel,
}

/// Single-precision arithmetic and comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Float {
    Fadd { ftz: bool, sat: bool, rnd: Round },
    Fmul { ftz: bool, sat: bool, rnd: Round },
    Ffma { ftz: bool, sat: bool, rnd: Round },
    Fmnmx { ftz: bool },
    Fsetp { cmp: Cmp, bop: BoolOp, ftz: bool },
    Fset { cmp: Cmp, bop: BoolOp, ftz: bool, bf: bool },
    Fchk,
}

/// Functions of the special-function unit: MUFU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialFunction {
    Rcp,
    Rsq,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Sqrt,
    Tanh,
    /// of halves: the low one, or with .H1 the high one of the register, into the low half
    Ex2Half,
    Rcp64h,
    Rsq64h,
}

/// Double-precision arithmetic and comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Double {
    Dadd,
    Dmul,
    Dfma,
    Dsetp { cmp: Cmp, bop: BoolOp },
}

/// Arithmetic and comparison on two halves a register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PackedHalf {
    Hadd2 { f32: bool, sat: bool, ftz: bool, mrg: Merge },
    Hmul2 { sat: bool, ftz: bool, mrg: Merge },
    Hfma2 { sat: bool, ftz: bool, mrg: Merge },
    Hsetp2 { cmp: Cmp, bop: BoolOp, hand: bool },
    Hset2 { cmp: Cmp, bop: BoolOp, bf: bool },
}

/// Which halves of the destination are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    Both,
    H0,
    H1,
}

/// Matrix products of the tensor cores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tensor {
    /// HMMA.884; `f32`: the accumulators' type, else half
    Hmma884 { f32: bool, step: u8, a_col: bool, b_col: bool },
    /// HMMA.1688 of sm_75; `f32` likewise
    Hmma1688 { f32: bool },
    /// IMMA.8816 of sm_75; which operands are unsigned
    Imma8816 { unsigned: [bool; 2] },
}

/// Conversions between numeric types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Conversion {
    I2f { from: NumTy, to: NumTy, rnd: Round },
    F2i { from: NumTy, to: NumTy, rnd: IntRound, ftz: bool },
    F2f { from: NumTy, to: NumTy, rnd: Round, ftz: bool },
    Frnd { rnd: IntRound },
}

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

/// Rounding to an integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntRound {
    Near,
    Trunc,
    Floor,
    Ceil,
}

/// Exchange between the threads of a warp.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WarpWide {
    Shfl(ShflMode),
    Vote {
        all: bool,
        eq: bool,
    },
    Match {
        all: bool,
    },
    /// the 8x8 matrix of halves that a register holds, transposed: lane 4g+t has elements 2t and 2t+1 of row g
    Movm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShflMode {
    Idx,
    Up,
    Down,
    Bfly,
}

/// Loads and stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    Ld {
        space: Space,
        bytes: u8,
        sext: bool,
        /// sees what other SMs wrote: L1 does not serve it
        strong: bool,
    },
    St {
        space: Space,
        bytes: u8,
    },
    /// as many 8x8 matrices of halves from shared memory: lane 8i+r has the address of row r of matrix i
    Ldsm {
        matrices: u8,
        transposed: bool,
    },
    /// brings what is at an address to L2: only the timing model knows it
    Prefetch,
    /// tests whether a generic address is in shared memory, or in local memory: never, since generic addresses are not local here
    Qspc {
        shared: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Shared,
    Local,
    Const,
    /// of each lane's address: global or shared memory
    Generic,
}

/// An atomic operation on global or shared memory: RED, ATOM, ATOMG, ATOMS.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Atomic {
    pub space: Space,
    /// generic addresses: lanes in shared memory do nothing, and their predicate says so
    pub generic: bool,
    pub op: AtomOp,
    pub ty: AtomTy,
    /// the old value is a result
    pub ret: bool,
    /// compare-and-swap whose result is 1 if it swapped, else 0
    pub spin: bool,
}

impl Atomic {
    /// Operates on 8 bytes, not 4.
    pub fn wide(&self) -> bool {
        matches!(self.ty, AtomTy::U64 | AtomTy::S64)
    }
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

/// Reads of the special registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SpecialRegister {
    S2r(SReg),
    Cs2r { sreg: SReg, wide: bool },
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

/// Barriers of a CTA, of memory and of the scoreboards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Barrier {
    Bar(BarMode),
    /// the result of the last reducing BAR
    B2r,
    /// memory is always consistent here: only the timing model knows it
    Membar,
    /// waits until at most `n` of a scoreboard's instructions are pending: only the timing model knows it
    Depbar {
        sb: u8,
        n: u8,
    },
}

/// What a BAR does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarMode {
    Sync,
    Arv,
    RedPopc,
    RedAnd,
    RedOr,
}

/// Branches, calls and exits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Branch {
    Bra,
    /// BRA.CONV / BRA.DIV: taken when all live threads of the warp are here / when they are not
    BraIf {
        converged: bool,
    },
    Brx,
    Call,
    Ret,
    Exit,
}

/// Convergence barriers, at which the threads of a warp meet again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Convergence {
    Bssy(u8),
    Bsync(u8),
    Break(u8),
    BmovToReg { b: u8, clear: bool },
    BmovFromReg(u8),
    Warpsync,
    Yield,
}

/// What the uniform datapath of sm_75 does beyond the vector instructions of the same name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Uniform {
    /// ULDC.64: a constant into a register pair
    Ldc64,
    /// ULDC.U8 and .U16: a constant under this mask
    LdcNarrow(u32),
    /// a register that is the same in all threads
    R2ur,
}
