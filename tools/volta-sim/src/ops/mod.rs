//! Decodes and executes the instructions, a file for each class. A new class is an enum in `isa/op.rs`, a new file, its `mod`
//! line, and a word in `classes!`.

use crate::decoder::{Decoded, Decoder};
use crate::env::HostIsa;
use crate::isa::*;
use crate::step::{SimResult, Step};
use class::Class;

mod atomic;
mod barrier;
mod bits;
mod branch;
mod class;
mod convergence;
mod conversion;
mod double;
mod float;
mod integer;
pub mod memory;
mod packed_half;
mod predicate;
mod select;
mod special_function;
mod special_register;
mod tensor;
mod uniform;
mod warp_wide;

/// Hints, and maintenance of caches that are not simulated (but for CCTL.PF2, a prefetch: `is_prefetch`).
const WITHOUT_EFFECT: [&str; 7] = ["NOP", "PREEXIT", "NANOSLEEP", "ERRBAR", "CCTL", "CCTLL", "CCTLT"];

/// An instruction's loops run over 32-lane arrays: AVX2 lets LLVM vectorise them, FMA makes
/// `f32::mul_add` an instruction instead of a libm call. Each class is a function of its own: in one
/// for all of them, LLVM vectorises less.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
fn run_avx2(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(never)]
fn run_baseline(op: impl Class, s: &mut Step) -> SimResult<()> {
    op.execute(s)
}

#[inline(always)]
fn run(op: impl Class, s: &mut Step) -> SimResult<()> {
    match s.env.isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `HostIsa::detect` found these features on this CPU.
        HostIsa::Avx2 => unsafe { run_avx2(op, s) },
        HostIsa::Baseline => run_baseline(op, s),
    }
}

macro_rules! classes {
    ($($class:ident),* $(,)?) => {
        /// Returns the operation of an instruction, and reads its operands.
        pub fn decode(d: &mut Decoder) -> Decoded {
            if WITHOUT_EFFECT.contains(&d.base) && !memory::is_prefetch(d) {
                d.inst.unit = Unit::Ctl;
                return Ok(Some(Op::Nop));
            }
            let scalar = uniform::as_vector(d)?;
            $(if let Some(op) = $class::decode(d)? {
                if scalar {
                    d.inst.unit = Unit::Uniform;
                }
                return Ok(Some(op));
            })*
            Ok(None)
        }

        #[inline(always)]
        pub fn execute(op: Op, s: &mut Step) -> SimResult<()> {
            match op {
                Op::Nop => Ok(()),
                Op::Undecodable => Err(format!("kernel `{}`: {}", s.env.prog.name, s.inst.text)),
                $(Op::$class(op) => run(op, s)),*
            }
        }
    };
}

classes! {
    Integer, Bits, Predicate, Select, Float, SpecialFunction, Double, PackedHalf, Tensor, Conversion, WarpWide, Memory, Atomic,
    SpecialRegister, Barrier, Branch, Convergence, Uniform,
}
