//! Runs nvdisasm and turns its text + encodings into decoded instructions.

use crate::isa::*;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// One instruction as printed by nvdisasm.
pub struct RawInst {
    pub pc: u32,
    pub text: String,
    pub enc: u128,
}

/// One kernel as printed by nvdisasm.
#[derive(Default)]
pub struct Listing {
    pub insts: Vec<RawInst>,
    pub labels: HashMap<String, u32>,
    /// the printed section without the encodings
    pub text: String,
}

/// Locate nvdisasm: $VOLTA_SIM_NVDISASM, PATH.
fn find_nvdisasm() -> Result<PathBuf, String> {
    if let Some(p) = std::env::var_os("VOLTA_SIM_NVDISASM") {
        return Ok(p.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join("nvdisasm"))
        .find(|p| p.is_file())
        .ok_or_else(|| "nvdisasm not found: set VOLTA_SIM_NVDISASM (triton's wheel has one) or PATH".into())
}

/// A file in the temporary directory, removed when dropped.
struct TempFile(PathBuf);

impl TempFile {
    fn new(content: &[u8]) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let n = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("volta-sim-{}-{n}.cubin", std::process::id()));
            let fail = |e: std::io::Error| format!("{}: {e}", path.display());
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                // left over from a dead process of the same number
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(fail(e)),
                Ok(mut file) => {
                    let guard = TempFile(path.clone());
                    return file.write_all(content).map(|()| guard).map_err(fail);
                }
            }
        }
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // nothing can be done about a file that does not go away
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Disassemble `cubin` with the given nvdisasm, or the one that is found; returns kernel name -> listing.
pub fn disassemble(cubin: &[u8], nvdisasm: Option<&Path>) -> Result<HashMap<String, Listing>, String> {
    let exe = nvdisasm.map_or_else(find_nvdisasm, |p| Ok(p.to_path_buf()))?;
    let file = TempFile::new(cubin)?;
    let out = Command::new(&exe).arg("-c").arg("-hex").arg(&file.0).output().map_err(|e| format!("{}: {e}", exe.display()))?;
    if !out.status.success() {
        return Err(format!("nvdisasm failed: {}", String::from_utf8_lossy(&out.stderr)));
    }
    Ok(parse_listing(&String::from_utf8_lossy(&out.stdout)))
}

fn parse_listing(text: &str) -> HashMap<String, Listing> {
    let mut all: HashMap<String, Listing> = HashMap::new();
    let mut kernel: Option<&str> = None;
    let mut pending: Vec<String> = vec![];
    for line in text.lines() {
        let t = line.trim();
        if let Some(rest) = t.strip_prefix(".section").filter(|r| r.starts_with(char::is_whitespace)) {
            let name = rest.trim().split(',').next().unwrap_or("");
            kernel = name.strip_prefix(".text.").map(|k| k.trim_matches('"'));
            pending.clear();
        }
        let Some(k) = kernel else { continue };
        let l = all.entry(k.to_string()).or_default();
        let shown = line.split("/* 0x").next().unwrap_or("").trim_end();
        if !shown.is_empty() {
            l.text.push_str(shown);
            l.text.push('\n');
        }
        if let Some(rest) = t.strip_prefix("/*") {
            let Some(end) = rest.find("*/") else { continue };
            let inner = rest[..end].trim();
            if let Some(hex) = inner.strip_prefix("0x") {
                // second half of an encoding
                if let (Ok(v), Some(last)) = (u64::from_str_radix(hex, 16), l.insts.last_mut()) {
                    last.enc |= (v as u128) << 64;
                }
                continue;
            }
            let Ok(pc) = u32::from_str_radix(inner, 16) else { continue };
            let body = &rest[end + 2..];
            let semi = body.rfind(';').unwrap_or(body.len());
            let enc = body[semi..]
                .find("/* 0x")
                .and_then(|p| {
                    let h = &body[semi + p + 5..];
                    h.find("*/").and_then(|e| u64::from_str_radix(h[..e].trim(), 16).ok())
                })
                .unwrap_or(0);
            let mut txt = body[..semi].trim().trim_start_matches('{').trim().to_string();
            if let Some(p) = txt.find("(*") {
                txt.truncate(p);
            }
            for lab in pending.drain(..) {
                l.labels.insert(lab, pc);
            }
            l.insts.push(RawInst { pc, text: txt.trim().to_string(), enc: enc as u128 });
        } else if t.ends_with(':') && !t.contains(' ') {
            pending.push(t[..t.len() - 1].to_string());
        }
    }
    all
}

fn decode_ctrl(enc: u128) -> Ctrl {
    let c = (enc >> 105) as u32;
    Ctrl {
        stall: (c & 15) as u8,
        yield_: c >> 4 & 1 == 0,
        wr_sb: (c >> 5 & 7) as u8,
        rd_sb: (c >> 8 & 7) as u8,
        wait: (c >> 11 & 63) as u8, // bits 17..20 are the reuse flags, also printed as .reuse
    }
}

/// A parsed operand, before an opcode gives it a meaning.
#[derive(Clone, Debug)]
enum Opd {
    Src(Src, bool /* .COL */),
    Pred(PredOp),
    PredReg,
    Mem(MemRef),
    CMem { bank: u8, base: u8, off: i64 },
    Name(String),
    B(u8),
    Sb(u8),
    Label(u32),
}

fn parse_int(s: &str) -> Option<i64> {
    let (neg, t) = match s.strip_prefix('-') {
        Some(r) => (true, r),
        None => (false, s.strip_prefix('+').unwrap_or(s)),
    };
    let v = if let Some(h) = t.strip_prefix("0x") { u64::from_str_radix(h, 16).ok()? as i64 } else { return None };
    Some(if neg { v.wrapping_neg() } else { v })
}

fn parse_reg(s: &str) -> Option<u8> {
    if s == "RZ" {
        return Some(RZ);
    }
    s.strip_prefix('R')?.parse::<u8>().ok()
}

fn split_operands(s: &str) -> Vec<String> {
    let mut out = vec![];
    let (mut depth, mut cur) = (0, String::new());
    for c in s.chars() {
        match c {
            '[' | '(' => depth += 1,
            ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                out.push(cur.trim().to_string());
                cur.clear();
                continue;
            }
            _ => {}
        }
        cur.push(c);
    }
    if !cur.trim().is_empty() {
        out.push(cur.trim().to_string());
    }
    out
}

/// Parses the inside of `[...]`; the flag says that there is no base register.
fn parse_mem(inner: &str) -> Option<(MemRef, bool)> {
    let (mut m, mut abs) = (MemRef { base: RZ, wide: false, off: 0, scale: 0 }, true);
    // terms separated by '+'; a term may be "-0x10"
    for term in inner.split('+') {
        let term = term.trim();
        if term.is_empty() {
            continue;
        }
        if let Some(v) = parse_int(term) {
            m.off = m.off.wrapping_add(v);
            continue;
        }
        let mut parts = term.split('.');
        m.base = parse_reg(parts.next()?)?;
        abs = false;
        for p in parts {
            match p {
                "X4" => m.scale = 2,
                "X8" => m.scale = 3,
                "X16" => m.scale = 4,
                "64" => m.wide = true,
                "U32" | "reuse" => {}
                _ => return None,
            }
        }
    }
    Some((m, abs))
}

fn parse_operand(s: &str, enc: u128, labels: &HashMap<String, u32>) -> Option<Opd> {
    let mut t = s.trim();
    if let Some(l) = t.strip_prefix("`(") {
        let name = l.trim_end_matches(')');
        return Some(Opd::Label(*labels.get(name)?));
    }
    if t.starts_with("32@") {
        // 32@lo((sym + .L_x_1@srel)) / 32@hi(...)
        if t.starts_with("32@hi") {
            return Some(Opd::Src(Src { kind: SrcKind::Imm, val: 0, ..Src::ZERO }, false));
        }
        let p = t.find(".L")?;
        let end = t[p..].find('@').map_or(t.len(), |e| p + e);
        let v = *labels.get(&t[p..end])?;
        return Some(Opd::Src(Src { kind: SrcKind::Imm, val: v, ..Src::ZERO }, false));
    }
    if t.starts_with('[') {
        let (m, _) = parse_mem(t.strip_prefix('[')?.strip_suffix(']')?)?;
        return Some(Opd::Mem(m));
    }
    // immediates first: the sign belongs to the literal
    if let Some(v) = parse_int(t) {
        return Some(Opd::Src(Src { kind: SrcKind::Imm, val: v as u32, ..Src::ZERO }, false));
    }
    let first = t.trim_start_matches(['-', '+', '|']);
    if first.starts_with(|c: char| c.is_ascii_digit()) || first.starts_with("INF") || first.starts_with("QNAN") || first.starts_with("SNAN")
    {
        // float literal: take the bits from the encoding
        return Some(Opd::Src(Src { kind: SrcKind::Imm, val: (enc >> 32) as u32, ..Src::ZERO }, false));
    }
    let (mut neg, mut inv, mut abs, mut not) = (false, false, false, false);
    loop {
        if let Some(r) = t.strip_prefix('-') {
            neg = !neg;
            t = r;
        } else if let Some(r) = t.strip_prefix('~') {
            inv = true;
            t = r;
        } else if let Some(r) = t.strip_prefix('!') {
            not = true;
            t = r;
        } else if let Some(r) = t.strip_prefix('|') {
            abs = true;
            t = r;
        } else {
            break;
        }
    }
    let t: String = t.replace('|', "");
    let t = t.as_str();
    let mut src = Src { neg, abs, inv, ..Src::ZERO };
    if let Some(c) = t.strip_prefix("c[") {
        let e = c.find(']')?;
        let bank = parse_int(&c[..e])? as u8;
        let rest = c[e + 1..].strip_prefix('[')?;
        let e2 = rest.find(']')?;
        let (m, absolute) = parse_mem(&rest[..e2])?;
        if !absolute {
            return Some(Opd::CMem { bank, base: m.base, off: m.off });
        }
        src.kind = SrcKind::Const;
        src.bank = bank;
        src.val = m.off as u32;
        for p in rest[e2 + 1..].split('.').filter(|p| !p.is_empty()) {
            src.sel = parse_sel(p)?;
        }
        return Some(Opd::Src(src, false));
    }
    let mut parts = t.split('.');
    let head = parts.next()?;
    if let Some(r) = parse_reg(head) {
        src.val = r as u32;
        let mut col = false;
        for p in parts {
            match p {
                "reuse" => src.reuse = true,
                "COL" => col = true,
                "ROW" => {}
                _ => src.sel = parse_sel(p)?,
            }
        }
        return Some(Opd::Src(src, col));
    }
    if head == "PR" {
        return Some(Opd::PredReg);
    }
    if head == "PT" {
        return Some(Opd::Pred(PredOp { idx: PT, neg: not }));
    }
    if let Some(n) = head.strip_prefix('P').and_then(|n| n.parse::<u8>().ok()) {
        return Some(Opd::Pred(PredOp { idx: n, neg: not }));
    }
    if let Some(n) = head.strip_prefix("SB").and_then(|n| n.parse::<u8>().ok()) {
        return Some(Opd::Sb(n));
    }
    if let Some(n) = head.strip_prefix('B').and_then(|n| n.parse::<u8>().ok()) {
        return Some(Opd::B(n));
    }
    Some(Opd::Name(t.to_string()))
}

fn parse_sel(p: &str) -> Option<Sel> {
    Some(match p {
        "H0_H0" => Sel::H0H0,
        "H1_H1" => Sel::H1H1,
        "H0" => Sel::H(0),
        "H1" => Sel::H(1),
        "B0" => Sel::B(0),
        "B1" => Sel::B(1),
        "B2" => Sel::B(2),
        "B3" => Sel::B(3),
        "H1_H0" => Sel::None,
        _ => return None,
    })
}

fn parse_cmp(m: &str) -> Option<Cmp> {
    Some(match m {
        "F" => Cmp::F,
        "LT" => Cmp::Lt,
        "EQ" => Cmp::Eq,
        "LE" => Cmp::Le,
        "GT" => Cmp::Gt,
        "NE" => Cmp::Ne,
        "GE" => Cmp::Ge,
        "NUM" => Cmp::Num,
        "NAN" => Cmp::Nan,
        "LTU" => Cmp::Ltu,
        "EQU" => Cmp::Equ,
        "LEU" => Cmp::Leu,
        "GTU" => Cmp::Gtu,
        "NEU" => Cmp::Neu,
        "GEU" => Cmp::Geu,
        "T" => Cmp::T,
        _ => return None,
    })
}

fn num_ty(m: &str) -> Option<NumTy> {
    Some(match m {
        "U8" => NumTy::U8,
        "S8" => NumTy::S8,
        "U16" => NumTy::U16,
        "S16" => NumTy::S16,
        "U32" => NumTy::U32,
        "S32" => NumTy::S32,
        "U64" => NumTy::U64,
        "S64" => NumTy::S64,
        "F16" => NumTy::F16,
        "F32" => NumTy::F32,
        "F64" => NumTy::F64,
        _ => return None,
    })
}

fn parse_sreg(n: &str) -> Option<SReg> {
    Some(match n {
        "SR_TID.X" => SReg::Tid(0),
        "SR_TID.Y" => SReg::Tid(1),
        "SR_TID.Z" => SReg::Tid(2),
        "SR_CTAID.X" => SReg::Ctaid(0),
        "SR_CTAID.Y" => SReg::Ctaid(1),
        "SR_CTAID.Z" => SReg::Ctaid(2),
        "SR_NCTAID.X" => SReg::NCtaId(0),
        "SR_NCTAID.Y" => SReg::NCtaId(1),
        "SR_NCTAID.Z" => SReg::NCtaId(2),
        "SR_LANEID" => SReg::LaneId,
        "SR_WARPID" | "SR_VIRTID" => SReg::WarpId,
        "SR_CLOCKLO" => SReg::Clock,
        "SR_CLOCKHI" => SReg::ClockHi,
        "SR_EQMASK" => SReg::EqMask,
        "SR_LTMASK" => SReg::LtMask,
        "SR_LEMASK" => SReg::LeMask,
        "SR_GTMASK" => SReg::GtMask,
        "SR_GEMASK" => SReg::GeMask,
        "SR_GLOBALTIMERLO" => SReg::GlobalTimer,
        "SRZ" => SReg::Zero,
        "SR_SMID" | "SR_VIRTUALSMID" => SReg::SmId,
        _ => return None,
    })
}

/// Decode one instruction. The error names the instruction and its pc.
pub fn decode(raw: &RawInst, labels: &HashMap<String, u32>) -> Result<Inst, String> {
    let fail = |why: &str| format!("cannot decode instruction at pc 0x{:x}: `{}` ({why})", raw.pc, raw.text);
    let mut text = raw.text.as_str();
    let mut guard = PredOp::TRUE;
    if let Some(r) = text.strip_prefix('@') {
        let (p, rest) = r.split_once(' ').ok_or_else(|| fail("guard"))?;
        guard.neg = p.starts_with('!');
        let p = p.trim_start_matches('!');
        guard.idx = if p == "PT" { PT } else { p.get(1..).and_then(|n| n.parse().ok()).ok_or_else(|| fail("guard"))? };
        text = rest.trim();
    }
    let (mnem, rest) = text.split_once(' ').unwrap_or((text, ""));
    let mnem = mnem.trim();
    let mut parts = mnem.split('.');
    let base = parts.next().unwrap_or("");
    let mods: Vec<&str> = parts.collect();
    let has = |m: &str| mods.contains(&m);

    let mut inst = Inst {
        pc: raw.pc,
        op: Op::Nop,
        guard,
        dst: RZ,
        pdst: [PT; 2],
        src: [Src::ZERO; 3],
        psrc: [PredOp::TRUE; 3],
        mem: MemRef { base: RZ, wide: false, off: 0, scale: 0 },
        bank: 0,
        target: u32::MAX,
        ctrl: decode_ctrl(raw.enc),
        unit: Unit::Alu,
        mnemonic: mnem.to_string(),
        text: raw.text.clone(),
    };

    let mut opds = vec![];
    if base == "BRX" || base == "JMX" {
        // "BRX R2 -0x940"
        let (r, off) = rest.trim().split_once(' ').unwrap_or((rest.trim(), "0x0"));
        inst.src[0] = Src { val: parse_reg(r.trim()).ok_or_else(|| fail("BRX register"))? as u32, ..Src::ZERO };
        inst.target = (raw.pc as i64 + 16 + parse_int(off.trim()).ok_or_else(|| fail("BRX offset"))?) as u32;
        inst.op = Op::Brx;
        inst.unit = Unit::Ctl;
        return Ok(inst);
    }
    let rest_norm = if base == "RET" {
        // "RET.REL.NODEC R20 `(kernel)"
        rest.trim().split(' ').next().unwrap_or("").to_string()
    } else {
        rest.to_string()
    };
    let toks = split_operands(&rest_norm);
    for (i, o) in toks.iter().enumerate() {
        let p = parse_operand(o, raw.enc, labels).ok_or_else(|| fail(&format!("operand `{o}`")))?;
        // two half immediates are one 32-bit immediate in the encoding
        if base.starts_with('H') && i > 0 {
            if let (Opd::Src(a, _), Some(Opd::Src(b, _))) = (&p, opds.last()) {
                let lit = |s: &str| {
                    parse_int(s).is_none()
                        && s.trim_start_matches(['-', '+']).starts_with(|c: char| c.is_ascii_digit() || c == 'I' || c == 'Q')
                };
                if a.kind == SrcKind::Imm && b.kind == SrcKind::Imm && lit(o) && lit(&toks[i - 1]) {
                    continue;
                }
            }
        }
        opds.push(p);
    }

    // ---- helpers on the operand list -------------------------------------------------
    let mut it = opds.into_iter().peekable();
    macro_rules! dst {
        () => {
            match it.next() {
                Some(Opd::Src(s, _)) if s.kind == SrcKind::Reg => inst.dst = s.val as u8,
                _ => return Err(fail("destination register expected")),
            }
        };
    }
    macro_rules! opt_pdsts {
        () => {{
            let mut n = 0;
            while let Some(Opd::Pred(p)) = it.peek() {
                if n == 2 {
                    break;
                }
                inst.pdst[n] = p.idx;
                n += 1;
                it.next();
            }
        }};
    }
    macro_rules! src {
        ($i:expr) => {
            match it.next() {
                Some(Opd::Src(s, _)) => inst.src[$i] = s,
                _ => return Err(fail("source operand expected")),
            }
        };
    }
    macro_rules! opt_psrcs {
        () => {{
            let mut n = 0;
            while let Some(Opd::Pred(p)) = it.peek() {
                if n == 3 {
                    break;
                }
                inst.psrc[n] = *p;
                n += 1;
                it.next();
            }
            n
        }};
    }
    macro_rules! imm {
        () => {
            match it.next() {
                Some(Opd::Src(s, _)) if s.kind == SrcKind::Imm => s.val,
                _ => return Err(fail("immediate expected")),
            }
        };
    }
    let cmp = || mods.iter().find_map(|m| parse_cmp(m)).ok_or_else(|| fail("comparison"));
    let bop = if has("OR") {
        BoolOp::Or
    } else if has("XOR") {
        BoolOp::Xor
    } else {
        BoolOp::And
    };
    let rnd = if has("RZ") {
        Round::Rz
    } else if has("RM") {
        Round::Rm
    } else if has("RP") {
        Round::Rp
    } else {
        Round::Rn
    };
    let irnd = if has("TRUNC") {
        F2iRound::Trunc
    } else if has("FLOOR") {
        F2iRound::Floor
    } else if has("CEIL") {
        F2iRound::Ceil
    } else {
        F2iRound::Near
    };
    let (ftz, sat) = (has("FTZ"), has("SAT"));
    let signed = !has("U32");
    let mrg = if has("MRG_H0") {
        1
    } else if has("MRG_H1") {
        2
    } else {
        0
    };
    let allow = |ok: &[&str]| -> Result<(), String> {
        for m in &mods {
            if !ok.contains(m) {
                return Err(fail(&format!("modifier .{m}")));
            }
        }
        Ok(())
    };
    let bytes = || -> u8 {
        for m in &mods {
            match *m {
                "U8" | "S8" => return 1,
                "U16" | "S16" => return 2,
                "64" => return 8,
                "128" => return 16,
                _ => {}
            }
        }
        4
    };

    use Unit::*;
    match base {
        "MOV" => {
            dst!();
            src!(0);
            inst.op = Op::Mov;
        }
        "SEL" | "FSEL" => {
            dst!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = if base == "SEL" { Op::Sel } else { Op::Fsel };
        }
        "IADD3" => {
            allow(&["X"])?;
            dst!();
            opt_pdsts!();
            for i in 0..3 {
                src!(i);
            }
            inst.psrc = [PredOp::FALSE; 3];
            opt_psrcs!();
            inst.op = Op::Iadd3 { x: has("X") };
        }
        "IMAD" => {
            allow(&["MOV", "IADD", "SHL", "U32", "X", "WIDE", "HI"])?;
            dst!();
            opt_pdsts!();
            for i in 0..3 {
                src!(i);
            }
            inst.psrc = [PredOp::FALSE; 3];
            opt_psrcs!();
            inst.op = if has("WIDE") {
                Op::ImadWide { signed, x: has("X") }
            } else if has("HI") {
                Op::ImadHi { signed }
            } else {
                Op::Imad { x: has("X") }
            };
            inst.unit = Fma;
        }
        "LEA" => {
            allow(&["HI", "X", "SX32"])?;
            dst!();
            opt_pdsts!();
            src!(0);
            src!(1);
            // LEA.HI has the high word as third source, except in the SX32 form
            if has("HI") && !has("SX32") {
                src!(2);
            }
            let shift = match it.peek() {
                Some(Opd::Src(s, _)) if s.kind == SrcKind::Imm => {
                    let v = s.val;
                    it.next();
                    v as u8
                }
                _ => 0,
            };
            inst.psrc = [PredOp::FALSE; 3];
            opt_psrcs!();
            inst.op = Op::Lea { hi: has("HI"), x: has("X"), sx32: has("SX32"), shift };
        }
        "LOP3" => {
            allow(&["LUT", "PAND"])?;
            opt_pdsts!();
            dst!();
            for i in 0..3 {
                src!(i);
            }
            let lut = imm!() as u8;
            opt_psrcs!();
            inst.op = Op::Lop3 { lut, pand: has("PAND") };
        }
        "PLOP3" => {
            opt_pdsts!();
            let mut n = 0;
            while let Some(Opd::Pred(p)) = it.peek() {
                if n < 3 {
                    inst.psrc[n] = *p;
                }
                n += 1;
                it.next();
            }
            let lut = imm!() as u8;
            let lut2 = imm!() as u8;
            inst.op = Op::Plop3 { lut, lut2 };
        }
        "SHF" => {
            allow(&["L", "R", "W", "HI", "U32", "S32", "U64", "S64"])?;
            dst!();
            for i in 0..3 {
                src!(i);
            }
            inst.op =
                Op::Shf { left: has("L"), wrap: has("W"), hi: has("HI"), signed: has("S32") || has("S64"), wide: has("U64") || has("S64") };
        }
        "ISETP" => {
            opt_pdsts!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Isetp { cmp: cmp()?, signed, bop, ex: has("EX") };
        }
        "IMNMX" => {
            allow(&["U32"])?;
            dst!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Imnmx { signed };
        }
        "PRMT" => {
            allow(&[])?;
            dst!();
            for i in 0..3 {
                src!(i);
            }
            inst.op = Op::Prmt;
        }
        "IABS" | "POPC" | "FLO" | "BREV" => {
            allow(&["U32", "SH"])?;
            dst!();
            opt_pdsts!();
            src!(0);
            inst.op = match base {
                "IABS" => Op::Iabs,
                "POPC" => Op::Popc,
                "FLO" => Op::Flo { signed, sh: has("SH") },
                _ => Op::Brev,
            };
            inst.unit = if base == "IABS" { Alu } else { Xu };
        }
        "VABSDIFF" => {
            allow(&["U32"])?;
            dst!();
            for i in 0..3 {
                src!(i);
            }
            inst.op = Op::Vabsdiff { signed };
        }
        "BMSK" => {
            dst!();
            src!(0);
            src!(1);
            inst.op = Op::Bmsk { wrap: has("W") };
        }
        "SGXT" => {
            dst!();
            src!(0);
            src!(1);
            inst.op = Op::Sgxt { signed };
        }
        "P2R" => {
            allow(&["B1", "B2", "B3"])?;
            let byte = ["B1", "B2", "B3"].iter().position(|b| has(b)).map_or(0, |i| i + 1);
            dst!();
            it.next();
            src!(0);
            src!(1);
            inst.op = Op::P2r { shift: 8 * byte as u32 };
        }
        "R2P" => {
            it.next();
            src!(0);
            src!(1);
            inst.op = Op::R2p;
        }
        "FADD" | "FMUL" | "FFMA" => {
            allow(&["FTZ", "SAT", "RZ", "RM", "RP", "RN"])?;
            dst!();
            src!(0);
            src!(1);
            if base == "FFMA" {
                src!(2);
            }
            inst.op = match base {
                "FADD" => Op::Fadd { ftz, sat, rnd },
                "FMUL" => Op::Fmul { ftz, sat, rnd },
                _ => Op::Ffma { ftz, sat, rnd },
            };
            inst.unit = Fma;
        }
        "FMNMX" => {
            allow(&["FTZ"])?;
            dst!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Fmnmx { ftz };
        }
        "FSETP" | "DSETP" => {
            opt_pdsts!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = if base == "FSETP" { Op::Fsetp { cmp: cmp()?, bop, ftz } } else { Op::Dsetp { cmp: cmp()?, bop } };
            if base == "DSETP" {
                inst.unit = Fp64;
            }
        }
        "FSET" => {
            dst!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Fset { cmp: cmp()?, bop, ftz, bf: has("BF") };
        }
        "FCHK" => {
            opt_pdsts!();
            src!(0);
            src!(1);
            inst.op = Op::Fchk;
            inst.unit = Xu;
        }
        "MUFU" => {
            dst!();
            src!(0);
            let f = match *mods.first().ok_or_else(|| fail("MUFU function"))? {
                "RCP" => Mufu::Rcp,
                "RSQ" => Mufu::Rsq,
                "EX2" => Mufu::Ex2,
                "LG2" => Mufu::Lg2,
                "SIN" => Mufu::Sin,
                "COS" => Mufu::Cos,
                "SQRT" => Mufu::Sqrt,
                "RCP64H" => Mufu::Rcp64h,
                "RSQ64H" => Mufu::Rsq64h,
                _ => return Err(fail("MUFU function")),
            };
            inst.op = Op::Mufu(f);
            inst.unit = Xu;
        }
        "DADD" | "DMUL" | "DFMA" => {
            allow(&[])?;
            dst!();
            src!(0);
            src!(1);
            if base == "DFMA" {
                src!(2);
            }
            inst.op = match base {
                "DADD" => Op::Dadd,
                "DMUL" => Op::Dmul,
                _ => Op::Dfma,
            };
            inst.unit = Fp64;
        }
        "HADD2" | "HMUL2" | "HFMA2" => {
            allow(&["F32", "SAT", "FTZ", "MRG_H0", "MRG_H1", "MMA"])?;
            dst!();
            src!(0);
            src!(1);
            if base == "HFMA2" {
                src!(2);
            }
            inst.op = match base {
                "HADD2" => Op::Hadd2 { f32: has("F32"), sat, ftz, mrg },
                "HMUL2" => Op::Hmul2 { sat, ftz, mrg },
                _ => Op::Hfma2 { sat, ftz, mrg },
            };
            inst.unit = Fp16;
        }
        "HSETP2" => {
            opt_pdsts!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Hsetp2 { cmp: cmp()?, bop, hand: has("H_AND") };
            inst.unit = Fp16;
        }
        "HSET2" => {
            dst!();
            src!(0);
            src!(1);
            opt_psrcs!();
            inst.op = Op::Hset2 { cmp: cmp()?, bop, bf: has("BF") };
            inst.unit = Fp16;
        }
        "HMMA" => {
            // HMMA.884.F32.F32.STEPn D, A.ROW, B.COL, C
            if mods.first() != Some(&"884") {
                return Err(fail("only HMMA.884 exists on sm_70"));
            }
            let f32_ = match (mods.get(1), mods.get(2)) {
                (Some(&"F32"), Some(&"F32")) => true,
                (Some(&"F16"), Some(&"F16")) => false,
                _ => return Err(fail("HMMA accumulator types")),
            };
            let step = mods.get(3).and_then(|m| m.strip_prefix("STEP")).and_then(|n| n.parse().ok()).ok_or_else(|| fail("HMMA step"))?;
            dst!();
            let mut cols = [false; 2];
            for (i, c) in cols.iter_mut().enumerate() {
                match it.next() {
                    Some(Opd::Src(s, col)) => {
                        inst.src[i] = s;
                        *c = col;
                    }
                    _ => return Err(fail("HMMA operand")),
                }
            }
            src!(2);
            inst.op = Op::Hmma { f32: f32_, step, a_col: cols[0], b_col: cols[1] };
            inst.unit = Tensor;
        }
        "I2F" => {
            dst!();
            src!(0);
            let mut to = NumTy::F32;
            let mut from = NumTy::S32;
            for m in &mods {
                match num_ty(m) {
                    Some(t @ (NumTy::F16 | NumTy::F32 | NumTy::F64)) => to = t,
                    Some(t) => from = t,
                    None if ["RP", "RM", "RZ", "RN"].contains(m) => {}
                    None => return Err(fail("I2F modifier")),
                }
            }
            inst.op = Op::I2f { from, to, rnd };
            inst.unit = Xu;
        }
        "F2I" => {
            dst!();
            src!(0);
            let mut from = NumTy::F32;
            let mut to = NumTy::S32;
            for m in &mods {
                match num_ty(m) {
                    Some(t @ (NumTy::F16 | NumTy::F32 | NumTy::F64)) => from = t,
                    Some(t) => to = t,
                    None if ["TRUNC", "FLOOR", "CEIL", "NTZ", "FTZ", "RN"].contains(m) => {}
                    None => return Err(fail("F2I modifier")),
                }
            }
            inst.op = Op::F2i { from, to, rnd: irnd, ftz };
            inst.unit = Xu;
        }
        "F2F" => {
            dst!();
            src!(0);
            let tys: Vec<NumTy> = mods.iter().filter_map(|m| num_ty(m)).collect();
            if tys.len() != 2 {
                return Err(fail("F2F types"));
            }
            inst.op = Op::F2f { to: tys[0], from: tys[1], rnd, ftz };
            inst.unit = Xu;
        }
        "FRND" => {
            allow(&["TRUNC", "FLOOR", "CEIL", "FTZ"])?;
            dst!();
            src!(0);
            inst.op = Op::Frnd { rnd: irnd };
            inst.unit = Xu;
        }
        "SHFL" => {
            opt_pdsts!();
            dst!();
            for i in 0..3 {
                src!(i);
            }
            inst.op = Op::Shfl(match mods.first() {
                Some(&"IDX") => ShflMode::Idx,
                Some(&"UP") => ShflMode::Up,
                Some(&"DOWN") => ShflMode::Down,
                Some(&"BFLY") => ShflMode::Bfly,
                _ => return Err(fail("SHFL mode")),
            });
            inst.unit = Lsu;
        }
        "VOTE" => {
            if matches!(it.peek(), Some(Opd::Src(..))) {
                dst!();
            }
            opt_pdsts_one(&mut inst, &mut it);
            opt_psrcs!();
            inst.op = Op::Vote { all: has("ALL"), eq: has("EQ") };
        }
        "MATCH" => {
            allow(&["ANY", "ALL", "U64"])?;
            if has("U64") {
                return Err(fail("64-bit MATCH"));
            }
            opt_pdsts!();
            dst!();
            opt_pdsts!();
            src!(0);
            inst.op = Op::Match { all: has("ALL") };
            inst.unit = Lsu;
        }
        "LDG" | "LD" | "LDS" | "LDL" => {
            opt_pdsts!();
            dst!();
            let space = match base {
                "LDS" => Space::Shared,
                "LDL" => Space::Local,
                _ => Space::Global,
            };
            match it.next() {
                Some(Opd::Mem(m)) => inst.mem = m,
                _ => return Err(fail("address")),
            }
            inst.mem.wide |= has("E");
            inst.op = Op::Ld { space, bytes: bytes(), sext: has("S8") || has("S16") };
            inst.unit = Lsu;
        }
        "STG" | "ST" | "STS" | "STL" => {
            let space = match base {
                "STS" => Space::Shared,
                "STL" => Space::Local,
                _ => Space::Global,
            };
            match it.next() {
                Some(Opd::Mem(m)) => inst.mem = m,
                _ => return Err(fail("address")),
            }
            inst.mem.wide |= has("E");
            src!(0);
            inst.op = Op::St { space, bytes: bytes() };
            inst.unit = Lsu;
        }
        "LDC" => {
            dst!();
            match it.next() {
                Some(Opd::CMem { bank, base, off }) => {
                    inst.bank = bank;
                    inst.mem.base = base;
                    inst.mem.off = off;
                }
                Some(Opd::Src(s, _)) if s.kind == SrcKind::Const => {
                    inst.bank = s.bank;
                    inst.mem.off = s.val as i64;
                }
                _ => return Err(fail("constant address")),
            }
            inst.op = Op::Ld { space: Space::Const, bytes: bytes(), sext: has("S8") || has("S16") };
            inst.unit = Lsu;
        }
        "RED" | "ATOM" | "ATOMG" | "ATOMS" => {
            let ret = base != "RED";
            if ret {
                opt_pdsts!();
                dst!();
            }
            match it.next() {
                Some(Opd::Mem(m)) => inst.mem = m,
                _ => return Err(fail("address")),
            }
            inst.mem.wide |= has("E");
            let mut op = None;
            let mut ty = AtomTy::U32;
            for m in &mods {
                match *m {
                    "ADD" => op = Some(AtomOp::Add),
                    "MIN" => op = Some(AtomOp::Min),
                    "MAX" => op = Some(AtomOp::Max),
                    "AND" => op = Some(AtomOp::And),
                    "OR" => op = Some(AtomOp::Or),
                    "XOR" => op = Some(AtomOp::Xor),
                    "EXCH" => op = Some(AtomOp::Exch),
                    "CAS" | "CAST" => op = Some(AtomOp::Cas),
                    "INC" => op = Some(AtomOp::Inc),
                    "DEC" => op = Some(AtomOp::Dec),
                    "S32" => ty = AtomTy::S32,
                    "64" | "U64" => ty = AtomTy::U64,
                    "S64" => ty = AtomTy::S64,
                    "F32" => ty = AtomTy::F32,
                    "F16x2" => ty = AtomTy::F16x2,
                    "F64" => return Err(fail("F64 atomics")),
                    _ => {}
                }
            }
            src!(0);
            if matches!(it.peek(), Some(Opd::Src(..))) {
                src!(1);
            }
            let space = if base == "ATOMS" { Space::Shared } else { Space::Global };
            inst.op = Op::Atom { space, op: op.ok_or_else(|| fail("atomic operation"))?, ty, ret, spin: has("SPIN") };
            inst.unit = Lsu;
        }
        "QSPC" => {
            opt_pdsts!();
            inst.op = Op::Qspc;
            inst.unit = Lsu;
        }
        "S2R" | "CS2R" => {
            dst!();
            let Some(Opd::Name(n)) = it.next() else { return Err(fail("special register")) };
            let sreg = parse_sreg(&n).ok_or_else(|| fail("special register"))?;
            inst.op = if base == "S2R" { Op::S2r(sreg) } else { Op::Cs2r { sreg, wide: !has("32") } };
            inst.unit = if base == "S2R" { Lsu } else { Alu };
        }
        "BAR" => {
            let mode = if has("ARV") {
                BarMode::Arv
            } else if has("RED") {
                if has("POPC") {
                    BarMode::RedPopc
                } else if has("AND") {
                    BarMode::RedAnd
                } else {
                    BarMode::RedOr
                }
            } else if has("SYNC") {
                BarMode::Sync
            } else {
                return Err(fail("BAR mode"));
            };
            src!(0);
            if matches!(it.peek(), Some(Opd::Src(..))) {
                src!(1);
            }
            opt_psrcs!();
            inst.op = Op::Bar(mode);
            inst.unit = Ctl;
        }
        "B2R" => {
            dst!();
            opt_pdsts!();
            inst.op = Op::B2r;
            inst.unit = Lsu;
        }
        "MEMBAR" => {
            inst.op = Op::Membar;
            inst.unit = Lsu;
        }
        "ERRBAR" | "CCTL" | "CCTLL" | "CCTLT" => {
            inst.op = Op::Nop;
            inst.unit = Ctl;
        }
        "DEPBAR" => {
            let Some(Opd::Sb(sb)) = it.next() else { return Err(fail("scoreboard")) };
            let n = if has("LE") { imm!() as u8 } else { 0 };
            inst.op = Op::Depbar { sb, n };
            inst.unit = Ctl;
        }
        "NOP" | "PREEXIT" | "NANOSLEEP" => inst.op = Op::Nop,
        "YIELD" => inst.op = Op::Yield,
        "EXIT" => {
            opt_psrcs!();
            inst.op = Op::Exit;
        }
        "BRA" | "JMP" | "CALL" => {
            opt_psrcs!();
            match it.next() {
                Some(Opd::Label(t)) => inst.target = t,
                _ => return Err(fail("branch target")),
            }
            inst.op = if base == "CALL" {
                Op::Call
            } else if has("DIV") || has("CONV") {
                Op::BraIf { converged: has("CONV") }
            } else {
                Op::Bra
            };
        }
        "RET" => {
            src!(0);
            inst.op = Op::Ret;
        }
        "BSSY" => {
            let Some(Opd::B(b)) = it.next() else { return Err(fail("barrier register")) };
            if let Some(Opd::Label(t)) = it.next() {
                inst.target = t;
            }
            inst.op = Op::Bssy(b);
        }
        "BSYNC" | "BREAK" => {
            opt_psrcs!();
            let Some(Opd::B(b)) = it.next() else { return Err(fail("barrier register")) };
            inst.op = if base == "BSYNC" { Op::Bsync(b) } else { Op::Break(b) };
        }
        "BMOV" => match (it.next(), it.next()) {
            (Some(Opd::Src(s, _)), Some(Opd::B(b))) => {
                inst.dst = s.val as u8;
                inst.op = Op::BmovToReg { b, clear: has("CLEAR") };
            }
            (Some(Opd::B(b)), Some(Opd::Src(s, _))) => {
                inst.src[0] = s;
                inst.op = Op::BmovFromReg(b);
            }
            _ => return Err(fail("BMOV operands")),
        },
        "WARPSYNC" => {
            opt_psrcs!();
            src!(0);
            inst.op = Op::Warpsync;
        }
        _ => return Err(fail("unknown opcode")),
    }
    if matches!(
        inst.op,
        Op::Nop
            | Op::Yield
            | Op::Exit
            | Op::Bra
            | Op::BraIf { .. }
            | Op::Call
            | Op::Ret
            | Op::Bssy(_)
            | Op::Bsync(_)
            | Op::Break(_)
            | Op::BmovToReg { .. }
            | Op::BmovFromReg(_)
            | Op::Warpsync
    ) {
        inst.unit = Ctl;
    }
    Ok(inst)
}

/// Stands in for an instruction that [`decode`] refused: executing it stops with `why`.
pub fn undecodable(raw: &RawInst, why: String) -> Inst {
    Inst {
        pc: raw.pc,
        op: Op::Undecodable,
        guard: PredOp::TRUE,
        dst: RZ,
        pdst: [PT; 2],
        src: [Src::ZERO; 3],
        psrc: [PredOp::TRUE; 3],
        mem: MemRef { base: RZ, wide: false, off: 0, scale: 0 },
        bank: 0,
        target: u32::MAX,
        ctrl: decode_ctrl(raw.enc),
        unit: Unit::Ctl,
        mnemonic: "UNDECODABLE".to_string(),
        text: why,
    }
}

/// VOTE has exactly one predicate destination; the next predicate is its source.
fn opt_pdsts_one(inst: &mut Inst, it: &mut std::iter::Peekable<std::vec::IntoIter<Opd>>) {
    if let Some(Opd::Pred(p)) = it.peek() {
        inst.pdst[0] = p.idx;
        it.next();
    }
}
