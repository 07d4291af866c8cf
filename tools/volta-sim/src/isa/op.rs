//! The operations, an enum for each class of instructions: a value is one operation with its modifiers.
//! `crate::ops` has a file for each class that decodes and executes it.
//!
//! Variants and fields have the names of nvdisasm's mnemonics and modifiers: `x` is .X (adds a carry), `ex` .EX (continues a comparison of
//! the low words), `bf` .BF (1.0 for true), `h_and` .H_AND (both halves), `pand` .PAND (joins by and, not or), `mrg` .MRG_H0 or .MRG_H1.
//! `wrap` is .W (shift amounts modulo the width, not clamped), `sh` .SH (a distance from bit 31), `sx32` .SX32 (extends the sign to 64
//! bits), `hi` .HI (the high word). `signed` is false with .U32. `lut` is a truth table of three inputs. `bop` joins a comparison with a
//! source predicate. fields.rs has the operands and the other modifiers.

use super::fields::*;

enums! {
    /// What an instruction does.
    Op {
        Nop,
        /// could not be decoded: execution stops with the reason, which is the instruction's text
        Undecodable,
        Integer(Integer), Bits(Bits), Predicate(Predicate), Select(Select), Float(Float),
        SpecialFunction(SpecialFunction), Double(Double), PackedHalf(PackedHalf), Tensor(Tensor),
        Conversion(Conversion), WarpWide(WarpWide), Memory(Memory), Atomic(Atomic), SpecialRegister(SpecialRegister),
        Barrier(Barrier), Branch(Branch), Convergence(Convergence), Uniform(Uniform),
    }

    /// Integer arithmetic and comparison.
    Integer {
        Iadd3 { x: bool }, Imad { x: bool }, ImadWide { signed: bool, x: bool }, ImadHi { signed: bool, x: bool },
        Lea { hi: bool, x: bool, sx32: bool, shift: u8 }, Isetp { cmp: Cmp, signed: bool, bop: BoolOp, ex: bool },
        Imnmx { signed: bool }, Iabs, Vabsdiff { signed: bool },
    }

    /// Logic, shifts, and what moves or counts bits.
    Bits {
        Lop3 { lut: u8, pand: bool }, Shf { left: bool, wrap: bool, hi: bool, signed: bool, wide: bool }, Prmt, Popc,
        Brev, Flo { signed: bool, sh: bool }, Bmsk { wrap: bool }, Sgxt { signed: bool },
    }

    /// Logic on predicates, and predicates as bits of a register.
    Predicate {
        /// two functions of three predicates
        Plop3 { lut: u8, lut2: u8 },
        /// predicates from number `first` on into the byte that begins at bit `shift`
        P2r { shift: u32, first: u8 },
        /// the inverse, from the byte that the source selects
        R2p { first: u8 },
    }

    /// Moves, and choices between two registers.
    Select { Mov, Sel, Fsel }

    /// Single-precision arithmetic and comparison.
    Float {
        Fadd { ftz: bool, sat: bool, rnd: Round }, Fmul { ftz: bool, sat: bool, rnd: Round },
        Ffma { ftz: bool, sat: bool, rnd: Round }, Fmnmx { ftz: bool }, Fsetp { cmp: Cmp, bop: BoolOp, ftz: bool },
        Fset { cmp: Cmp, bop: BoolOp, ftz: bool, bf: bool }, Fchk,
    }

    /// Functions of the special-function unit: MUFU.
    SpecialFunction {
        Rcp, Rsq, Ex2, Lg2, Sin, Cos, Sqrt, Tanh,
        /// of halves: the low one, or with .H1 the high one of the register, into the low half
        Ex2Half,
        Rcp64h, Rsq64h,
    }

    /// Double-precision arithmetic and comparison.
    Double { Dadd, Dmul, Dfma, Dsetp { cmp: Cmp, bop: BoolOp } }

    /// Arithmetic and comparison on two halves a register.
    PackedHalf {
        Hadd2 { f32: bool, sat: bool, ftz: bool, mrg: Merge }, Hmul2 { sat: bool, ftz: bool, mrg: Merge },
        Hfma2 { sat: bool, ftz: bool, mrg: Merge }, Hsetp2 { cmp: Cmp, bop: BoolOp, h_and: bool },
        Hset2 { cmp: Cmp, bop: BoolOp, bf: bool },
    }

    /// Which halves of the destination are written.
    Merge { Both, H0, H1 }

    /// Matrix products of the tensor cores.
    Tensor {
        /// HMMA.884; `f32`: the accumulators' type, else half; `step`: which part of the result it computes; `_col`: the operand is in
        /// column order
        Hmma884 { f32: bool, step: u8, a_col: bool, b_col: bool },
        /// HMMA.1688 of sm_75; `f32` as above
        Hmma1688 { f32: bool },
        /// IMMA.8816 of sm_75; which operands are unsigned
        Imma8816 { unsigned: [bool; 2] },
    }

    /// Conversions between numeric types.
    Conversion {
        I2f { from: NumTy, to: NumTy, rnd: Round }, F2i { from: NumTy, to: NumTy, rnd: IntRound, ftz: bool },
        F2f { from: NumTy, to: NumTy, rnd: Round, ftz: bool }, Frnd { rnd: IntRound, ftz: bool },
    }

    /// Type of a number, with its bits.
    NumTy { U8, S8, U16, S16, U32, S32, U64, S64, F16, F32, F64 }

    /// Rounding to an integer.
    IntRound { Near, Trunc, Floor, Ceil }

    /// Exchange between the threads of a warp.
    WarpWide {
        /// reads another thread's register
        Shfl(ShflMode),
        /// joins a predicate of all threads
        Vote { all: bool, eq: bool },
        /// finds the threads with the same value
        Match { all: bool },
        /// the 8x8 matrix of halves that a register holds, transposed: lane 4g+t has elements 2t and 2t+1 of row g
        Movm,
    }

    ShflMode { Idx, Up, Down, Bfly }

    /// Loads and stores.
    Memory {
        /// `sext`: extends the sign; `strong`: sees what other SMs wrote, so L1 does not serve it
        Ld { space: Space, bytes: u8, sext: bool, strong: bool },
        /// stores registers
        St { space: Space, bytes: u8 },
        /// loads 1, 2 or 4 matrices of 8x8 halves from shared memory: lane 8i+r has the address of row r of matrix i
        Ldsm { matrices: u8, transposed: bool },
        /// brings the bytes at an address to L2: in the timing model alone
        Prefetch,
        /// tests whether a generic address is in shared memory, or in local memory: never, since generic addresses are not local here
        Qspc { shared: bool },
    }

    Space {
        Global, Shared, Local, Const,
        /// global or shared memory, by each lane's address
        Generic,
    }

    AtomOp { Add, Min, Max, And, Or, Xor, Exch, Cas, Inc, Dec }

    AtomTy { U32, S32, U64, S64, F32, F16x2 }

    /// Reads of the special registers.
    SpecialRegister {
        S2r(SReg),
        /// `wide`: into a register pair
        Cs2r { sreg: SReg, wide: bool },
    }

    /// A special register. The number is an axis: 0 is x, 1 is y, 2 is z. Masks have a bit per lane.
    SReg {
        Tid(u8), Ctaid(u8), LaneId, WarpId, Clock, ClockHi, EqMask, LtMask, LeMask, GtMask, GeMask, Zero, NCtaId(u8),
        SmId, GlobalTimer,
    }

    /// Barriers of a CTA, of memory and of the scoreboards.
    Barrier {
        /// a barrier of the CTA
        Bar(BarMode),
        /// the result of the last reducing BAR
        B2r,
        /// orders memory, which is always consistent here: it takes time in the timing model alone
        Membar,
        /// waits until at most `n` of a scoreboard's instructions are pending: in the timing model alone
        Depbar { sb: u8, n: u8 },
    }

    /// What a BAR does: waits, arrives without waiting, or waits and reduces the threads' votes to a count, an AND or an OR.
    BarMode { Sync, Arv, RedPopc, RedAnd, RedOr }

    /// Branches, calls and exits.
    Branch {
        Bra,
        /// BRA.CONV / BRA.DIV: taken when all live threads of the warp are here / when they are not
        BraIf { converged: bool },
        Brx, Call, Ret, Exit,
    }

    /// Convergence barriers, at which the threads of a warp meet again. The number is the barrier's: B0 to B15.
    Convergence {
        Bssy(u8), Bsync(u8), Break(u8), BmovToReg { b: u8, clear: bool }, BmovFromReg(u8), Warpsync, Yield,
    }

    /// What the uniform datapath of sm_75, which computes once per warp, does beyond vector instructions of the same name.
    Uniform {
        /// ULDC.64: a constant into a register pair
        Ldc64,
        /// ULDC.U8 and .U16: a constant under this mask
        LdcNarrow(u32),
        /// a register that is the same in all threads
        R2ur,
    }
}

/// An atomic operation on global or shared memory: RED, ATOM, ATOMG, ATOMS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    pub space: Space,
    /// ATOM, on generic addresses: lanes with one in shared memory do nothing, and their result predicate is false
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
