//! The tensor-core instruction.

use crate::half::*;
use crate::isa::*;
use crate::warp::{Warp, V};

/// One HMMA.884 step: four independent 8x8x4 products, one per quad-pair.
///
/// Quad-pair q owns lanes {4q..4q+3, 16+4q..16+4q+3}; thread t of a quad-pair holds
///   A row: A[t][v]          A col: A[4*(t>=4)+v][t%4]
///   B col: B[v][t]          B row: B[t%4][4*(t>=4)+v]
///   C f16: C[t][v]          C f32: C[(t&1)+(v&2)+4*(t>>2)][(v&1)+(t&2)+(v&4)]
/// F32 step s produces v = 2s, 2s+1; F16 step s produces v = 4s..4s+3.
/// Products are exact; the four products and C are summed in f64 and rounded once (the silicon
/// truncates inside its adder tree: expect last-bit differences).
#[inline(always)]
pub fn hmma(w: &mut Warp, inst: &Inst, is32: bool, step: u8, a_col: bool, b_col: bool) {
    let (a0, a1) = pair(w, &inst.src[0]);
    let (b0, b1) = pair(w, &inst.src[1]);
    let (c0, c1) = pair(w, &inst.src[2]);
    let (mut d0, mut d1) = ([0u32; 32], [0u32; 32]);
    for q in 0..4 {
        let lane = |t: usize| 4 * q + (t & 3) + if t >= 4 { 16 } else { 0 };
        let mut a = [[0f32; 4]; 8]; // [m][k]
        let mut b = [[0f32; 4]; 8]; // [n][k]
        for t in 0..8 {
            let l = lane(t);
            let av = [h2f(a0[l] as u16), h2f((a0[l] >> 16) as u16), h2f(a1[l] as u16), h2f((a1[l] >> 16) as u16)];
            let bv = [h2f(b0[l] as u16), h2f((b0[l] >> 16) as u16), h2f(b1[l] as u16), h2f((b1[l] >> 16) as u16)];
            if a_col {
                for v in 0..4 {
                    a[4 * (t >> 2) + v][t & 3] = av[v];
                }
            } else {
                a[t] = av;
            }
            if b_col {
                b[t] = bv;
            } else {
                for v in 0..4 {
                    b[4 * (t >> 2) + v][t & 3] = bv[v];
                }
            }
        }
        let dot = |m: usize, n: usize, c: f64| -> f64 {
            let (x, y) = (&a[m], &b[n]);
            // f32 products of halves are exact
            ((x[0] * y[0]) as f64 + (x[1] * y[1]) as f64) + ((x[2] * y[2]) as f64 + (x[3] * y[3]) as f64) + c
        };
        for t in 0..8 {
            let l = lane(t);
            if is32 {
                let v = 2 * step as usize;
                let m = (t & 1) + (v & 2) + 4 * (t >> 2);
                let n = (t & 2) + (v & 4);
                d0[l] = (dot(m, n, f32::from_bits(c0[l]) as f64) as f32).to_bits();
                d1[l] = (dot(m, n + 1, f32::from_bits(c1[l]) as f64) as f32).to_bits();
            } else {
                let n = 4 * step as usize;
                let h = |w: u32, s: u32| h2f((w >> s) as u16) as f64;
                d0[l] = d2h(dot(t, n, h(c0[l], 0))) as u32 | (d2h(dot(t, n + 1, h(c0[l], 16))) as u32) << 16;
                d1[l] = d2h(dot(t, n + 2, h(c1[l], 0))) as u32 | (d2h(dot(t, n + 3, h(c1[l], 16))) as u32) << 16;
            }
        }
    }
    w.wr(inst.dst, &d0, !0);
    w.wr(inst.dst + 1, &d1, !0);
}

/// The two registers of an operand.
#[inline(always)]
fn pair(w: &Warp, s: &Src) -> (V, V) {
    let r = s.val as u8;
    if r == RZ {
        ([0; 32], [0; 32])
    } else {
        (w.regs[r as usize], w.regs[r as usize + 1])
    }
}
