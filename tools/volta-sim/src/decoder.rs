//! What decoding has in common for all instructions: a [`Decoder`] reads modifiers and operands. Each class in `crate::ops` reads its
//! own mnemonics with it.

use crate::disasm::RawInst;
use crate::isa::*;
use crate::operand::{self, Operand};
use std::collections::HashMap;

/// What a class makes of an instruction: its operation, `None` if the mnemonic is not one of its own.
pub type Decoded = Result<Option<Op>, String>;

/// An instruction being decoded: its mnemonic in parts, its operands from left to right, and what is known of it.
pub struct Decoder<'a> {
    raw: &'a RawInst,
    /// the mnemonic up to its first dot
    pub base: &'a str,
    /// the mnemonic's other parts
    pub mods: Vec<&'a str>,
    operands: std::iter::Peekable<std::vec::IntoIter<Operand>>,
    /// on the ALU, without operands, until a class says otherwise
    pub inst: Inst,
}

/// Returns an instruction that does nothing yet, on the ALU.
pub fn blank(raw: &RawInst) -> Inst {
    Inst {
        pc: raw.pc,
        op: Op::Nop,
        guard: PredOp::TRUE,
        everywhere: 0,
        dst: RZ,
        pdst: [PT; 2],
        src: [Src::ZERO; 3],
        psrc: [PredOp::TRUE; 3],
        mem: MemRef::ZERO,
        bank: 0,
        target: u32::MAX,
        ctrl: Ctrl::of(raw.enc),
        unit: Unit::Alu,
        mnemonic: String::new(),
        text: raw.text.clone(),
    }
}

fn failure(raw: &RawInst, why: &str) -> String {
    format!("cannot decode instruction at pc 0x{:x}: `{}` ({why})", raw.pc, raw.text)
}

/// Returns the guard of an instruction and the rest of its text; None if the guard is no predicate.
fn guard(text: &str) -> Option<(PredOp, &str)> {
    let Some(r) = text.strip_prefix('@') else { return Some((PredOp::TRUE, text)) };
    let (p, rest) = r.split_once(' ')?;
    let neg = p.starts_with('!');
    let idx = operand::predicate(p.trim_start_matches('!'))?;
    Some((PredOp { idx, neg }, rest.trim()))
}

impl<'a> Decoder<'a> {
    pub fn new(raw: &'a RawInst, labels: &HashMap<String, u32>) -> Result<Self, String> {
        let (guard, text) = guard(&raw.text).ok_or_else(|| failure(raw, "guard"))?;
        let (mnemonic, rest) = text.split_once(' ').unwrap_or((text, ""));
        let mnemonic = mnemonic.trim();
        let mut parts = mnemonic.split('.');
        let base = parts.next().unwrap_or("");
        let texts = operand::split(&operand::separated(base, rest));
        let mut operands = vec![];
        for (i, o) in texts.iter().enumerate() {
            let p = operand::parse(o, raw.enc, labels).ok_or_else(|| failure(raw, &format!("operand `{o}`")))?;
            // two half immediates are one 32-bit immediate in the encoding
            if base.starts_with('H') && i > 0 {
                if let (Operand::Src(a, _), Some(Operand::Src(b, _))) = (&p, operands.last()) {
                    let lit = |s: &str| {
                        operand::int(s).is_none()
                            && s.trim_start_matches(['-', '+']).starts_with(|c: char| c.is_ascii_digit() || c == 'I' || c == 'Q')
                    };
                    if a.kind == SrcKind::Imm && b.kind == SrcKind::Imm && lit(o) && lit(&texts[i - 1]) {
                        continue;
                    }
                }
            }
            operands.push(p);
        }
        let inst = Inst { guard, mnemonic: mnemonic.to_string(), ..blank(raw) };
        Ok(Decoder { raw, base, mods: parts.collect(), operands: operands.into_iter().peekable(), inst })
    }

    /// Returns an error with the reason why this instruction cannot be decoded.
    pub fn fail(&self, why: &str) -> String {
        failure(self.raw, why)
    }

    // ---- modifiers -------------------------------------------------------------------

    pub fn has(&self, modifier: &str) -> bool {
        self.mods.contains(&modifier)
    }
    /// Rejects modifiers other than these.
    pub fn allow(&self, known: &[&str]) -> Result<(), String> {
        match self.mods.iter().find(|m| !known.contains(m)) {
            Some(m) => Err(self.fail(&format!("modifier .{m}"))),
            None => Ok(()),
        }
    }
    pub fn ftz(&self) -> bool {
        self.has("FTZ")
    }
    pub fn sat(&self) -> bool {
        self.has("SAT")
    }
    pub fn signed(&self) -> bool {
        !self.has("U32")
    }
    pub fn cmp(&self) -> Result<Cmp, String> {
        let known = |m: &&str| {
            Some(match *m {
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
        };
        self.mods.iter().find_map(known).ok_or_else(|| self.fail("comparison"))
    }
    pub fn bop(&self) -> BoolOp {
        if self.has("OR") {
            BoolOp::Or
        } else if self.has("XOR") {
            BoolOp::Xor
        } else {
            BoolOp::And
        }
    }
    pub fn round(&self) -> Round {
        if self.has("RZ") {
            Round::Rz
        } else if self.has("RM") {
            Round::Rm
        } else if self.has("RP") {
            Round::Rp
        } else {
            Round::Rn
        }
    }

    // ---- operands, in the order in which they are printed ------------------------------

    /// Whether the instruction reads a constant at an address in a register, `c[0x0][UR4+0x160]`.
    pub fn has_indexed_constant(&self) -> bool {
        self.operands.clone().any(|operand| matches!(operand, Operand::CMem { .. }))
    }

    pub fn next(&mut self) -> Option<Operand> {
        self.operands.next()
    }
    /// Returns true if the next one is a register, an immediate or a constant.
    pub fn src_follows(&mut self) -> bool {
        matches!(self.operands.peek(), Some(Operand::Src(..)))
    }
    pub fn dst(&mut self) -> Result<(), String> {
        match self.next() {
            Some(Operand::Src(s, _)) if s.kind == SrcKind::Reg => {
                self.inst.dst = s.val as Reg;
                Ok(())
            }
            _ => Err(self.fail("destination register expected")),
        }
    }
    /// Reads source `i`.
    pub fn src(&mut self, i: usize) -> Result<(), String> {
        match self.next() {
            Some(Operand::Src(s, _)) => {
                self.inst.src[i] = s;
                Ok(())
            }
            _ => Err(self.fail("source operand expected")),
        }
    }
    /// Reads the first `n` sources.
    pub fn srcs(&mut self, n: usize) -> Result<(), String> {
        (0..n).try_for_each(|i| self.src(i))
    }
    pub fn imm(&mut self) -> Result<u32, String> {
        match self.next() {
            Some(Operand::Src(s, _)) if s.kind == SrcKind::Imm => Ok(s.val),
            _ => Err(self.fail("immediate expected")),
        }
    }
    /// Reads an immediate if the next operand is one.
    pub fn opt_imm(&mut self) -> Option<u32> {
        match self.operands.peek() {
            Some(Operand::Src(s, _)) if s.kind == SrcKind::Imm => {
                let v = s.val;
                self.next();
                Some(v)
            }
            _ => None,
        }
    }
    pub fn opt_pred(&mut self) -> Option<PredOp> {
        match self.operands.peek() {
            Some(&Operand::Pred(p)) => {
                self.next();
                Some(p)
            }
            _ => None,
        }
    }
    /// Reads up to `most` predicates as destinations.
    pub fn opt_pdsts(&mut self, most: usize) {
        for n in 0..most {
            let Some(p) = self.opt_pred() else { return };
            self.inst.pdst[n] = p.idx;
        }
    }
    /// Reads up to three predicates as sources.
    pub fn opt_psrcs(&mut self) {
        for n in 0..3 {
            let Some(p) = self.opt_pred() else { return };
            self.inst.psrc[n] = p;
        }
    }
    /// Reads predicates that are carries in: absent ones are false.
    pub fn opt_carries(&mut self) {
        self.inst.psrc = [PredOp::FALSE; 3];
        self.opt_psrcs();
    }
    /// Reads `[...]`. Modifier .E makes the base a register pair. If there is a uniform register, .E makes that one a pair, and the base
    /// is a pair only if it has .64.
    pub fn address(&mut self) -> Result<(), String> {
        match self.next() {
            Some(Operand::Mem(m)) => {
                let (extended, uniform) = (self.has("E"), m.uniform != RZ);
                self.inst.mem = MemRef { wide: m.wide | (extended & !uniform), uniform_wide: extended & uniform, ..m };
                Ok(())
            }
            _ => Err(self.fail("address")),
        }
    }
}
