//! Logic, shifts, and what moves or counts bits. `d` decodes an instruction: its calls read the printed operands from left to right. `s`
//! executes it: `s.int(i)` reads source i of all lanes, `s.bits(i)` without its modifiers (inversion, sign); `s.write` writes active lanes.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for Bits {
    fn decode(d: &mut Decoder) -> Decoded {
        let signed = d.signed();
        let op = match d.base {
            "LOP3" => {
                d.allow(&["LUT", "PAND"])?.opt_pred_dsts(2).dst()?.srcs(3)?;
                let lut = d.imm()? as u8;
                d.opt_pred_srcs();
                Bits::Lop3 { lut, pand: d.has("PAND") }
            }
            "SHF" => {
                d.allow(&["L", "R", "W", "HI", "U32", "S32", "U64", "S64"])?.dst()?.srcs(3)?;
                Bits::Shf {
                    left: d.has("L"),
                    wrap: d.has("W"),
                    hi: d.has("HI"),
                    signed: d.has("S32") || d.has("S64"),
                    wide: d.has("U64") || d.has("S64"),
                }
            }
            "PRMT" => {
                d.allow(&[])?.dst()?.srcs(3)?;
                Bits::Prmt
            }
            "POPC" | "FLO" | "BREV" => {
                d.allow(&["U32", "SH"])?.dst()?.opt_pred_dsts(2).src(0)?.on(Unit::Xu);
                match d.base {
                    "POPC" => Bits::Popc,
                    "FLO" => Bits::Flo { signed, sh: d.has("SH") },
                    _ => Bits::Brev,
                }
            }
            "BMSK" => {
                d.allow(&["W"])?.dst()?.srcs(2)?;
                Bits::Bmsk { wrap: d.has("W") }
            }
            "SGXT" => {
                d.allow(&["U32"])?.dst()?.srcs(2)?;
                Bits::Sgxt { signed }
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::Bits(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Bits::Lop3 { lut, pand } => {
                let (a, b, c) = (s.int(0)?, s.int(1)?, s.int(2)?);
                let r = lop3(lut, &a, &b, &c);
                s.write(&r);
                // the predicate: whether the result is not 0, OR the source predicate; with PAND, AND
                if s.inst.pred_dst[0] != PT {
                    let nz = mask_of(|l| r[l] != 0);
                    let p = s.predicate(0);
                    s.set_predicate(0, if pand { nz & p } else { nz | p });
                }
            }
            // shifts the pair (a, c), low word first, by n: W takes n modulo its limit, else n is clamped; HI gives the high word
            Bits::Shf { left, wrap, hi, signed, wide } => {
                let (a, n, c) = (s.bits(0)?, s.bits(1)?, s.bits(2)?);
                s.write(&lanes(|l| {
                    let lim = if wide { 64 } else { 32 };
                    let sh = if wrap { n[l] & (lim - 1) } else { n[l].min(lim) };
                    let v = a[l] as u64 | (c[l] as u64) << 32;
                    let r = match (left, signed) {
                        (true, _) => v.checked_shl(sh).unwrap_or(0),
                        (false, true) => ((v as i64) >> sh.min(63)) as u64,
                        (false, false) => v.checked_shr(sh).unwrap_or(0),
                    };
                    (r >> if hi { 32 } else { 0 }) as u32
                }));
            }
            // byte i is the one of the pair (a, c) that hexadecimal digit i of n names, or with the digit's bit 3 its sign eight times
            Bits::Prmt => {
                let (a, n, c) = (s.bits(0)?, s.bits(1)?, s.bits(2)?);
                // the most frequent case, two low halves, without loops
                let r = if s.inst.src[1].kind == SrcKind::Imm && n[0] == 0x5410 {
                    lanes(|l| (a[l] & 0xffff) | c[l] << 16)
                } else {
                    lanes(|l| {
                        let v = a[l] as u64 | (c[l] as u64) << 32;
                        let mut r = 0u32;
                        for i in 0..4 {
                            let n = n[l] >> (4 * i) & 15;
                            let mut b = (v >> (8 * (n & 7))) as u8;
                            if n & 8 != 0 {
                                b = ((b as i8) >> 7) as u8;
                            }
                            r |= (b as u32) << (8 * i);
                        }
                        r
                    })
                };
                s.write(&r);
            }
            Bits::Popc => s.write(&s.int(0)?.each(|x| x.count_ones())),
            Bits::Brev => s.write(&s.int(0)?.each(|x| x.reverse_bits())),
            // the number of the highest bit that is 1 (signed: that differs from the sign), or with SH the distance from bit 31
            Bits::Flo { signed, sh } => s.write(&s.int(0)?.each(|x| {
                let x = if signed && (x as i32) < 0 { !x } else { x };
                match x.leading_zeros() {
                    32 => !0, // no such bit
                    zeros if sh => zeros,
                    zeros => 31 - zeros,
                }
            })),
            // b ones from bit a on
            Bits::Bmsk { wrap } => {
                let (a, b) = (s.int(0)?, s.int(1)?);
                s.write(&lanes(|l| {
                    let (p, n) = if wrap { (a[l] & 31, b[l] & 31) } else { (a[l].min(32), b[l].min(32)) };
                    ((((1u64 << n) - 1) << p) & 0xffff_ffff) as u32
                }));
            }
            // the low b bits of a, extended
            Bits::Sgxt { signed } => {
                let (a, b) = (s.int(0)?, s.int(1)?);
                s.write(&lanes(|l| {
                    let n = b[l].min(32);
                    if n == 0 {
                        0
                    } else if signed {
                        (((a[l] << (32 - n)) as i32) >> (32 - n)) as u32
                    } else {
                        a[l] << (32 - n) >> (32 - n)
                    }
                }));
            }
        }
        Ok(())
    }
}

/// Returns the function of three bits whose truth table is `lut`: bit 4a + 2b + c is its value. The most frequent tables come first.
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
