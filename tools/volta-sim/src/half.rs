//! Converts fp16 to fp32, and fp32 and fp64 to fp16, for the instructions in `ops`, which loop over 32 lanes. The crate `half` checks the
//! CPU's features before each value, which keeps the compiler from vectorizing these loops. It also keeps NaN payloads, where the hardware
//! writes 0x7fff with the sign. The tests compare with the crate.

/// f16 -> f32, exact.
#[inline(always)]
pub fn h2f(h: u16) -> f32 {
    let h = h as u32;
    // scale the exponent by multiplication: handles subnormals exactly
    let mag = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits(0x7780_0000); // 2^112
    let inf = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(mag.to_bits() | inf | (h & 0x8000) << 16)
}

/// f32 -> f16, rounded to nearest even.
#[inline(always)]
pub fn f2h(f: f32) -> u16 {
    let x = f.to_bits();
    let sign = (x >> 16) & 0x8000;
    let a = x & 0x7fff_ffff;
    // rebias the exponent by -112 (0xc800_0000), add 0xfff and the last kept bit: rounds half to even
    let normal = (a.wrapping_add(0xc800_0fff).wrapping_add((a >> 13) & 1)) >> 13;
    // adding 0.5 (0x3f00_0000) aligns the last bit of fp32 with that of fp16 subnormals, 2^-24
    let sub = (f32::from_bits(a) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    // below 2^-14: subnormal; from 65536 on: infinity or NaN
    let mut r = if a < 0x3880_0000 { sub } else { normal };
    if a >= 0x4780_0000 {
        r = if a > 0x7f80_0000 { 0x7fff } else { 0x7c00 };
    }
    (r | sign) as u16
}

/// f64 -> f32 with round-to-odd, so that a following rounding to half is correct.
#[inline(always)]
fn round_odd(d: f64) -> f32 {
    let f = d as f32;
    if f as f64 == d || !f.is_finite() {
        return f;
    }
    // step towards zero if `as f32` (round to nearest) rounded away from it, then set the sticky bit
    let mut b = f.to_bits();
    if (f as f64).abs() > d.abs() {
        b -= 1;
    }
    f32::from_bits(b | 1)
}

/// f64 -> f16, rounded to nearest even.
#[inline(always)]
pub fn d2h(d: f64) -> u16 {
    f2h(round_odd(d))
}

/// f32 -> f16, rounded toward zero.
#[inline(always)]
pub fn f2h_rz(f: f32) -> u16 {
    let r = f2h(f);
    if f.is_finite() && h2f(r).abs() > f.abs() {
        return r - 1; // from infinity (0x7c00) it is the largest finite number
    }
    r
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn conversions_agree_with_the_crate_half() {
        for h in 0..=0xffffu16 {
            let (f, expected) = (h2f(h), ::half::f16::from_bits(h));
            assert_eq!(f.is_nan(), expected.is_nan(), "{h:04x}");
            if !f.is_nan() {
                assert_eq!((f2h(f), f.to_bits()), (h, expected.to_f32().to_bits()), "{h:04x}");
            }
        }
        // a stride that is odd reaches all exponents with many mantissas
        for f in (0..=u32::MAX).step_by(9973).map(f32::from_bits) {
            let expected = ::half::f16::from_f32(f);
            assert_eq!(f2h(f), if f.is_nan() { f2h(f32::NAN) | (expected.to_bits() & 0x8000) } else { expected.to_bits() }, "{f:e}");
        }
        assert_eq!(f2h(65519.9), 0x7bff);
        assert_eq!(f2h(65520.0), 0x7c00);
        assert_eq!(f2h(2.0f32.powi(-25)), 0);
        assert_eq!(f2h(1.5 * 2.0f32.powi(-25)), 1);
        assert_eq!(d2h(1.0 + 2f64.powi(-11) + 2f64.powi(-40)), 0x3c01);
    }
    #[test]
    fn f2h_rz_rounds_toward_zero() {
        // of all fp16 numbers up to the magnitude of f, the largest
        for f in (0..=u32::MAX).step_by(9973).map(f32::from_bits).filter(|f| f.is_finite()) {
            let h = f2h_rz(f);
            let magnitude = h & 0x7fff;
            assert_eq!(h >> 15 == 1, f.is_sign_negative(), "{f:e}");
            assert!(magnitude <= 0x7bff && h2f(magnitude) <= f.abs(), "{f:e}: {h:04x}");
            assert!(magnitude == 0x7bff || h2f(magnitude + 1) > f.abs(), "{f:e}: {h:04x}");
        }
        assert_eq!(f2h_rz(-65535.9), 0xfbff);
        assert_eq!(f2h_rz(2f32.powi(-24) * 0.99), 0);
        assert_eq!(f2h_rz(f32::NEG_INFINITY), 0xfc00);
        assert_eq!(f2h_rz(f32::NAN) & 0x7fff, 0x7fff);
    }
}
