//! Functional model: executes one warp instruction at a time.

use crate::cta::Cta;
use crate::env::{Env, HostIsa};
use crate::half::*;
use crate::hmma::hmma;
use crate::isa::*;
use crate::lanes::*;
use crate::warp::{GState, Group, Warp, V};

/// What an instruction did, as far as the timing model is concerned.
#[derive(Default)]
pub struct Access {
    pub mask: u32,
    /// addresses of the active lanes, for memory instructions
    pub addr: [u64; 32],
    pub taken: bool,
}
/// The error text names the kernel, pc and instruction.
pub type SimResult<T> = Result<T, String>;

impl Cta {
    /// Address/permission error text.
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn fault(&self, env: &Env, wi: usize, pc: u32, lane: usize, what: &str, addr: u64, bytes: u64, extra: &str) -> String {
        let inst = &env.prog.code[(pc / 16) as usize];
        format!(
            "kernel `{}`: {what} at pc 0x{pc:x} `{}`: CTA ({},{},{}) warp {wi} lane {lane} address {addr:#x} ({bytes} bytes){}{}",
            env.prog.name,
            inst.text,
            self.id[0],
            self.id[1],
            self.id[2],
            if extra.is_empty() { "" } else { ": " },
            extra
        )
    }

    /// A global access that no buffer permits.
    #[cold]
    #[allow(clippy::too_many_arguments)]
    fn global_fault(&self, env: &Env, wi: usize, pc: u32, lane: usize, access: &str, addr: u64, bytes: u64) -> String {
        let what = match access {
            "store" | "atomic" if env.mem.ptr(addr, bytes, &mut 0).is_some() => format!("global {access} to a read-only buffer"),
            _ => format!("global {access} outside every buffer"),
        };
        self.fault(env, wi, pc, lane, &what, addr, bytes, &env.mem.describe(addr))
    }

    /// Execute the next instruction of warp `wi`. The caller has checked that the warp is runnable.
    /// `now` feeds the clock registers. Returns the index of the executed instruction.
    #[inline]
    pub fn step(&mut self, wi: usize, env: &Env, now: u64, acc: &mut Access) -> SimResult<usize> {
        match env.isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `HostIsa::detect` found these features on this CPU.
            HostIsa::Avx2 => unsafe { self.step_avx2(wi, env, now, acc) },
            HostIsa::Baseline => self.step_with(wi, env, now, acc),
        }
    }

    /// The interpreter's loops run over 32-lane arrays: AVX2 lets LLVM vectorise them, FMA makes
    /// `f32::mul_add` an instruction instead of a libm call.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
    fn step_avx2(&mut self, wi: usize, env: &Env, now: u64, acc: &mut Access) -> SimResult<usize> {
        self.step_with(wi, env, now, acc)
    }

    #[inline(always)]
    fn step_with(&mut self, wi: usize, env: &Env, now: u64, acc: &mut Access) -> SimResult<usize> {
        let w = &mut self.warps[wi];
        let gi = match w.select() {
            Some(g) => g,
            None => return Err(format!("kernel `{}`: warp {wi} stepped while blocked", env.prog.name)),
        };
        let Group { pc, mask: gmask, .. } = w.groups[gi];
        let idx = (pc / 16) as usize;
        let Some(inst) = env.prog.code.get(idx) else {
            return Err(format!("kernel `{}`: pc 0x{pc:x} outside the code", env.prog.name));
        };
        let m = gmask & w.p(inst.guard);
        acc.mask = m;
        acc.taken = false;
        w.insts += 1;
        w.groups[gi].pc = pc + 16;

        // ---- operand access ---------------------------------------------------------
        macro_rules! raw {
            ($i:expr) => {{
                let s = &inst.src[$i];
                match s.kind {
                    SrcKind::Reg => w.reg(s.val as u8),
                    SrcKind::Imm => [s.val; 32],
                    SrcKind::Const => [cload(env, s.bank, s.val, pc)?; 32],
                }
            }};
        }
        macro_rules! int {
            ($i:expr) => {{
                let mut v = raw!($i);
                let s = &inst.src[$i];
                if s.inv {
                    for x in v.iter_mut() {
                        *x = !*x;
                    }
                }
                if s.abs {
                    for x in v.iter_mut() {
                        *x = (*x as i32).wrapping_abs() as u32;
                    }
                }
                if s.neg {
                    for x in v.iter_mut() {
                        *x = x.wrapping_neg();
                    }
                }
                v
            }};
        }
        macro_rules! flt {
            ($i:expr) => {{
                let v = raw!($i);
                let s = &inst.src[$i];
                let (and, xor) = (if s.abs { 0x7fff_ffff } else { !0u32 }, if s.neg { 0x8000_0000u32 } else { 0 });
                v.each(|x| f32::from_bits((x & and) ^ xor))
            }};
        }
        macro_rules! raw64 {
            ($i:expr) => {{
                let s = &inst.src[$i];
                let mut v: [u64; 32] = match s.kind {
                    SrcKind::Reg if s.val == RZ as u32 => [0; 32],
                    SrcKind::Reg => pair(&w.reg(s.val as u8), &w.reg(s.val as u8 + 1)),
                    SrcKind::Imm => [s.val as i32 as i64 as u64; 32],
                    SrcKind::Const => [(cload(env, s.bank, s.val, pc)? as u64) | (cload(env, s.bank, s.val + 4, pc)? as u64) << 32; 32],
                };
                if s.inv {
                    v = v.each(|x| !x);
                }
                if s.neg {
                    v = v.each(|x| x.wrapping_neg());
                }
                v
            }};
        }
        macro_rules! dbl {
            ($i:expr) => {{
                let s = &inst.src[$i];
                let v: [u64; 32] = match s.kind {
                    SrcKind::Reg if s.val == RZ as u32 => [0; 32],
                    SrcKind::Reg => pair(&w.reg(s.val as u8), &w.reg(s.val as u8 + 1)),
                    // the immediate holds the high word
                    SrcKind::Imm => [(s.val as u64) << 32; 32],
                    SrcKind::Const => [(cload(env, s.bank, s.val, pc)? as u64) | (cload(env, s.bank, s.val + 4, pc)? as u64) << 32; 32],
                };
                let (and, xor) = (if s.abs { !0 >> 1 } else { !0u64 }, if s.neg { 1u64 << 63 } else { 0 });
                v.each(|x| f64::from_bits((x & and) ^ xor))
            }};
        }
        // (low halves, high halves) as f32, modifiers applied
        macro_rules! hlf {
            ($i:expr) => {{
                let v = raw!($i);
                let s = &inst.src[$i];
                let (and, xor) = (if s.abs { 0x7fff_7fff } else { !0u32 }, if s.neg { 0x8000_8000u32 } else { 0 });
                let v = v.each(|x| (x & and) ^ xor);
                let lo = v.each(|x| h2f(x as u16));
                let hi = v.each(|x| h2f((x >> 16) as u16));
                match s.sel {
                    Sel::H0H0 => (lo, lo),
                    Sel::H1H1 => (hi, hi),
                    _ => (lo, hi),
                }
            }};
        }

        match inst.op {
            // ---------------------------------------------------------------- integer / moves
            Op::Mov => {
                let a = raw!(0);
                w.wr(inst.dst, &a, m);
            }
            Op::Sel => {
                let (a, b, p) = (int!(0), int!(1), w.p(inst.psrc[0]));
                w.wr(inst.dst, &lanes(|l| if p >> l & 1 != 0 { a[l] } else { b[l] }), m);
            }
            Op::Fsel => {
                let (a, b, p) = (flt!(0), flt!(1), w.p(inst.psrc[0]));
                w.wr(inst.dst, &lanes(|l| if p >> l & 1 != 0 { a[l].to_bits() } else { b[l].to_bits() }), m);
            }
            Op::Iadd3 { x } => {
                if inst.pdst[0] == PT && inst.pdst[1] == PT && !x {
                    let (a, b, c) = (int!(0), int!(1), int!(2));
                    w.wr(inst.dst, &lanes(|l| a[l].wrapping_add(b[l]).wrapping_add(c[l])), m);
                } else {
                    // carries: a negated operand is ~v + 1
                    let mut sum = [0u64; 32];
                    for i in 0..3 {
                        let s = inst.src[i];
                        let v = raw!(i);
                        for l in 0..32 {
                            sum[l] += if s.inv {
                                !v[l] as u64
                            } else if s.neg {
                                !v[l] as u64 + 1
                            } else {
                                v[l] as u64
                            };
                        }
                    }
                    if x {
                        let (c0, c1) = (w.p(inst.psrc[0]), w.p(inst.psrc[1]));
                        for l in 0..32 {
                            sum[l] += (c0 >> l & 1) as u64 + (c1 >> l & 1) as u64;
                        }
                    }
                    w.wr(inst.dst, &sum.each(|s| s as u32), m);
                    let (q0, q1) = (inst.pdst[0], inst.pdst[1]);
                    w.setp(q0, mask_of(|l| sum[l] >> 32 >= 1), m);
                    w.setp(q1, mask_of(|l| sum[l] >> 32 >= 2), m);
                }
            }
            Op::Imad { x } => {
                let (a, b, c) = (int!(0), int!(1), int!(2));
                if x || inst.pdst[0] != PT {
                    let cin = if x { w.p(inst.psrc[0]) } else { 0 };
                    let s: [u64; 32] = lanes(|l| a[l].wrapping_mul(b[l]) as u64 + c[l] as u64 + (cin >> l & 1) as u64);
                    w.wr(inst.dst, &s.each(|v| v as u32), m);
                    w.setp(inst.pdst[0], mask_of(|l| s[l] >> 32 != 0), m);
                } else {
                    w.wr(inst.dst, &lanes(|l| a[l].wrapping_mul(b[l]).wrapping_add(c[l])), m);
                }
            }
            Op::ImadWide { signed, x } => {
                let (a, b, c) = (int!(0), int!(1), raw64!(2));
                let cin = if x { w.p(inst.psrc[0]) } else { 0 };
                let prod: [u64; 32] =
                    lanes(
                        |l| {
                            if signed {
                                (a[l] as i32 as i64).wrapping_mul(b[l] as i32 as i64) as u64
                            } else {
                                a[l] as u64 * b[l] as u64
                            }
                        },
                    );
                let s: [u128; 32] = lanes(|l| prod[l] as u128 + c[l] as u128 + (cin >> l & 1) as u128);
                w.wr64(inst.dst, &s.each(|v| v as u64), m);
                w.setp(inst.pdst[0], mask_of(|l| s[l] >> 64 != 0), m);
            }
            Op::ImadHi { signed } => {
                let (a, b, c) = (int!(0), int!(1), int!(2));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let p = if signed { ((a[l] as i32 as i64) * (b[l] as i32 as i64)) as u64 } else { a[l] as u64 * b[l] as u64 };
                        ((p >> 32) as u32).wrapping_add(c[l])
                    }),
                    m,
                );
            }
            Op::Lea { hi, x, sx32, shift } => {
                let (a, b) = (raw!(0), int!(1));
                let neg = inst.src[0].neg;
                let c = if hi && !sx32 { raw!(2) } else { [0; 32] };
                let cin = if x { w.p(inst.psrc[0]) } else { 0 };
                let s: [u64; 32] = lanes(|l| {
                    let wide = if sx32 { a[l] as i32 as i64 as u64 } else { a[l] as u64 | (c[l] as u64) << 32 };
                    let sh = if hi { ((wide as u128) << shift >> 32) as u32 } else { a[l] << (shift & 31) };
                    let sh = if hi && sx32 { (((wide as i64 as i128) << shift) >> 32) as u32 } else { sh };
                    let sh = if neg {
                        if x {
                            !sh as u64
                        } else {
                            !sh as u64 + 1
                        }
                    } else {
                        sh as u64
                    };
                    sh + b[l] as u64 + (cin >> l & 1) as u64
                });
                w.wr(inst.dst, &s.each(|v| v as u32), m);
                w.setp(inst.pdst[0], mask_of(|l| s[l] >> 32 != 0), m);
            }
            Op::Lop3 { lut, pand } => {
                let (a, b, c) = (int!(0), int!(1), int!(2));
                let r = lop3(lut, &a, &b, &c);
                w.wr(inst.dst, &r, m);
                if inst.pdst[0] != PT {
                    let nz = mask_of(|l| r[l] != 0);
                    let p = w.p(inst.psrc[0]);
                    w.setp(inst.pdst[0], if pand { nz & p } else { nz | p }, m);
                }
            }
            Op::Plop3 { lut, lut2 } => {
                let (a, b, c) = (w.p(inst.psrc[0]), w.p(inst.psrc[1]), w.p(inst.psrc[2]));
                let r0 = lop3(lut, &[a; 32], &[b; 32], &[c; 32])[0];
                let r1 = lop3(lut2, &[a; 32], &[b; 32], &[c; 32])[0];
                w.setp(inst.pdst[0], r0, m);
                w.setp(inst.pdst[1], r1, m);
            }
            Op::Shf { left, wrap, hi, signed, wide } => {
                let (a, s, c) = (raw!(0), raw!(1), raw!(2));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let lim = if wide { 64 } else { 32 };
                        let sh = if wrap { s[l] & (lim - 1) } else { s[l].min(lim) };
                        let v = a[l] as u64 | (c[l] as u64) << 32;
                        let r = if left {
                            if sh == 64 {
                                0
                            } else {
                                v << sh
                            }
                        } else if signed {
                            ((v as i64) >> sh.min(63)) as u64
                        } else if sh == 64 {
                            0
                        } else {
                            v >> sh
                        };
                        if hi {
                            (r >> 32) as u32
                        } else {
                            r as u32
                        }
                    }),
                    m,
                );
            }
            Op::Isetp { cmp, signed, bop, ex } => {
                let (a, b) = (int!(0), int!(1));
                let mut r = if signed { icmp(cmp, |l| (a[l] as i32).cmp(&(b[l] as i32))) } else { icmp(cmp, |l| a[l].cmp(&b[l])) };
                if ex {
                    let low = w.p(inst.psrc[1]);
                    let eq = mask_of(|l| a[l] == b[l]);
                    r = match cmp {
                        Cmp::Eq => eq & low,
                        Cmp::Ne => !eq | low,
                        _ => (eq & low) | (!eq & r),
                    };
                }
                set_two(w, inst, r, bop, m);
            }
            Op::Imnmx { signed } => {
                let (a, b, p) = (int!(0), int!(1), w.p(inst.psrc[0]));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let lt = if signed { (a[l] as i32) < b[l] as i32 } else { a[l] < b[l] };
                        if lt == (p >> l & 1 != 0) {
                            a[l]
                        } else {
                            b[l]
                        }
                    }),
                    m,
                );
            }
            Op::Prmt => {
                let (a, s, c) = (raw!(0), raw!(1), raw!(2));
                let r = if inst.src[1].kind == SrcKind::Imm && s[0] == 0x5410 {
                    lanes(|l| (a[l] & 0xffff) | c[l] << 16)
                } else {
                    lanes(|l| {
                        let v = a[l] as u64 | (c[l] as u64) << 32;
                        let mut r = 0u32;
                        for i in 0..4 {
                            let n = s[l] >> (4 * i) & 15;
                            let mut b = (v >> (8 * (n & 7))) as u8;
                            if n & 8 != 0 {
                                b = ((b as i8) >> 7) as u8;
                            }
                            r |= (b as u32) << (8 * i);
                        }
                        r
                    })
                };
                w.wr(inst.dst, &r, m);
            }
            Op::Iabs => {
                let a = int!(0);
                w.wr(inst.dst, &a.each(|x| (x as i32).wrapping_abs() as u32), m);
            }
            Op::Popc => {
                let a = int!(0);
                w.wr(inst.dst, &a.each(|x| x.count_ones()), m);
            }
            Op::Brev => {
                let a = int!(0);
                w.wr(inst.dst, &a.each(|x| x.reverse_bits()), m);
            }
            Op::Flo { signed, sh } => {
                let a = int!(0);
                w.wr(
                    inst.dst,
                    &a.each(|x| {
                        let x = if signed && (x as i32) < 0 { !x } else { x };
                        if x == 0 {
                            !0
                        } else if sh {
                            x.leading_zeros()
                        } else {
                            31 - x.leading_zeros()
                        }
                    }),
                    m,
                );
            }
            Op::Vabsdiff { signed } => {
                let (a, b, c) = (int!(0), int!(1), int!(2));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let d = if signed { (a[l] as i32).abs_diff(b[l] as i32) } else { a[l].abs_diff(b[l]) };
                        d.wrapping_add(c[l])
                    }),
                    m,
                );
            }
            Op::Bmsk { wrap } => {
                let (a, b) = (int!(0), int!(1));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let (p, n) = if wrap { (a[l] & 31, b[l] & 31) } else { (a[l].min(32), b[l].min(32)) };
                        ((((1u64 << n) - 1) << p) & 0xffff_ffff) as u32
                    }),
                    m,
                );
            }
            Op::Sgxt { signed } => {
                let (a, b) = (int!(0), int!(1));
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let n = b[l].min(32);
                        if n == 0 {
                            0
                        } else if signed {
                            (((a[l] << (32 - n)) as i32) >> (32 - n)) as u32
                        } else {
                            a[l] << (32 - n) >> (32 - n)
                        }
                    }),
                    m,
                );
            }
            Op::P2r { shift } => {
                let (a, mk) = (int!(0), int!(1));
                let preds = w.pred;
                w.wr(
                    inst.dst,
                    &lanes(|l| {
                        let bits = (0..7).fold(0, |r, i| r | (preds[i] >> l & 1) << i);
                        let mask = mk[l] << shift;
                        (a[l] & !mask) | (bits << shift & mask)
                    }),
                    m,
                );
            }
            Op::R2p => {
                let (a, mk) = (int!(0), int!(1));
                let sh = match inst.src[0].sel {
                    Sel::B(n) => 8 * n as u32,
                    _ => 0,
                };
                for i in 0..7u8 {
                    let sel = mask_of(|l| mk[l] >> i & 1 != 0);
                    let val = mask_of(|l| a[l] >> (sh + i as u32) & 1 != 0);
                    w.setp(i, val, m & sel);
                }
            }
            // ---------------------------------------------------------------- fp32
            Op::Fadd { ftz, sat, rnd } => {
                let (a, b) = (flt!(0), flt!(1));
                let r = if rnd == Round::Rn {
                    lanes(|l| fz(a[l], ftz) + fz(b[l], ftz))
                } else {
                    lanes(|l| directed(fz(a[l], ftz) as f64 + fz(b[l], ftz) as f64, rnd))
                };
                w.wr(inst.dst, &fout(r, ftz, sat), m);
            }
            Op::Fmul { ftz, sat, rnd } => {
                let (a, b) = (flt!(0), flt!(1));
                let r = if rnd == Round::Rn {
                    lanes(|l| fz(a[l], ftz) * fz(b[l], ftz))
                } else {
                    lanes(|l| directed(fz(a[l], ftz) as f64 * fz(b[l], ftz) as f64, rnd))
                };
                w.wr(inst.dst, &fout(r, ftz, sat), m);
            }
            Op::Ffma { ftz, sat, rnd } => {
                let (a, b, c) = (flt!(0), flt!(1), flt!(2));
                let r = if rnd == Round::Rn {
                    lanes(|l| fz(a[l], ftz).mul_add(fz(b[l], ftz), fz(c[l], ftz)))
                } else {
                    lanes(|l| directed(fz(a[l], ftz) as f64 * fz(b[l], ftz) as f64 + fz(c[l], ftz) as f64, rnd))
                };
                w.wr(inst.dst, &fout(r, ftz, sat), m);
            }
            Op::Fmnmx { ftz } => {
                let (a, b, p) = (flt!(0), flt!(1), w.p(inst.psrc[0]));
                let r: [f32; 32] = lanes(|l| {
                    let (x, y) = (fz(a[l], ftz), fz(b[l], ftz));
                    if x.is_nan() {
                        return if y.is_nan() { f32::from_bits(0x7fff_ffff) } else { y };
                    }
                    if y.is_nan() {
                        return x;
                    }
                    // -0 orders below +0
                    let lt = x < y || (x == y && x.is_sign_negative());
                    if lt == (p >> l & 1 != 0) {
                        x
                    } else {
                        y
                    }
                });
                w.wr(inst.dst, &r.each(f32::to_bits), m);
            }
            Op::Fsetp { cmp, bop, ftz } => {
                let (a, b) = (flt!(0), flt!(1));
                let r = mask_of(|l| fcmp(cmp, fz(a[l], ftz), fz(b[l], ftz)));
                set_two(w, inst, r, bop, m);
            }
            Op::Fset { cmp, bop, ftz, bf } => {
                let (a, b) = (flt!(0), flt!(1));
                let r = combine(mask_of(|l| fcmp(cmp, fz(a[l], ftz), fz(b[l], ftz))), w.p(inst.psrc[0]), bop);
                let one = if bf { 0x3f80_0000 } else { !0 };
                w.wr(inst.dst, &lanes(|l| if r >> l & 1 != 0 { one } else { 0 }), m);
            }
            Op::Fchk => {
                // true when a plain reciprocal-based division could go wrong (conservative)
                let (a, b) = (flt!(0), flt!(1));
                let r = mask_of(|l| {
                    let (ea, eb) = ((a[l].to_bits() >> 23 & 255) as i32, (b[l].to_bits() >> 23 & 255) as i32);
                    ea == 255 || eb == 255 || ea <= 25 || eb <= 1 || eb >= 252 || ea - eb >= 125 || ea - eb <= -124
                });
                w.setp(inst.pdst[0], r, m);
            }
            Op::Mufu(f) => {
                if matches!(f, Mufu::Rcp64h | Mufu::Rsq64h) {
                    let a = raw!(0);
                    let r = a.each(|x| {
                        let d = f64::from_bits((x as u64) << 32);
                        let v = if f == Mufu::Rcp64h { 1.0 / d } else { 1.0 / d.sqrt() };
                        (v.to_bits() >> 32) as u32
                    });
                    w.wr(inst.dst, &r, m);
                } else {
                    let a = flt!(0);
                    // inputs and outputs of the special-function unit flush subnormals
                    let mut r = [0u32; 32];
                    for l in 0..32 {
                        if m >> l & 1 != 0 {
                            let x = fz(a[l], true);
                            let v = match f {
                                Mufu::Rcp => 1.0 / x,
                                Mufu::Rsq => (1.0 / (x as f64).sqrt()) as f32,
                                Mufu::Ex2 => x.exp2(),
                                Mufu::Lg2 => x.log2(),
                                // the argument arrives premultiplied by 1/2pi (range-reduced by FMUL)
                                Mufu::Sin => ((x as f64) * std::f64::consts::TAU).sin() as f32,
                                Mufu::Cos => ((x as f64) * std::f64::consts::TAU).cos() as f32,
                                Mufu::Sqrt => x.sqrt(),
                                _ => unreachable!(),
                            };
                            r[l] = fz(v, true).to_bits();
                        }
                    }
                    w.wr(inst.dst, &r, m);
                }
            }
            Op::Dadd => {
                let (a, b) = (dbl!(0), dbl!(1));
                w.wr64(inst.dst, &lanes(|l| (a[l] + b[l]).to_bits()), m);
            }
            Op::Dmul => {
                let (a, b) = (dbl!(0), dbl!(1));
                w.wr64(inst.dst, &lanes(|l| (a[l] * b[l]).to_bits()), m);
            }
            Op::Dfma => {
                let (a, b, c) = (dbl!(0), dbl!(1), dbl!(2));
                w.wr64(inst.dst, &lanes(|l| a[l].mul_add(b[l], c[l]).to_bits()), m);
            }
            Op::Dsetp { cmp, bop } => {
                let (a, b) = (dbl!(0), dbl!(1));
                let r = mask_of(|l| dcmp(cmp, a[l], b[l]));
                set_two(w, inst, r, bop, m);
            }
            // ---------------------------------------------------------------- half
            Op::Hadd2 { f32: to32, sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1)) = (hlf!(0), hlf!(1));
                if to32 {
                    let r: [f32; 32] = lanes(|l| a0[l] + b0[l]);
                    w.wr(inst.dst, &fout(r, ftz, sat), m);
                } else {
                    let lo: [f32; 32] = lanes(|l| a0[l] + b0[l]);
                    let hi: [f32; 32] = lanes(|l| a1[l] + b1[l]);
                    hwr(w, inst.dst, lanes(|l| f2h(hsat(lo[l], sat))), lanes(|l| f2h(hsat(hi[l], sat))), mrg, ftz, m);
                }
            }
            Op::Hmul2 { sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1)) = (hlf!(0), hlf!(1));
                hwr(w, inst.dst, lanes(|l| f2h(hsat(a0[l] * b0[l], sat))), lanes(|l| f2h(hsat(a1[l] * b1[l], sat))), mrg, ftz, m);
            }
            Op::Hfma2 { sat, ftz, mrg } => {
                let ((a0, a1), (b0, b1), (c0, c1)) = (hlf!(0), hlf!(1), hlf!(2));
                let f = |a: f32, b: f32, c: f32| {
                    let s = (a * b) as f64 + c as f64; // the product of two halves is exact in f32
                    if sat {
                        f2h(hsat(s as f32, true))
                    } else {
                        d2h(s)
                    }
                };
                hwr(w, inst.dst, lanes(|l| f(a0[l], b0[l], c0[l])), lanes(|l| f(a1[l], b1[l], c1[l])), mrg, ftz, m);
            }
            Op::Hsetp2 { cmp, bop, hand } => {
                let ((a0, a1), (b0, b1)) = (hlf!(0), hlf!(1));
                let r0 = mask_of(|l| fcmp(cmp, a0[l], b0[l]));
                let r1 = mask_of(|l| fcmp(cmp, a1[l], b1[l]));
                let p = w.p(inst.psrc[0]);
                if hand {
                    w.setp(inst.pdst[0], combine(r0 & r1, p, bop), m);
                    w.setp(inst.pdst[1], combine(!(r0 & r1), p, bop), m);
                } else {
                    w.setp(inst.pdst[0], combine(r0, p, bop), m);
                    w.setp(inst.pdst[1], combine(r1, p, bop), m);
                }
            }
            Op::Hset2 { cmp, bop, bf } => {
                let ((a0, a1), (b0, b1)) = (hlf!(0), hlf!(1));
                let p = w.p(inst.psrc[0]);
                let r0 = combine(mask_of(|l| fcmp(cmp, a0[l], b0[l])), p, bop);
                let r1 = combine(mask_of(|l| fcmp(cmp, a1[l], b1[l])), p, bop);
                let one = if bf { 0x3c00 } else { 0xffff };
                w.wr(inst.dst, &lanes(|l| (if r0 >> l & 1 != 0 { one } else { 0 }) | (if r1 >> l & 1 != 0 { one << 16 } else { 0 })), m);
            }
            Op::Hmma { f32: is32, step, a_col, b_col } => {
                if m != 0 {
                    if m != !0 {
                        return Err(format!(
                            "kernel `{}`: HMMA with a partial warp (mask {m:#x}) at pc 0x{pc:x} `{}`",
                            env.prog.name, inst.text
                        ));
                    }
                    hmma(w, inst, is32, step, a_col, b_col);
                }
            }
            // ---------------------------------------------------------------- conversions
            Op::I2f { from, to, rnd } => {
                let v: [i128; 32] = if matches!(from, NumTy::S64 | NumTy::U64) {
                    let a = raw64!(0);
                    a.each(|x| if from == NumTy::S64 { x as i64 as i128 } else { x as i128 })
                } else {
                    let a = raw!(0);
                    let s = inst.src[0];
                    let sh = match s.sel {
                        Sel::B(n) => 8 * n as u32,
                        Sel::H(n) => 16 * n as u32,
                        Sel::H1H1 => 16,
                        _ => 0,
                    };
                    a.each(|x| {
                        let x = x >> sh;
                        let v = match from {
                            NumTy::U8 => x as u8 as i128,
                            NumTy::S8 => x as i8 as i128,
                            NumTy::U16 => x as u16 as i128,
                            NumTy::S16 => x as i16 as i128,
                            NumTy::U32 => x as i128,
                            _ => x as i32 as i128,
                        };
                        let v = if s.abs { v.abs() } else { v };
                        if s.neg {
                            -v
                        } else {
                            v
                        }
                    })
                };
                match to {
                    NumTy::F32 => {
                        let r = v.each(|x| {
                            let f = x as f32;
                            let back = f as i128;
                            let f = match rnd {
                                Round::Rp if back < x => next_up(f),
                                Round::Rm if back > x => -next_up(-f),
                                Round::Rz if x > 0 && back > x => -next_up(-f),
                                Round::Rz if x < 0 && back < x => next_up(f),
                                _ => f,
                            };
                            f.to_bits()
                        });
                        w.wr(inst.dst, &r, m);
                    }
                    NumTy::F64 => w.wr64(inst.dst, &v.each(|x| (x as f64).to_bits()), m),
                    _ => w.wr(inst.dst, &v.each(|x| d2h(x as f64) as u32), m),
                }
            }
            Op::F2i { from, to, rnd, ftz } => {
                let v: [f64; 32] = match from {
                    NumTy::F64 => dbl!(0),
                    NumTy::F16 => hlf!(0).0.each(|x| x as f64),
                    _ => flt!(0).each(|x| fz(x, ftz) as f64),
                };
                let v = v.each(|x| fround(x, rnd));
                // `as` saturates and maps NaN to 0, as the hardware does for 32-bit results
                match to {
                    NumTy::S64 => w.wr64(inst.dst, &v.each(|x| if x.is_nan() { 1 << 63 } else { x as i64 as u64 }), m),
                    NumTy::U64 => w.wr64(inst.dst, &v.each(|x| if x.is_nan() { 1 << 63 } else { x as u64 }), m),
                    _ => {
                        let r = v.each(|x| match to {
                            NumTy::U32 => x as u32,
                            NumTy::U16 => x as u16 as u32,
                            NumTy::S16 => x as i16 as i32 as u32,
                            NumTy::U8 => x as u8 as u32,
                            NumTy::S8 => x as i8 as i32 as u32,
                            _ => x as i32 as u32,
                        });
                        w.wr(inst.dst, &r, m);
                    }
                }
            }
            Op::F2f { from, to, rnd, ftz } => match (from, to) {
                (NumTy::F32, NumTy::F16) => {
                    let a = flt!(0);
                    w.wr(inst.dst, &a.each(|x| if rnd == Round::Rz { f2h_rz(fz(x, ftz)) } else { f2h(fz(x, ftz)) } as u32), m);
                }
                (NumTy::F16, NumTy::F32) => {
                    let a = hlf!(0);
                    w.wr(inst.dst, &(if inst.src[0].sel == Sel::H(1) { a.1 } else { a.0 }).each(f32::to_bits), m);
                }
                (NumTy::F32, NumTy::F64) => {
                    let a = flt!(0);
                    w.wr64(inst.dst, &a.each(|x| (x as f64).to_bits()), m);
                }
                (NumTy::F64, NumTy::F32) => {
                    let a = dbl!(0);
                    w.wr(inst.dst, &a.each(|x| (x as f32).to_bits()), m);
                }
                (NumTy::F32, NumTy::F32) => {
                    let a = flt!(0);
                    w.wr(inst.dst, &a.each(|x| fz(x, ftz).to_bits()), m);
                }
                (NumTy::F64, NumTy::F16) => {
                    let a = dbl!(0);
                    w.wr(inst.dst, &a.each(|x| d2h(x) as u32), m);
                }
                _ => return Err(format!("kernel `{}`: unimplemented conversion at pc 0x{pc:x} `{}`", env.prog.name, inst.text)),
            },
            Op::Frnd { rnd } => {
                let a = flt!(0);
                w.wr(inst.dst, &a.each(|x| (fround(x as f64, rnd) as f32).to_bits()), m);
            }
            // ---------------------------------------------------------------- warp level
            Op::Shfl(mode) => {
                let (a, b, c) = (raw!(0), raw!(1), raw!(2));
                let mut r = [0u32; 32];
                let mut ok = 0u32;
                for l in 0..32u32 {
                    if m >> l & 1 == 0 {
                        continue;
                    }
                    let (bv, cv) = (b[l as usize] & 31, c[l as usize]);
                    let (clamp, seg) = (cv & 31, cv >> 8 & 31);
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
                    r[l as usize] = a[j as usize];
                }
                w.wr(inst.dst, &r, m);
                w.setp(inst.pdst[0], ok, m);
            }
            Op::Vote { all, eq } => {
                let ballot = w.p(inst.psrc[0]) & m;
                let p = if eq {
                    ballot == m || ballot == 0
                } else if all {
                    ballot == m
                } else {
                    ballot != 0
                };
                w.wr(inst.dst, &[ballot; 32], m);
                w.setp(inst.pdst[0], (p as u32).wrapping_neg(), m);
            }
            Op::Match { all } => {
                let a = raw!(0);
                let mut r = [0u32; 32];
                for l in 0..32 {
                    r[l] = mask_of(|k| m >> k & 1 != 0 && a[k] == a[l]);
                }
                if all {
                    let same = (0..32).all(|l| m >> l & 1 == 0 || r[l] == m);
                    w.wr(inst.dst, &[if same { m } else { 0 }; 32], m);
                    w.setp(inst.pdst[0], (same as u32).wrapping_neg(), m);
                } else {
                    w.wr(inst.dst, &r, m);
                }
            }
            // ---------------------------------------------------------------- memory
            Op::Ld { space, bytes, sext } => {
                addresses(w, inst, acc);
                let n = bytes as usize;
                let mut buf = [[0u32; 32]; 4];
                for l in 0..32 {
                    if m >> l & 1 == 0 {
                        continue;
                    }
                    let a = acc.addr[l];
                    if a & (n as u64 - 1) != 0 {
                        return Err(self.fault(env, wi, pc, l, "misaligned load", a, n as u64, ""));
                    }
                    let p: *const u8 = match space {
                        Space::Global => match env.mem.ptr(a, n as u64, &mut w.hint) {
                            Some(p) => p,
                            None => return Err(self.global_fault(env, wi, pc, l, "load", a, n as u64)),
                        },
                        Space::Shared => {
                            if a + n as u64 > self.shared.len() as u64 {
                                let e = format!("the CTA has {} bytes", self.shared.len());
                                return Err(self.fault(env, wi, pc, l, "shared load out of bounds", a, n as u64, &e));
                            }
                            unsafe { self.shared.as_ptr().add(a as usize) }
                        }
                        Space::Local => match local_ptr(w, env, l, a, n) {
                            Some(p) => p,
                            None => return Err(self.fault(env, wi, pc, l, "local load out of bounds", a, n as u64, "")),
                        },
                        Space::Const => {
                            let b = &env.banks[inst.bank as usize & 7];
                            if a as usize + n > b.len() {
                                return Err(self.fault(env, wi, pc, l, "constant load out of bounds", a, n as u64, ""));
                            }
                            unsafe { b.as_ptr().add(a as usize) }
                        }
                    };
                    unsafe {
                        match n {
                            1 => buf[0][l] = if sext { *p as i8 as i32 as u32 } else { *p as u32 },
                            2 => {
                                let v = (p as *const u16).read_unaligned();
                                buf[0][l] = if sext { v as i16 as i32 as u32 } else { v as u32 };
                            }
                            _ => {
                                for k in 0..n / 4 {
                                    buf[k][l] = (p as *const u32).add(k).read_unaligned();
                                }
                            }
                        }
                    }
                }
                if inst.dst != RZ {
                    for k in 0..(n / 4).max(1) {
                        w.wr(inst.dst + k as u8, &buf[k], m);
                    }
                }
            }
            Op::St { space, bytes } => {
                addresses(w, inst, acc);
                let n = bytes as usize;
                let r = inst.src[0].val as u8;
                for l in 0..32 {
                    if m >> l & 1 == 0 {
                        continue;
                    }
                    let a = acc.addr[l];
                    if a & (n as u64 - 1) != 0 {
                        return Err(self.fault(env, wi, pc, l, "misaligned store", a, n as u64, ""));
                    }
                    let p: *mut u8 = match space {
                        Space::Global => match env.mem.ptr_mut(a, n as u64, &mut w.hint) {
                            Some(p) => p,
                            None => return Err(self.global_fault(env, wi, pc, l, "store", a, n as u64)),
                        },
                        Space::Shared => {
                            if a + n as u64 > self.shared.len() as u64 {
                                let e = format!("the CTA has {} bytes", self.shared.len());
                                return Err(self.fault(env, wi, pc, l, "shared store out of bounds", a, n as u64, &e));
                            }
                            unsafe { self.shared.as_mut_ptr().add(a as usize) }
                        }
                        _ => match local_ptr(w, env, l, a, n) {
                            Some(p) => p,
                            None => return Err(self.fault(env, wi, pc, l, "local store out of bounds", a, n as u64, "")),
                        },
                    };
                    unsafe {
                        let v = |k: usize| if r == RZ { 0 } else { w.regs[r as usize + k][l] };
                        match n {
                            1 => *p = v(0) as u8,
                            2 => (p as *mut u16).write_unaligned(v(0) as u16),
                            _ => {
                                for k in 0..n / 4 {
                                    (p as *mut u32).add(k).write_unaligned(v(k));
                                }
                            }
                        }
                    }
                }
            }
            Op::Atom { space, op, ty, ret, spin } => {
                addresses(w, inst, acc);
                let wide = matches!(ty, AtomTy::U64 | AtomTy::S64);
                let n = if wide { 8u64 } else { 4 };
                let (s0, s1) = if wide {
                    // CAS takes its swap value from the pair after the compare pair or from src[1]
                    (raw64!(0), raw64!(1))
                } else {
                    (raw!(0).each(|x| x as u64), raw!(1).each(|x| x as u64))
                };
                let _guard = (env.lock_atomics && space == Space::Global).then(|| env.mem.lock_atomics());
                let mut old = [0u64; 32];
                for l in 0..32 {
                    if m >> l & 1 == 0 {
                        continue;
                    }
                    let a = acc.addr[l];
                    let p = if space == Space::Shared {
                        if a + n > self.shared.len() as u64 {
                            return Err(self.fault(env, wi, pc, l, "shared atomic out of bounds", a, n, ""));
                        }
                        unsafe { self.shared.as_mut_ptr().add(a as usize) }
                    } else {
                        match env.mem.ptr_mut(a, n, &mut w.hint) {
                            Some(p) => p,
                            None => return Err(self.global_fault(env, wi, pc, l, "atomic", a, n)),
                        }
                    };
                    if a & (n - 1) != 0 {
                        return Err(self.fault(env, wi, pc, l, "misaligned atomic", a, n, ""));
                    }
                    unsafe {
                        let cur = if wide { (p as *const u64).read_unaligned() } else { (p as *const u32).read_unaligned() as u64 };
                        let new = atomic(op, ty, cur, s0[l], s1[l]);
                        if wide {
                            (p as *mut u64).write_unaligned(new);
                        } else {
                            (p as *mut u32).write_unaligned(new as u32);
                        }
                        old[l] = if spin { (cur == s0[l]) as u64 } else { cur };
                    }
                }
                if ret {
                    if wide {
                        w.wr64(inst.dst, &old, m);
                    } else {
                        w.wr(inst.dst, &old.each(|x| x as u32), m);
                    }
                    // ATOM's predicate says "done" (no generic-space fallback needed)
                    w.setp(inst.pdst[0], !0, m);
                }
            }
            Op::Qspc => w.setp(inst.pdst[0], 0, m),
            Op::S2r(s) => {
                let v = sreg(s, w, env, &self.id, now);
                w.wr(inst.dst, &v, m);
            }
            Op::Cs2r { sreg: s, wide } => {
                let v = sreg(s, w, env, &self.id, now);
                w.wr(inst.dst, &v, m);
                if wide && inst.dst != RZ {
                    let hi = if s == SReg::Clock { [(now >> 32) as u32; 32] } else { [0; 32] };
                    w.wr(inst.dst + 1, &hi, m);
                }
            }
            Op::B2r => {
                let v = w.bar_result;
                w.wr(inst.dst, &[v; 32], m);
                w.setp(inst.pdst[0], ((v != 0) as u32).wrapping_neg(), m);
            }
            Op::Bar(mode) => {
                let id = raw!(0)[0] as usize & 15;
                let count = raw!(1)[0];
                let pred = w.p(inst.psrc[0]);
                if m != 0 {
                    let b = &mut self.bars[id];
                    if b.arrived == 0 && b.waiting.is_empty() && b.popc == 0 && !b.or {
                        b.and = true;
                    }
                    b.popc += (pred & m).count_ones();
                    b.and &= pred & m == m;
                    b.or |= pred & m != 0;
                    b.expect = count / 32;
                    if mode != BarMode::Arv {
                        w.groups[gi].st = GState::Bar(id as u8);
                        let waiting = w.groups.iter().filter(|g| g.st == GState::Bar(id as u8)).fold(0, |a, g| a | g.mask);
                        if waiting != w.live {
                            return Ok(idx); // other threads of the warp still have to arrive
                        }
                        self.bars[id].waiting.push(wi);
                    }
                    let b = &mut self.bars[id];
                    b.arrived += 1;
                    let need = if b.expect == 0 { self.live_warps } else { b.expect };
                    if b.arrived >= need {
                        self.bar_release(id, Some(mode));
                    }
                }
            }
            Op::Membar | Op::Nop | Op::Depbar { .. } => {}
            Op::Undecodable => return Err(format!("kernel `{}`: {}", env.prog.name, inst.text)),
            // ---------------------------------------------------------------- control flow
            Op::Bra => {
                let take = m & w.p(inst.psrc[0]) & w.p(inst.psrc[1]);
                if take == gmask {
                    w.groups[gi].pc = inst.target;
                    acc.taken = true;
                } else if take != 0 {
                    w.groups[gi].mask = gmask & !take;
                    w.groups.push(Group { pc: inst.target, mask: take, st: GState::Run });
                    acc.taken = true;
                }
                w.merge_current();
            }
            Op::BraIf { converged } => {
                if (gmask == w.live) == converged && m == gmask {
                    w.groups[gi].pc = inst.target;
                    acc.taken = true;
                }
            }
            Op::Brx | Op::Ret => {
                let a = raw!(0);
                let add = if inst.op == Op::Brx { inst.target } else { 0 };
                let rest = gmask & !m;
                let mut todo = m;
                w.groups.remove(gi);
                if rest != 0 {
                    w.groups.push(Group { pc: pc + 16, mask: rest, st: GState::Run });
                }
                while todo != 0 {
                    let l = todo.trailing_zeros() as usize;
                    let t = a[l].wrapping_add(add);
                    let same = mask_of(|k| a[k] == a[l]) & todo;
                    w.groups.push(Group { pc: t, mask: same, st: GState::Run });
                    todo &= !same;
                }
                w.cur = w.groups.len() - 1;
                acc.taken = m != 0;
                w.merge_current();
            }
            Op::Call => {
                if m == gmask {
                    w.groups[gi].pc = inst.target;
                } else if m != 0 {
                    w.groups[gi].mask = gmask & !m;
                    w.groups.push(Group { pc: inst.target, mask: m, st: GState::Run });
                }
                acc.taken = m != 0;
            }
            Op::Exit => {
                let m = m & w.p(inst.psrc[0]);
                if m != 0 {
                    w.live &= !m;
                    w.groups[gi].mask &= !m;
                    if w.groups[gi].mask == 0 {
                        w.groups.remove(gi);
                    }
                    w.cur = 0;
                    w.check_sync();
                    if w.groups.is_empty() {
                        self.warp_exited();
                    }
                }
            }
            Op::Bssy(b) => {
                for l in 0..32 {
                    if m >> l & 1 != 0 {
                        w.bars[b as usize][l] = m;
                    }
                }
            }
            Op::Bsync(b) => {
                // lanes that met at this pc from different frames of a recursion wait separately
                let bars = w.bars[b as usize];
                let mut todo = m;
                let mut scopes = vec![];
                while todo != 0 {
                    let scope = bars[todo.trailing_zeros() as usize];
                    let same = mask_of(|l| bars[l] == scope) & todo;
                    scopes.push((scope, same));
                    todo &= !same;
                }
                if m != 0 && (scopes.len() > 1 || scopes[0].0 & w.live & !m != 0) {
                    if gmask & !m == 0 {
                        w.groups.remove(gi);
                    } else {
                        w.groups[gi].mask = gmask & !m;
                    }
                    for (_, mask) in scopes {
                        w.groups.push(Group { pc, mask, st: GState::Bsync(b) });
                        // pc advances on release
                    }
                    w.cur = 0;
                    w.check_sync();
                }
            }
            Op::Break(b) => {
                let m = m & w.p(inst.psrc[0]);
                if m != 0 {
                    let scope = w.bars[b as usize][m.trailing_zeros() as usize];
                    for x in w.bars[b as usize].iter_mut().filter(|x| **x == scope) {
                        *x &= !m;
                    }
                    w.check_sync();
                }
            }
            Op::BmovToReg { b, clear } => {
                let v = w.bars[b as usize];
                w.wr(inst.dst, &v, m);
                if clear {
                    for l in 0..32 {
                        if m >> l & 1 != 0 {
                            w.bars[b as usize][l] = 0;
                        }
                    }
                }
            }
            Op::BmovFromReg(b) => {
                let v = raw!(0);
                for l in 0..32 {
                    if m >> l & 1 != 0 {
                        w.bars[b as usize][l] = v[l];
                    }
                }
            }
            Op::Warpsync => {
                let need = raw!(0)[m.trailing_zeros() as usize & 31] & w.live;
                if m != 0 && need & !gmask != 0 {
                    let g = &mut w.groups[gi];
                    g.pc = pc;
                    g.st = GState::Warpsync(need);
                    w.check_sync();
                }
            }
            Op::Yield => {
                if w.groups.len() > 1 {
                    w.cur = (w.cur + 1) % w.groups.len();
                }
            }
        }
        let w = &mut self.warps[wi];
        if w.groups.len() > 1 {
            // let the other side of a divergent spin loop make progress
            if w.insts % 4096 == 0 {
                w.cur = (w.cur + 1) % w.groups.len();
            }
            w.merge_current();
        }
        Ok(idx)
    }
}

#[inline(always)]
fn cload(env: &Env, bank: u8, off: u32, pc: u32) -> SimResult<u32> {
    let b = env.banks.get(bank as usize).map(|b| b.as_slice()).unwrap_or(&[]);
    let o = off as usize;
    if o + 4 > b.len() {
        return Err(format!(
            "kernel `{}`: constant c[{bank:#x}][{off:#x}] at pc 0x{pc:x} is outside the bank ({} bytes)",
            env.prog.name,
            b.len()
        ));
    }
    Ok(u32::from_le_bytes(b[o..o + 4].try_into().unwrap()))
}
#[inline(always)]
fn hwr(w: &mut Warp, dst: u8, lo: [u16; 32], hi: [u16; 32], mrg: u8, ftz: bool, m: u32) {
    let old = w.reg(dst);
    let r = lanes(|l| {
        let (a, b) = (hftz(lo[l], ftz) as u32, hftz(hi[l], ftz) as u32);
        match mrg {
            1 => (old[l] & 0xffff_0000) | a,
            2 => (old[l] & 0xffff) | b << 16,
            _ => a | b << 16,
        }
    });
    w.wr(dst, &r, m);
}
/// First predicate: `r op p`; second: `!r op p`.
#[inline(always)]
fn set_two(w: &mut Warp, inst: &Inst, r: u32, bop: BoolOp, m: u32) {
    let p = w.p(inst.psrc[0]);
    w.setp(inst.pdst[0], combine(r, p, bop), m);
    w.setp(inst.pdst[1], combine(!r, p, bop), m);
}
#[inline(always)]
fn addresses(w: &Warp, inst: &Inst, acc: &mut Access) {
    let mr = &inst.mem;
    if mr.base == RZ {
        acc.addr = [mr.off as u64; 32];
        if !mr.wide {
            acc.addr = acc.addr.each(|a| a as u32 as u64);
        }
        return;
    }
    let lo = &w.regs[mr.base as usize];
    if mr.wide {
        let hi = &w.regs[mr.base as usize + 1];
        for l in 0..32 {
            acc.addr[l] = (lo[l] as u64 | (hi[l] as u64) << 32).wrapping_add(mr.off as u64);
        }
    } else {
        for l in 0..32 {
            acc.addr[l] = (lo[l] << mr.scale).wrapping_add(mr.off as u32) as u64;
        }
    }
}
/// Host address of a lane's local byte `a` (storage allocated on first use).
#[inline(always)]
fn local_ptr(w: &mut Warp, env: &Env, lane: usize, a: u64, n: usize) -> Option<*mut u8> {
    let size = env.local_bytes as u64;
    if a + n as u64 > size {
        return None;
    }
    if w.local.is_empty() {
        w.local = vec![0xff; size as usize * 32];
    }
    Some(unsafe { w.local.as_mut_ptr().add(lane * size as usize + a as usize) })
}
#[inline(always)]
fn sreg(s: SReg, w: &Warp, env: &Env, id: &[u32; 3], now: u64) -> V {
    let tid = |l: usize| w.index * 32 + l as u32;
    let (bx, by) = (env.block[0], env.block[1]);
    match s {
        SReg::Tid(0) => lanes(|l| tid(l) % bx),
        SReg::Tid(1) => lanes(|l| tid(l) / bx % by),
        SReg::Tid(_) => lanes(|l| tid(l) / bx / by),
        SReg::Ctaid(i) => [id[i as usize]; 32],
        SReg::NCtaId(i) => [env.grid[i as usize]; 32],
        SReg::LaneId => lanes(|l| l as u32),
        SReg::WarpId => [w.index; 32],
        SReg::Clock | SReg::GlobalTimer => [now as u32; 32],
        SReg::ClockHi => [(now >> 32) as u32; 32],
        SReg::EqMask => lanes(|l| 1 << l),
        SReg::LtMask => lanes(|l| (1u32 << l) - 1),
        SReg::LeMask => lanes(|l| ((2u64 << l) - 1) as u32),
        SReg::GtMask => lanes(|l| !((2u64 << l) - 1) as u32),
        SReg::GeMask => lanes(|l| !((1u32 << l) - 1)),
        SReg::Zero | SReg::SmId => [0; 32],
    }
}
