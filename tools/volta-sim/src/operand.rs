//! Parses the operands of an instruction as nvdisasm prints them. `decoder` calls it; the classes in `ops` give operands a meaning.

use crate::isa::*;
use std::borrow::Cow;
use std::collections::HashMap;

/// An operand by its form.
#[derive(Clone, Debug)]
pub enum Operand {
    /// register, immediate or constant, and whether it is marked .COL (a matrix in column order)
    Src(Src, bool),
    Pred(PredOp),
    /// all predicates, or all uniform ones, as one register
    PredReg,
    Mem(MemRef),
    /// constant bank, indexed by a register
    CMem {
        bank: u8,
        at: MemRef,
    },
    /// anything else, such as a special register
    Name(String),
    /// convergence barrier
    B(u8),
    /// scoreboard
    Sb(u8),
    /// pc of a label: bytes from the kernel's first instruction
    Label(u32),
}

/// Returns an integer literal, with its sign.
pub fn int(s: &str) -> Option<i64> {
    let (neg, t) = match s.strip_prefix('-') {
        Some(r) => (true, r),
        None => (false, s.strip_prefix('+').unwrap_or(s)),
    };
    // nvdisasm prints integers in hexadecimal; other numbers are floats
    let v = u64::from_str_radix(t.strip_prefix("0x")?, 16).ok()? as i64;
    Some(if neg { v.wrapping_neg() } else { v })
}

/// Returns the value of a name in a list of names with values.
pub fn look_up<T: Copy>(known: &[(&str, T)], name: &str) -> Option<T> {
    known.iter().find(|(known, _)| *known == name).map(|&(_, value)| value)
}

/// Returns whether this is a float literal: digits without `0x`, or a word such as `+INF` or `-QNAN`.
pub fn is_float(s: &str) -> bool {
    let number = s.trim_start_matches(['-', '+', '|']);
    let is_special = ["INF", "QNAN", "SNAN"].iter().any(|name| number.starts_with(name));
    int(s).is_none() && (is_special || number.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns the number of a register, as `R12` or `UR4`. Numbers of uniform registers begin at UR0; URZ is RZ.
fn register(s: &str) -> Option<Reg> {
    let number = |prefix: &str, end: Reg| s.strip_prefix(prefix)?.parse().ok().filter(|&r| r < end);
    match s {
        "RZ" | "URZ" => Some(RZ),
        _ => number("R", RZ).or_else(|| Some(UR0 + number("UR", URZ)?)),
    }
}

/// Returns the number of a predicate, as `P3` or `UP0`. Numbers of uniform predicates begin at UP0; UPT is PT.
pub fn predicate(s: &str) -> Option<u8> {
    let number = |prefix: &str| s.strip_prefix(prefix)?.parse().ok().filter(|&p| p < PT);
    match s {
        "PT" | "UPT" => Some(PT),
        _ => number("P").or_else(|| Some(UP0 + number("UP")?)),
    }
}

/// Returns the operands separated by commas, for the instructions that nvdisasm prints otherwise.
pub fn separated<'a>(base: &str, text: &'a str) -> Cow<'a, str> {
    match base {
        // "BRX R2 -0x940"
        "BRX" | "JMX" => text.trim().replacen(' ', ", ", 1).into(),
        // "RET.REL.NODEC R20 `(kernel)"
        "RET" => text.trim().split(' ').next().unwrap_or("").into(),
        _ => text.into(),
    }
}

/// Splits operands at the commas outside brackets and parentheses.
pub fn split(s: &str) -> Vec<String> {
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

/// Parses the inside of `[...]`. Returns true beside the address if it has no register.
fn memory(inner: &str) -> Option<(MemRef, bool)> {
    let (mut m, mut abs) = (MemRef::ZERO, true);
    // terms separated by '+'; a term may be "-0x10"
    for term in inner.split('+') {
        let term = term.trim();
        if term.is_empty() {
            continue;
        }
        if let Some(v) = int(term) {
            m.off = m.off.wrapping_add(v);
            continue;
        }
        let mut parts = term.split('.');
        let r = register(parts.next()?)?;
        abs = false;
        if term.starts_with('U') {
            m.uniform = r;
            continue;
        }
        m.base = r;
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

/// Parses one operand. `enc` is the instruction's encoding, which has the bits of a float literal; `labels` are the kernel's, by name.
pub fn parse(s: &str, enc: u128, labels: &HashMap<String, u32>) -> Option<Operand> {
    let mut t = s.trim();
    if let Some(l) = t.strip_prefix("`(") {
        let name = l.trim_end_matches(')');
        return Some(Operand::Label(*labels.get(name)?));
    }
    // the words of a label's pc: 32@lo((sym + .L_x_1@srel)) / 32@hi(...)
    let immediate = |bits: u32| Some(Operand::Src(Src::immediate(bits), false));
    if t.starts_with("32@hi") {
        return immediate(0);
    }
    if t.starts_with("32@") {
        let label = t[t.find(".L")?..].split('@').next()?;
        return immediate(*labels.get(label)?);
    }
    if let Some(inner) = t.strip_prefix('[') {
        return Some(Operand::Mem(memory(inner.strip_suffix(']')?)?.0));
    }
    // immediates first: the sign belongs to the literal
    if let Some(v) = int(t) {
        return immediate(v as u32);
    }
    if is_float(t) {
        // the encoding has its bits
        return immediate((enc >> 32) as u32);
    }
    let (mut neg, mut inv, mut abs, mut not) = (false, false, false, false);
    while let Some(rest) = t.strip_prefix(['-', '~', '!', '|']) {
        match t.as_bytes()[0] {
            b'-' => neg = !neg,
            b'~' => inv = true,
            b'!' => not = true,
            _ => abs = true,
        }
        t = rest;
    }
    let t: String = t.replace('|', "");
    let t = t.as_str();
    let mut src = Src { neg, abs, inv, ..Src::ZERO };
    if let Some(c) = t.strip_prefix("c[") {
        let e = c.find(']')?;
        let bank = int(&c[..e])? as u8;
        let rest = c[e + 1..].trim_start().strip_prefix('[')?; // HSET2's is printed with a space
        let e2 = rest.find(']')?;
        let (m, absolute) = memory(&rest[..e2])?;
        if !absolute {
            return Some(Operand::CMem { bank, at: m });
        }
        src.kind = SrcKind::Const;
        src.bank = bank;
        src.val = m.off as u32;
        for p in rest[e2 + 1..].split('.').filter(|p| !p.is_empty()) {
            src.sel = selector(p)?;
        }
        return Some(Operand::Src(src, false));
    }
    let mut parts = t.split('.');
    let head = parts.next()?;
    if let Some(r) = register(head) {
        src.val = r as u32;
        let mut col = false;
        for p in parts {
            match p {
                "reuse" => src.reuse = true,
                "COL" => col = true,
                "ROW" => {}
                _ => src.sel = selector(p)?,
            }
        }
        return Some(Operand::Src(src, col));
    }
    if head == "PR" || head == "UPR" {
        return Some(Operand::PredReg);
    }
    if let Some(idx) = predicate(head) {
        return Some(Operand::Pred(PredOp { idx, neg: not }));
    }
    if let Some(n) = head.strip_prefix("SB").and_then(|n| n.parse::<u8>().ok()) {
        return Some(Operand::Sb(n));
    }
    if let Some(n) = head.strip_prefix('B').and_then(|n| n.parse::<u8>().ok()) {
        return Some(Operand::B(n));
    }
    Some(Operand::Name(t.to_string()))
}

/// Returns which part of a register its suffix selects: `.H1` the high half, `.B2` byte 2. The registers' own order of halves is `.H1_H0`.
fn selector(suffix: &str) -> Option<Sel> {
    use Sel::*;
    #[rustfmt::skip]
    let known = [
        ("H0_H0", H0H0), ("H1_H1", H1H1), ("H1_H0", Sel::None), ("H0", H(0)), ("H1", H(1)),
        ("B0", B(0)), ("B1", B(1)), ("B2", B(2)), ("B3", B(3)), ("F32", F32),
    ];
    look_up(&known, suffix)
}
