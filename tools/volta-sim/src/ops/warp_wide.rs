//! Exchange between the threads of a warp: SHFL, VOTE, MATCH, MOVM. `d` decodes an instruction: its calls read the printed operands from
//! left to right. `s` executes it: `s.bits(i)` reads source i of all lanes, `s.write` writes the active ones. Tests: tests/functional.rs.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::step::{Class, SimResult, Step};

impl Class for WarpWide {
    fn decode(d: &mut Decoder) -> Decoded {
        let op = match d.base {
            "SHFL" => {
                d.allow(&["IDX", "UP", "DOWN", "BFLY"])?.opt_pred_dsts(2).dst()?.srcs(3)?.on(Unit::Lsu);
                let modes = [("IDX", ShflMode::Idx), ("UP", ShflMode::Up), ("DOWN", ShflMode::Down), ("BFLY", ShflMode::Bfly)];
                WarpWide::Shfl(d.one_of(&modes).ok_or_else(|| d.fail("SHFL mode"))?)
            }
            "VOTE" => {
                d.allow(&["ANY", "ALL", "EQ"])?;
                if d.src_follows() {
                    d.dst()?;
                }
                // exactly one predicate destination; the next predicate is the source
                d.opt_pred_dsts(1).opt_pred_srcs();
                WarpWide::Vote { all: d.has("ALL"), eq: d.has("EQ") }
            }
            "MATCH" => {
                d.allow(&["ANY", "ALL", "U64"])?;
                if d.has("U64") {
                    return Err(d.fail("64-bit MATCH"));
                }
                d.opt_pred_dsts(2).dst()?.opt_pred_dsts(2).src(0)?.on(Unit::Lsu);
                WarpWide::Match { all: d.has("ALL") }
            }
            "MOVM" => {
                if d.mods[..] != ["16", "MT88"] {
                    return Err(d.fail("MOVM other than .16.MT88"));
                }
                d.dst()?.src(0)?.on(Unit::Lsu);
                WarpWide::Movm
            }
            _ => return Ok(None),
        };
        Ok(Some(Op::WarpWide(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        // s.active: lanes that the instruction writes; group_mask: those that execute it together. VOTEU writes all, but only these vote
        let m = s.active & s.group_mask;
        match self {
            WarpWide::Shfl(mode) => {
                let (a, b, c) = (s.bits(0)?, s.bits(1)?, s.bits(2)?);
                let mut r = [0u32; 32];
                let mut ok = 0u32;
                for lane in lanes_in(m) {
                    let l = lane as u32;
                    // c has the last lane of a segment (UP: the first) in bits 0 to 4, in 8 to 12 the bits of a lane that name its segment.
                    // p: whether lane j is in the segment; if not, the lane reads itself
                    let (bv, clamp, seg) = (b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31);
                    let min = l & seg;
                    let max = min | (clamp & !seg);
                    let (j, p) = match mode {
                        ShflMode::Up => (l.wrapping_sub(bv), l as i32 - bv as i32 >= max as i32),
                        ShflMode::Down => (l + bv, l + bv <= max),
                        ShflMode::Bfly => (l ^ bv, (l ^ bv) <= max),
                        ShflMode::Idx => (min | (bv & !seg), (min | (bv & !seg)) <= max),
                    };
                    let j = if p { j & 31 } else { l };
                    ok |= (p as u32) << l;
                    r[lane] = a[j as usize];
                }
                s.write(&r);
                s.set_predicate(0, ok);
            }
            WarpWide::Vote { all, eq } => {
                let ballot = s.predicate(0) & m;
                let (none, every) = (ballot == 0, ballot == m);
                let p = if eq { none | every } else { (all & every) | (!all & !none) };
                s.write(&[ballot; 32]);
                s.set_predicate(0, if p { !0 } else { 0 });
            }
            // transposes an 8x8 matrix of 16-bit elements: a lane has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4
            WarpWide::Movm => {
                if !s.has_whole_warp("MOVM")? {
                    return Ok(());
                }
                let a = s.bits(0)?;
                let element = |row: usize, column: usize| a[4 * row + column / 2] >> (16 * (column & 1)) & 0xffff;
                s.write(&lanes(|l| element(2 * (l & 3), l >> 2) | element(2 * (l & 3) + 1, l >> 2) << 16));
            }
            WarpWide::Match { all } => {
                let a = s.bits(0)?;
                let r = lanes(|l| mask_of(|k| m >> k & 1 != 0 && a[k] == a[l]));
                if all {
                    let same = lanes_in(m).all(|l| r[l] == m);
                    s.write(&[if same { m } else { 0 }; 32]);
                    s.set_predicate(0, if same { !0 } else { 0 });
                } else {
                    s.write(&r);
                }
            }
        }
        Ok(())
    }
}
