//! Loads and stores. Generic addresses (LD, ST) are in shared memory from [`SHARED_WINDOW`] on, else in global memory. `d` decodes an
//! instruction: its calls read printed operands from left to right. `s` executes it: `s.access.addr` has the lanes' addresses, `s.active` a
//! bit for each that executes. Tests: tests/functional.rs.

use crate::decoder::{Decoded, Decoder};
use crate::isa::*;
use crate::lanes::*;
use crate::operand::Operand;
use crate::step::{Class, SimResult, Step};

fn bytes(d: &Decoder) -> u8 {
    d.one_of(&[("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2), ("64", 8), ("128", 16)]).unwrap_or(4)
}

/// Returns true for a load that sees what other SMs wrote, so that L1 does not serve it.
fn is_strong(d: &Decoder) -> bool {
    d.has("STRONG") && (d.has("GPU") || d.has("SYS"))
}

pub fn is_prefetch(d: &Decoder) -> bool {
    d.base == "CCTL" && d.has("PF2")
}

impl Class for Memory {
    fn decode(d: &mut Decoder) -> Decoded {
        let space = match d.base {
            "LDS" | "STS" => Space::Shared,
            "LDL" | "STL" => Space::Local,
            "LDC" => Space::Const,
            "LD" | "ST" => Space::Generic,
            _ => Space::Global,
        };
        let bytes = bytes(d);
        let op = match d.base {
            "LDG" | "LD" | "LDS" | "LDL" => {
                d.opt_pred_dsts(2).dst()?.address()?;
                Memory::Ld { space, bytes, sext: d.has("S8") || d.has("S16"), strong: is_strong(d) }
            }
            "STG" | "ST" | "STS" | "STL" => {
                d.address()?.src(0)?;
                Memory::St { space, bytes }
            }
            "LDC" => {
                d.dst()?;
                match d.next() {
                    Some(Operand::CMem { bank, at }) => {
                        d.inst.bank = bank;
                        d.inst.mem = at;
                    }
                    Some(Operand::Src(s, _)) if s.kind == SrcKind::Const => {
                        d.inst.bank = s.bank;
                        d.inst.mem.off = s.val as i64;
                    }
                    _ => return Err(d.fail("constant address")),
                }
                Memory::Ld { space, bytes, sext: d.has("S8") || d.has("S16"), strong: false }
            }
            "LDSM" => {
                let [shape, count] = match d.mods[..] {
                    ["16", shape] => [shape, "1"],
                    ["16", shape, count] => [shape, count],
                    _ => return Err(d.fail("LDSM modifiers")),
                };
                if !["M88", "MT88"].contains(&shape) || !["1", "2", "4"].contains(&count) {
                    return Err(d.fail("LDSM modifiers"));
                }
                d.dst()?.address()?;
                Memory::Ldsm { matrices: count.as_bytes()[0] - b'0', transposed: shape == "MT88" }
            }
            _ if is_prefetch(d) => {
                d.address()?;
                Memory::Prefetch
            }
            // PTX isspacep: of up to two predicates, the first gets the result
            "QSPC" => {
                d.opt_pred_dsts(2);
                let _zero = d.next(); // RZ
                d.address()?;
                Memory::Qspc { shared: d.has("S") }
            }
            _ => return Ok(None),
        };
        d.inst.unit = Unit::Lsu;
        Ok(Some(Op::Memory(op)))
    }

    #[inline(always)]
    fn execute(self, s: &mut Step) -> SimResult<()> {
        match self {
            Memory::Ld { space, bytes, sext, .. } => {
                addresses(s);
                let n = bytes as usize;
                let mut buf = [[0u32; 32]; 4]; // by register and lane
                for l in lanes_in(s.active) {
                    // false: the lane reads
                    let p = place(s, space, l, n, false)?;
                    // SAFETY: `n` bytes at `p` may be read.
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
                if s.inst.dst != RZ {
                    for k in 0..(n / 4).max(1) {
                        s.warp.write(s.inst.dst + k as Reg, &buf[k], s.active);
                    }
                }
            }
            Memory::St { space, bytes } => {
                addresses(s);
                let n = bytes as usize;
                let r = s.inst.src[0].val as Reg;
                let mut buf = [[0u32; 32]; 4];
                if r != RZ {
                    for k in 0..(n / 4).max(1) {
                        buf[k] = s.warp.regs[r as usize + k];
                    }
                }
                for l in lanes_in(s.active) {
                    let p = place(s, space, l, n, true)?;
                    // SAFETY: `n` bytes at `p` may be written.
                    unsafe {
                        match n {
                            1 => *p = buf[0][l] as u8,
                            2 => (p as *mut u16).write_unaligned(buf[0][l] as u16),
                            _ => {
                                for k in 0..n / 4 {
                                    (p as *mut u32).add(k).write_unaligned(buf[k][l]);
                                }
                            }
                        }
                    }
                }
            }
            Memory::Ldsm { matrices, transposed } => load_matrices(s, matrices as usize, transposed)?,
            Memory::Prefetch => addresses(s),
            Memory::Qspc { shared } => {
                addresses(s);
                let found = if shared { in_shared_window(s) } else { 0 };
                s.set_predicate(0, found);
            }
        }
        Ok(())
    }
}

/// Where generic addresses of shared memory begin, above global memory. Kernels read it in `c[0x0][0x18]` and use 24 bits of offset.
pub const SHARED_WINDOW: u64 = 1 << 62;

/// Returns the offset of a generic address in shared memory; None: it is global.
#[inline(always)]
pub fn shared_offset(address: u64) -> Option<u64> {
    address.checked_sub(SHARED_WINDOW).filter(|&offset| offset < 1 << 24)
}

/// The lanes whose generic addresses are in shared memory.
#[inline(always)]
pub fn in_shared_window(s: &Step) -> u32 {
    (0..32).filter(|&l| shared_offset(s.access.addr[l]).is_some()).fold(0, |found, l| found | 1 << l)
}

/// Computes the addresses of all lanes into `s.access.addr`, where the timing model reads them too.
#[inline(always)]
pub fn addresses(s: &mut Step) {
    let MemRef { base, wide, uniform, uniform_wide, mut off, scale } = s.inst.mem;
    if uniform != RZ {
        let word = |r: Reg| s.warp.regs[r as usize][0];
        let high = if uniform_wide { word(uniform + 1) } else { 0 };
        off = off.wrapping_add((word(uniform) as u64 | (high as u64) << 32) as i64);
    }
    s.access.addr = if base == RZ {
        [if wide | uniform_wide { off as u64 } else { off as u32 as u64 }; 32]
    } else if wide {
        let (lo, hi) = (&s.warp.regs[base as usize], &s.warp.regs[base as usize + 1]);
        lanes(|l| (lo[l] as u64 | (hi[l] as u64) << 32).wrapping_add(off as u64))
    } else {
        let lo = &s.warp.regs[base as usize];
        if uniform_wide {
            lanes(|l| ((lo[l] << scale) as u64).wrapping_add(off as u64))
        } else {
            lanes(|l| (lo[l] << scale).wrapping_add(off as u32) as u64)
        }
    };
}

/// LDSM: lane 4g+t gets elements 2t and 2t+1 of row g of each matrix of 8x8 halves, or `transposed` of column g. On sm_75 the addresses of
/// all lanes must be valid, even those whose rows no matrix has.
#[inline(always)]
fn load_matrices(s: &mut Step, matrices: usize, transposed: bool) -> SimResult<()> {
    if !s.has_whole_warp("LDSM")? {
        return Ok(());
    }
    addresses(s);
    let mut rows = [[0u32; 4]; 32];
    for l in 0..32 {
        let p = place(s, Space::Shared, l, 16, false)?;
        // SAFETY: 16 bytes at `p` may be read.
        rows[l] = unsafe { (p as *const [u32; 4]).read_unaligned() };
    }
    for i in 0..matrices {
        let rows = &rows[8 * i..8 * i + 8];
        let half = |row: usize, column: usize| rows[row & 7][column >> 1 & 3] >> (16 * (column & 1)) & 0xffff;
        let v = if transposed {
            lanes(|l| half(2 * (l & 3), l >> 2) | half(2 * (l & 3) + 1, l >> 2) << 16)
        } else {
            lanes(|l| rows[l >> 2 & 7][l & 3])
        };
        s.warp.write(s.inst.dst + i as Reg, &v, !0);
    }
    Ok(())
}

/// Returns the host address of the `n` bytes that lane `l` reads, or with `write` writes, or a fault's text. `s.warp.hint` is the buffer of
/// global memory where the search begins: the last one found.
#[inline(always)]
fn place(s: &mut Step, space: Space, l: usize, n: usize, write: bool) -> SimResult<*mut u8> {
    let (a, n) = (s.access.addr[l], n as u64);
    let access = if write { "store" } else { "load" };
    if a & (n - 1) != 0 {
        return Err(s.fault(l, &format!("misaligned {access}"), a, n, ""));
    }
    let (space, a) = match (space, shared_offset(a)) {
        (Space::Generic, Some(offset)) => (Space::Shared, offset),
        (Space::Generic, None) => (Space::Global, a),
        _ => (space, a),
    };
    let found = match space {
        Space::Generic => None,
        Space::Global => s.env.mem.find(a, n, write, &mut s.warp.hint),
        Space::Shared => s.shared.get_mut(a as usize..(a + n) as usize).map(<[u8]>::as_mut_ptr),
        Space::Local => local(s, l, a, n),
        // no instruction writes constants, so the cast to *mut is harmless
        Space::Const => s.env.banks[s.inst.bank as usize & 7].get(a as usize..(a + n) as usize).map(|b| b.as_ptr().cast_mut()),
    };
    found.ok_or_else(|| out_of_bounds(s, space, l, access, a, n))
}

/// Host address of a lane's local byte `a` (storage allocated on first use).
#[inline(always)]
fn local(s: &mut Step, lane: usize, a: u64, n: u64) -> Option<*mut u8> {
    let size = s.env.local_bytes as u64;
    if a + n > size {
        return None;
    }
    if s.warp.local.is_empty() {
        s.warp.local = vec![0xff; size as usize * 32];
    }
    // SAFETY: each of the 32 lanes has `size` bytes.
    Some(unsafe { s.warp.local.as_mut_ptr().add(lane * size as usize + a as usize) })
}

#[cold]
fn out_of_bounds(s: &Step, space: Space, lane: usize, access: &str, addr: u64, bytes: u64) -> String {
    let (space, extra) = match space {
        Space::Global | Space::Generic => return global_fault(s, lane, access, addr, bytes),
        Space::Shared => ("shared", format!("the CTA has {} bytes", s.shared.len())),
        Space::Local => ("local", String::new()),
        Space::Const => ("constant", String::new()),
    };
    s.fault(lane, &format!("{space} {access} out of bounds"), addr, bytes, &extra)
}

/// Returns the text of a global access that no buffer permits.
#[cold]
pub fn global_fault(s: &Step, lane: usize, access: &str, addr: u64, bytes: u64) -> String {
    let what = match access {
        "store" | "atomic" if s.env.mem.find(addr, bytes, false, &mut 0).is_some() => format!("global {access} to a read-only buffer"),
        _ => format!("global {access} outside every buffer"),
    };
    s.fault(lane, &what, addr, bytes, &s.env.mem.describe(addr))
}
