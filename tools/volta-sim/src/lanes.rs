//! Arithmetic on the lanes of a warp, without warp state. Everything is inlined into the instruction
//! it serves, so that it is compiled with the vector instructions of that copy of [`crate::exec`].

use crate::half::*;
use crate::isa::*;
use crate::warp::V;

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

#[inline(always)]
pub fn mask_of(f: impl Fn(usize) -> bool) -> u32 {
    let mut r = 0;
    for l in 0..32 {
        r |= (f(l) as u32) << l;
    }
    r
}
#[inline(always)]
pub fn pair(lo: &V, hi: &V) -> [u64; 32] {
    lanes(|l| lo[l] as u64 | (hi[l] as u64) << 32)
}
/// Flush subnormals to (signed) zero when `on`.
#[inline(always)]
pub fn fz(x: f32, on: bool) -> f32 {
    if on && x.to_bits() & 0x7f80_0000 == 0 {
        f32::from_bits(x.to_bits() & 0x8000_0000)
    } else {
        x
    }
}
#[inline(always)]
pub fn fout(r: [f32; 32], ftz: bool, sat: bool) -> V {
    r.each(|x| {
        // the GPU returns one canonical NaN
        let x = if x.is_nan() { f32::from_bits(0x7fff_ffff) } else { x };
        let x = if sat {
            if x > 0.0 {
                x.min(1.0)
            } else {
                0.0
            }
        } else {
            x
        };
        fz(x, ftz).to_bits()
    })
}
#[inline(always)]
pub fn next_up(f: f32) -> f32 {
    if f == 0.0 {
        return f32::from_bits(1);
    }
    let b = f.to_bits();
    f32::from_bits(if f > 0.0 { b + 1 } else { b - 1 })
}
/// Round an (almost exact) double to float in a directed mode.
#[inline(always)]
pub fn directed(d: f64, rnd: Round) -> f32 {
    let f = d as f32;
    if !f.is_finite() || f as f64 == d {
        return f;
    }
    let below = (f as f64) < d;
    match rnd {
        Round::Rp if below => next_up(f),
        Round::Rm if !below => -next_up(-f),
        Round::Rz if d > 0.0 && !below => -next_up(-f),
        Round::Rz if d < 0.0 && below => next_up(f),
        _ => f,
    }
}
#[inline(always)]
pub fn fround(x: f64, r: F2iRound) -> f64 {
    match r {
        F2iRound::Near => x.round_ties_even(),
        F2iRound::Trunc => x.trunc(),
        F2iRound::Floor => x.floor(),
        F2iRound::Ceil => x.ceil(),
    }
}
#[inline(always)]
pub fn hsat(x: f32, sat: bool) -> f32 {
    if sat {
        if x > 0.0 {
            x.min(1.0)
        } else {
            0.0
        }
    } else {
        x
    }
}
#[inline(always)]
pub fn hftz(h: u16, on: bool) -> u16 {
    if on && h & 0x7c00 == 0 {
        h & 0x8000
    } else {
        h
    }
}
#[inline(always)]
pub fn lop3(lut: u8, a: &V, b: &V, c: &V) -> V {
    match lut {
        0xc0 => lanes(|l| a[l] & b[l]),
        0xfc => lanes(|l| a[l] | b[l]),
        0x3c => lanes(|l| a[l] ^ b[l]),
        0x96 => lanes(|l| a[l] ^ b[l] ^ c[l]),
        0xf8 => lanes(|l| a[l] | (b[l] & c[l])),
        0xfe => lanes(|l| a[l] | b[l] | c[l]),
        _ => {
            let mut r = [0; 32];
            for minterm in (0..8).filter(|i| lut >> i & 1 != 0) {
                // operands enter a minterm inverted where its bit is clear
                let inv = |bit: u8| ((minterm & bit != 0) as u32).wrapping_sub(1);
                let (x, y, z) = (inv(4), inv(2), inv(1));
                for l in 0..32 {
                    r[l] |= (a[l] ^ x) & (b[l] ^ y) & (c[l] ^ z);
                }
            }
            r
        }
    }
}
#[inline(always)]
pub fn icmp(cmp: Cmp, f: impl Fn(usize) -> std::cmp::Ordering) -> u32 {
    match cmp {
        Cmp::Lt => mask_of(|l| f(l).is_lt()),
        Cmp::Le => mask_of(|l| f(l).is_le()),
        Cmp::Gt => mask_of(|l| f(l).is_gt()),
        Cmp::Ge => mask_of(|l| f(l).is_ge()),
        Cmp::Eq => mask_of(|l| f(l).is_eq()),
        Cmp::Ne => mask_of(|l| f(l).is_ne()),
        Cmp::T => !0,
        _ => 0,
    }
}
macro_rules! float_cmp {
    ($name:ident, $t:ty) => {
        #[inline(always)]
        pub fn $name(c: Cmp, a: $t, b: $t) -> bool {
            let un = a.is_nan() || b.is_nan();
            match c {
                Cmp::F => false,
                Cmp::T => true,
                Cmp::Lt => a < b,
                Cmp::Le => a <= b,
                Cmp::Gt => a > b,
                Cmp::Ge => a >= b,
                Cmp::Eq => a == b,
                Cmp::Ne => a != b && !un,
                Cmp::Ltu => a < b || un,
                Cmp::Leu => a <= b || un,
                Cmp::Gtu => a > b || un,
                Cmp::Geu => a >= b || un,
                Cmp::Equ => a == b || un,
                Cmp::Neu => a != b,
                Cmp::Num => !un,
                Cmp::Nan => un,
            }
        }
    };
}
float_cmp!(fcmp, f32);
float_cmp!(dcmp, f64);
#[inline(always)]
pub fn combine(r: u32, p: u32, b: BoolOp) -> u32 {
    match b {
        BoolOp::And => r & p,
        BoolOp::Or => r | p,
        BoolOp::Xor => r ^ p,
    }
}
#[inline(always)]
pub fn atomic(op: AtomOp, ty: AtomTy, cur: u64, a: u64, b: u64) -> u64 {
    match op {
        AtomOp::Exch => a,
        AtomOp::Cas => {
            if cur == a {
                b
            } else {
                cur
            }
        }
        AtomOp::And => cur & a,
        AtomOp::Or => cur | a,
        AtomOp::Xor => cur ^ a,
        AtomOp::Inc => {
            if cur >= a {
                0
            } else {
                cur + 1
            }
        }
        AtomOp::Dec => {
            if cur == 0 || cur > a {
                a
            } else {
                cur - 1
            }
        }
        AtomOp::Add => match ty {
            AtomTy::F32 => (f32::from_bits(cur as u32) + f32::from_bits(a as u32)).to_bits() as u64,
            AtomTy::F16x2 => {
                let f = |s: u32| f2h(h2f((cur >> s) as u16) + h2f((a >> s) as u16)) as u64;
                f(0) | f(16) << 16
            }
            AtomTy::U64 | AtomTy::S64 => cur.wrapping_add(a),
            _ => (cur as u32).wrapping_add(a as u32) as u64,
        },
        AtomOp::Min | AtomOp::Max => {
            let less = match ty {
                AtomTy::S32 => (cur as i32) < (a as i32),
                AtomTy::S64 => (cur as i64) < (a as i64),
                _ => cur < a,
            };
            if less == (op == AtomOp::Min) {
                cur
            } else {
                a
            }
        }
    }
}
