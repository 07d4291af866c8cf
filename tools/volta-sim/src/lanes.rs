//! Arithmetic on arrays with a number for each of a warp's 32 lanes. Every function is inlined into the interpreter, which is compiled once
//! with AVX2 and once without ([`crate::ops`]).

use crate::isa::*;
use std::cmp::Ordering;

/// One 32-bit register of all lanes.
pub type V = [u32; 32];

/// A value per lane. Unlike `array::from_fn` and `array::map`, whose innards are not always inlined,
/// this and [`Each::each`] are compiled with their caller's vector instructions.
#[inline(always)]
pub fn lanes<T: Copy + Default>(f: impl Fn(usize) -> T) -> [T; 32] {
    let mut r = [T::default(); 32];
    for (l, x) in r.iter_mut().enumerate() {
        *x = f(l);
    }
    r
}

pub trait Each<T> {
    /// `f` of every lane.
    fn each<U: Copy + Default>(self, f: impl Fn(T) -> U) -> [U; 32];
}

impl<T: Copy> Each<T> for [T; 32] {
    #[inline(always)]
    fn each<U: Copy + Default>(self, f: impl Fn(T) -> U) -> [U; 32] {
        lanes(|l| f(self[l]))
    }
}

/// Returns a mask with the bit of each lane for which `f` is true.
#[inline(always)]
pub fn mask_of(f: impl Fn(usize) -> bool) -> u32 {
    let mut r = 0;
    for l in 0..32 {
        r |= (f(l) as u32) << l;
    }
    r
}
/// Returns the numbers of the lanes in a mask, in ascending order.
#[inline(always)]
pub fn lanes_in(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |l| mask >> l & 1 != 0)
}
/// Copies a register to another in the lanes of `mask`.
#[inline(always)]
pub fn assign(to: &mut V, from: &V, mask: u32) {
    if mask == !0 {
        *to = *from;
    } else {
        for l in 0..32 {
            if mask >> l & 1 != 0 {
                to[l] = from[l];
            }
        }
    }
}
/// Joins low and high words.
#[inline(always)]
pub fn pair(lo: &V, hi: &V) -> [u64; 32] {
    lanes(|l| lo[l] as u64 | (hi[l] as u64) << 32)
}
/// Flushes subnormals to zero of the same sign if `on` (.FTZ).
#[inline(always)]
pub fn flush_subnormal(x: f32, on: bool) -> f32 {
    if on && x.to_bits() & 0x7f80_0000 == 0 {
        f32::from_bits(x.to_bits() & 0x8000_0000)
    } else {
        x
    }
}
/// Returns the least float above `f`, which is finite or -inf.
#[inline(always)]
pub fn next_up(f: f32) -> f32 {
    if f == 0.0 {
        return f32::from_bits(1);
    }
    let b = f.to_bits();
    f32::from_bits(if f > 0.0 { b + 1 } else { b - 1 })
}
/// Rounds an (almost exact) double to a float in a directed mode. A finite double beyond the range of floats becomes the
/// largest float where the mode rounds towards zero.
#[inline(always)]
pub fn round_directed(d: f64, rnd: Round) -> f32 {
    let f = d as f32;
    step_directed(f, d.partial_cmp(&(f as f64)), rnd)
}
/// Returns `f`, a number rounded to nearest, or its neighbor on the side of the exact number that the mode rounds to. `exact`: the exact
/// number compared with `f`, None for NaN.
#[inline(always)]
pub fn step_directed(f: f32, exact: Option<Ordering>, rnd: Round) -> f32 {
    match (rnd, exact) {
        (Round::Rp, Some(Ordering::Greater)) => next_up(f),
        (Round::Rm, Some(Ordering::Less)) => -next_up(-f),
        (Round::Rz, Some(Ordering::Less)) if f > 0.0 => -next_up(-f),
        (Round::Rz, Some(Ordering::Greater)) if f < 0.0 => next_up(f),
        _ => f,
    }
}
/// Clamps to [0, 1] if `on` (.SAT); NaN becomes 0.
#[inline(always)]
pub fn saturate(x: f32, on: bool) -> f32 {
    if on {
        if x > 0.0 {
            x.min(1.0)
        } else {
            0.0
        }
    } else {
        x
    }
}
/// A comparison of floating-point numbers, a bit per lane.
#[inline(always)]
pub fn compare<T: Copy + PartialOrd>(cmp: Cmp, a: &[T; 32], b: &[T; 32]) -> u32 {
    // one comparison at a time over all lanes: the compiler does not take a choice per lane out of the loop
    let lt = || mask_of(|l| a[l] < b[l]);
    let gt = || mask_of(|l| a[l] > b[l]);
    let eq = || mask_of(|l| a[l] == b[l]);
    let ordered = || mask_of(|l| a[l].partial_cmp(&b[l]).is_some());
    match cmp {
        Cmp::F => 0,
        Cmp::T => !0,
        Cmp::Lt => lt(),
        Cmp::Le => lt() | eq(),
        Cmp::Gt => gt(),
        Cmp::Ge => gt() | eq(),
        Cmp::Eq => eq(),
        Cmp::Ne => lt() | gt(),
        Cmp::Ltu => !(gt() | eq()),
        Cmp::Leu => !gt(),
        Cmp::Gtu => !(lt() | eq()),
        Cmp::Geu => !lt(),
        Cmp::Equ => !(lt() | gt()),
        Cmp::Neu => !eq(),
        Cmp::Num => ordered(),
        Cmp::Nan => !ordered(),
    }
}
/// Joins a comparison's result and a predicate, both a bit per lane.
#[inline(always)]
pub fn combine(r: u32, p: u32, b: BoolOp) -> u32 {
    match b {
        BoolOp::And => r & p,
        BoolOp::Or => r | p,
        BoolOp::Xor => r ^ p,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_modes_bracket_the_exact_value() {
        for (value, down, up) in [(1.0 + 1e-12, 1.0, 1.0 + f32::EPSILON), (1e300, f32::MAX, f32::INFINITY), (1e-60, 0.0, f32::from_bits(1))]
        {
            assert_eq!(round_directed(value, Round::Rm), down);
            assert_eq!(round_directed(value, Round::Rz), down);
            assert_eq!(round_directed(value, Round::Rp), up);
            assert_eq!(round_directed(-value, Round::Rm), -up);
            assert_eq!(round_directed(-value, Round::Rz), -down);
            assert_eq!(round_directed(-value, Round::Rp), -down);
        }
        assert_eq!(round_directed(f64::INFINITY, Round::Rz), f32::INFINITY);
        assert!(round_directed(f64::NAN, Round::Rz).is_nan());
    }
}
