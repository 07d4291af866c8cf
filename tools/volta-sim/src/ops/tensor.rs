//! The tensor cores: HMMA.884 of sm_70, HMMA.1688 and IMMA.8816 of sm_75. All lanes of a warp must execute them together.
//! Names of fragments are those of PTX: D = A B + C. A register holds two halves or four bytes of a matrix in each of 32 lanes.
//! `d` decodes an instruction: its calls read the printed operands from left to right. `s` executes it. Tests: tests/functional.rs.

use crate::decoder::{Decoded, Decoder};
use crate::half::*;
use crate::isa::*;
use crate::lanes::{lanes, Each, V};
use crate::operand::Operand;
use crate::step::{Class, SimResult, Step};
use crate::warp::Warp;

impl Class for Tensor {
    fn decode(d: &mut Decoder) -> Decoded {
        if d.base == "IMMA" {
            return decode_imma(d).map(Some);
        }
        if d.base != "HMMA" {
            return Ok(None);
        }
        if let ["1688", accumulators @ ("F32" | "F16")] = d.mods[..] {
            d.dst()?.srcs(3)?.on(Unit::Tensor);
            return Ok(Some(Op::Tensor(Tensor::Hmma1688 { f32: accumulators == "F32" })));
        }
        // HMMA.884.F32.F32.STEPn D, A.ROW, B.COL, C
        if d.mods.first() != Some(&"884") {
            return Err(d.fail("only HMMA.884 and HMMA.1688 are known"));
        }
        let f32 = match (d.mods.get(1), d.mods.get(2)) {
            (Some(&"F32"), Some(&"F32")) => true,
            (Some(&"F16"), Some(&"F16")) => false,
            _ => return Err(d.fail("HMMA accumulator types")),
        };
        let step = d.mods.get(3).and_then(|m| m.strip_prefix("STEP")).and_then(|n| n.parse().ok());
        let step = step.ok_or_else(|| d.fail("HMMA step"))?;
        d.dst()?;
        let mut cols = [false; 2];
        for (i, c) in cols.iter_mut().enumerate() {
            match d.next() {
                Some(Operand::Src(s, col)) => {
                    d.inst.src[i] = s;
                    *c = col;
                }
                _ => return Err(d.fail("HMMA operand")),
            }
        }
        d.src(2)?.on(Unit::Tensor);
        Ok(Some(Op::Tensor(Tensor::Hmma884 { f32, step, a_col: cols[0], b_col: cols[1] })))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        if !s.has_whole_warp(if matches!(self, Tensor::Imma8816 { .. }) { "IMMA" } else { "HMMA" })? {
            return Ok(());
        }
        match self {
            Tensor::Hmma884 { f32, step, a_col, b_col } => hmma884(s.warp, s.inst, f32, step, a_col, b_col),
            Tensor::Hmma1688 { f32 } => hmma1688(s.warp, s.inst, f32),
            Tensor::Imma8816 { unsigned } => imma8816(s.warp, s.inst, unsigned),
        }
        Ok(())
    }
}

/// IMMA.8816.S8.S8 D, A.ROW, B.COL, C
fn decode_imma(d: &mut Decoder) -> Result<Op, String> {
    let is_unsigned = |m: &str| match m {
        "S8" => Some(false),
        "U8" => Some(true),
        _ => None,
    };
    let types = match d.mods[..] {
        ["8816", a, b] => is_unsigned(a).zip(is_unsigned(b)),
        _ => None,
    };
    let Some((a, b)) = types else { return Err(d.fail("only IMMA.8816 of S8 and U8 is known")) };
    d.dst()?;
    for (i, is_column) in [false, true].into_iter().enumerate() {
        match d.next() {
            Some(Operand::Src(s, column)) if column == is_column => d.inst.src[i] = s,
            _ => return Err(d.fail("IMMA operand")),
        }
    }
    d.src(2)?.on(Unit::Tensor);
    Ok(Op::Tensor(Tensor::Imma8816 { unsigned: [a, b] }))
}

/// One HMMA.884 step: four independent 8x8x4 products, one per quad-pair.
///
/// Quad-pair q owns lanes {4q..4q+3, 16+4q..16+4q+3}. Value v of its thread t (v: 0 to 3, of C 0 to 7) is
/// ```text
///   A row: A[t][v]          A col: A[4*(t>=4)+v][t%4]
///   B col: B[v][t]          B row: B[t%4][4*(t>=4)+v]
///   C f16: C[t][v]          C f32: C[(t&1)+(v&2)+4*(t>>2)][(v&1)+(t&2)+(v&4)]
/// ```
/// An mma.m8n8k4 is 4 steps with F32 accumulators (step s writes v = 2s, 2s+1), or 2 with F16 (s writes v = 4s..4s+3). Products are exact;
/// the four products and C are summed in f64 and rounded once (the silicon truncates inside its adder tree: expect last-bit differences).
#[inline(always)]
fn hmma884(w: &mut Warp, inst: &Inst, is32: bool, step: u8, a_col: bool, b_col: bool) {
    let (a, b) = (halves(w, &inst.src[0]), halves(w, &inst.src[1]));
    let [c0, c1] = registers(w, &inst.src[2]);
    // `own` and `columns` give the first of the four lanes that hold what lanes 4g..4g+3, of quad-pair g & 3, compute with. Their rows of A
    // are their own. Columns 0 to 3 of B are in the quad-pair's lanes below 16, columns 4 to 7 in the others. F32 steps 0 and 1 (F16: step
    // 0) compute the former
    let own = |g: usize| 4 * g;
    let (d0, d1) = if is32 {
        let half = step as usize >> 1;
        let columns = |g: usize| 16 * half + 4 * (g & 3);
        let a = if step & 1 == 0 { vectors(&a, a_col, own, [0, 1, 0, 1]) } else { vectors(&a, a_col, own, [2, 3, 2, 3]) };
        let even = dot(&a, &vectors(&b, !b_col, columns, [0, 0, 2, 2]), c0.each(|c| f32::from_bits(c) as f64));
        let odd = dot(&a, &vectors(&b, !b_col, columns, [1, 1, 3, 3]), c1.each(|c| f32::from_bits(c) as f64));
        (even.each(|d| (d as f32).to_bits()), odd.each(|d| (d as f32).to_bits()))
    } else {
        let columns = |g: usize| 16 * step as usize + 4 * (g & 3);
        let a = vectors(&a, a_col, own, [0, 1, 2, 3]);
        let column = |i: usize, c: &V, shift: u32| {
            dot(&a, &vectors(&b, !b_col, columns, [i; 4]), c.each(|c| h2f((c >> shift) as u16) as f64)).each(|d| d2h(d) as u32)
        };
        let d = [column(0, &c0, 0), column(1, &c0, 16), column(2, &c1, 0), column(3, &c1, 16)];
        (lanes(|l| d[0][l] | d[1][l] << 16), lanes(|l| d[2][l] | d[3][l] << 16))
    };
    w.write(inst.dst, &d0, !0);
    w.write(inst.dst + 1, &d1, !0);
}

/// One HMMA.1688: a 16x8x8 product. With g = lane / 4 and t = lane % 4, a register holds elements 2t and 2t+1
/// ```text
///   A   of row g, the second register of row g+8         B   of column g
///   C   of row g, the second register (f32: pair) of row g+8
/// ```
/// Products are exact; the eight and C are summed in f64 and rounded once, as in [`hmma884`].
#[inline(always)]
fn hmma1688(w: &mut Warp, inst: &Inst, is32: bool) {
    let [a0, a1] = registers(w, &inst.src[0]);
    let [b] = registers(w, &inst.src[1]);
    let half = |v: &V, row: usize, k: usize| h2f((v[4 * row + k / 2] >> (16 * (k & 1))) as u16);
    // rows of A, by k
    let mut a = [[0f32; 16]; 8];
    for k in 0..8 {
        for row in 0..8 {
            a[k][row] = half(&a0, row, k);
            a[k][row + 8] = half(&a1, row, k);
        }
    }
    // sums[column][row]
    let mut sums = [[0f64; 16]; 8];
    for column in 0..8 {
        for k in 0..8 {
            let b = half(&b, column, k);
            for row in 0..16 {
                // f32 products of halves are exact
                sums[column][row] += (a[k][row] * b) as f64;
            }
        }
    }
    let sum = |l: usize, second: usize, lower: usize| sums[2 * (l & 3) + second][(l >> 2) + 8 * lower];
    let c: [V; 4] = registers(w, &inst.src[2]); // with f16 accumulators the operand has two
    if is32 {
        for (i, c) in c.iter().enumerate() {
            let d = lanes(|l| ((sum(l, i & 1, i >> 1) + f32::from_bits(c[l]) as f64) as f32).to_bits());
            w.write(inst.dst + i as Reg, &d, !0);
        }
    } else {
        for (i, c) in c[..2].iter().enumerate() {
            let one = |l: usize, second: usize| d2h(sum(l, second, i) + h2f((c[l] >> (16 * second)) as u16) as f64) as u32;
            let d = lanes(|l| one(l, 0) | one(l, 1) << 16);
            w.write(inst.dst + i as Reg, &d, !0);
        }
    }
}

/// One IMMA.8816: an 8x8x16 product of bytes with 32-bit sums, which wrap. With g = lane / 4 and t = lane % 4, a register holds bytes 4t to
/// 4t+3
/// ```text
///   A   of row g                 B   of column g
/// ```
/// and the two of C hold columns 2t and 2t+1 of row g.
#[inline(always)]
fn imma8816(w: &mut Warp, inst: &Inst, [a_unsigned, b_unsigned]: [bool; 2]) {
    let ([a], [b], [c0, c1]) = (registers(w, &inst.src[0]), registers(w, &inst.src[1]), registers(w, &inst.src[2]));
    // vectors[row or column][k]
    let vectors = |v: &V, unsigned: bool| {
        let mut out = [[0i32; 16]; 8];
        for (lane, word) in v.iter().enumerate() {
            for (i, byte) in word.to_le_bytes().into_iter().enumerate() {
                out[lane / 4][4 * (lane % 4) + i] = if unsigned { i32::from(byte) } else { i32::from(byte as i8) };
            }
        }
        out
    };
    let (rows, columns) = (vectors(&a, a_unsigned), vectors(&b, b_unsigned));
    let sum = |c: u32, l: usize, second: usize| {
        let products = rows[l / 4].iter().zip(&columns[2 * (l % 4) + second]).map(|(x, y)| x * y);
        c.wrapping_add(products.sum::<i32>() as u32)
    };
    w.write(inst.dst, &lanes(|l| sum(c0[l], l, 0)), !0);
    w.write(inst.dst + 1, &lanes(|l| sum(c1[l], l, 1)), !0);
}

/// Four numbers of every lane: `[number][lane]`.
type Fours = [[f32; 32]; 4];

/// The halves of the two registers of an operand.
#[inline(always)]
fn halves(w: &Warp, s: &Src) -> Fours {
    let [r0, r1] = registers(w, s);
    [r0.each(|x| h2f(x as u16)), r0.each(|x| h2f((x >> 16) as u16)), r1.each(|x| h2f(x as u16)), r1.each(|x| h2f((x >> 16) as u16))]
}

/// Returns the row of A or column of B, a vector of 4, that each lane multiplies. Lanes `from(g)` to `from(g) + 3` hold four vectors: each
/// lane a whole one or, if `across`, element k of a lane belongs to vector k. Lane 4g+j gets vector `i[j]` of the four.
#[inline(always)]
fn vectors(held: &Fours, across: bool, from: impl Fn(usize) -> usize, i: [usize; 4]) -> Fours {
    let mut out = [[0f32; 32]; 4];
    let four = |k: usize, g: usize| {
        let from = from(g) & 28; // changes nothing, but tells the compiler that the index is in bounds
        [held[k][from], held[k][from + 1], held[k][from + 2], held[k][from + 3]]
    };
    let mut put = |k: usize, g: usize, y: [f32; 4]| {
        for j in 0..4 {
            out[k][4 * g + j] = y[j];
        }
    };
    if across {
        for g in 0..8 {
            let x = [four(i[0], g), four(i[1], g), four(i[2], g), four(i[3], g)];
            for k in 0..4 {
                put(k, g, [x[0][k], x[1][k], x[2][k], x[3][k]]);
            }
        }
    } else {
        for k in 0..4 {
            for g in 0..8 {
                let x = four(k, g);
                put(k, g, [x[i[0]], x[i[1]], x[i[2]], x[i[3]]]);
            }
        }
    }
    out
}

/// Returns x . y + c of each lane.
#[inline(always)]
fn dot(x: &Fours, y: &Fours, c: [f64; 32]) -> [f64; 32] {
    // f32 products of halves are exact
    let p = |k: usize, l: usize| (x[k][l] * y[k][l]) as f64;
    lanes(|l| (p(0, l) + p(1, l)) + (p(2, l) + p(3, l)) + c[l])
}

/// Returns the `N` registers from an operand's on, zeros for RZ. A warp has at least 4 registers from any operand's on.
#[inline(always)]
fn registers<const N: usize>(w: &Warp, s: &Src) -> [V; N] {
    match s.val as Reg {
        RZ => [[0; 32]; N],
        r => *w.regs[r as usize..].first_chunk().expect("registers of an operand"),
    }
}
