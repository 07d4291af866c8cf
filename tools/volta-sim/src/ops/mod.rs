//! The instructions, a file for each class: its operations, how they are decoded, and what they do. A new class is a
//! new file, its `mod` and `pub use` lines, and a line in `classes!`.

use crate::decode::{Decoded, Decoder};
use crate::env::HostIsa;
use crate::isa::Unit;
use crate::step::{SimResult, Step};

mod atomic;
mod barrier;
mod bits;
mod branch;
mod convergence;
mod conversion;
mod double;
mod float;
mod integer;
mod memory;
mod packed_half;
mod predicate;
mod select;
mod special_function;
mod special_register;
mod tensor;
mod uniform;
mod warp_wide;

pub use atomic::Atomic;
pub use barrier::Barrier;
pub use bits::Bits;
pub use branch::{operand_text, Branch};
pub use convergence::Convergence;
pub use conversion::Conversion;
pub use double::Double;
pub use float::Float;
pub use integer::Integer;
pub use memory::{Memory, Space};
pub use packed_half::PackedHalf;
pub use predicate::Predicate;
pub use select::Select;
pub use special_function::SpecialFunction;
pub use special_register::SpecialRegister;
pub use tensor::Tensor;
pub use uniform::Uniform;
pub use warp_wide::WarpWide;

/// Hints, and maintenance of caches that are not simulated (but for CCTL.PF2, a prefetch: `is_prefetch`).
const WITHOUT_EFFECT: [&str; 7] = ["NOP", "PREEXIT", "NANOSLEEP", "ERRBAR", "CCTL", "CCTLL", "CCTLT"];

/// A class of instructions; a value is one operation with its modifiers.
pub trait Class: Copy {
    fn decode(d: &mut Decoder) -> Decoded;

    /// To be inlined: it is compiled for each instruction set of the host.
    fn execute(self, s: &mut Step) -> SimResult<()>;
}

/// An instruction's loops run over 32-lane arrays: AVX2 lets LLVM vectorise them, FMA makes
/// `f32::mul_add` an instruction instead of a libm call. Each class is a function of its own: in one
/// for all of them, LLVM vectorises less.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
fn execute_avx2(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(never)]
fn execute_baseline(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(always)]
fn execute(op: impl Class, s: &mut Step) -> SimResult<()> {
    match s.env.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `HostIsa::detect` found these features on this CPU.
        HostIsa::Avx2 => unsafe { execute_avx2(op, s) },
        HostIsa::Baseline => execute_baseline(op, s),
    }
}

macro_rules! classes {
    ($($class:ident),* $(,)?) => {
        /// What an instruction does.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Op {
            Nop,
            /// could not be decoded; the reason is in the instruction's text, execution stops with it
            Undecodable,
            $($class($class)),*
        }

        impl Op {
            pub fn decode(d: &mut Decoder) -> Decoded {
                if WITHOUT_EFFECT.contains(&d.base) && !memory::is_prefetch(d) {
                    d.inst.unit = Unit::Ctl;
                    return Ok(Some(Op::Nop));
                }
                $(if let Some(op) = $class::decode(d)? {
                    return Ok(Some(op));
                })*
                Ok(None)
            }

            #[inline(always)]
            pub fn execute(self, s: &mut Step) -> SimResult<()> {
                match self {
                    Op::Nop => Ok(()),
                    Op::Undecodable => Err(format!("kernel `{}`: {}", s.env.prog.name, s.inst.text)),
                    $(Op::$class(op) => execute(op, s)),*
                }
            }
        }
    };
}

classes! {
    Integer, Bits, Predicate, Select, Float, SpecialFunction, Double, PackedHalf, Tensor, Conversion, WarpWide, Memory, Atomic,
    SpecialRegister, Barrier, Branch, Convergence, Uniform,
}
