//! Decodes what all instructions have in common. A [`Decoder`] holds an instruction as nvdisasm prints it, such as
//! `@!P0 LDG.E.64 R4, [R2+0x8]`, and reads its guard, modifiers and operands. Each class of instructions (a file of `crate::ops`, as
//! integer.rs) reads its own mnemonics with it.

use crate::disasm::RawInst;
use crate::isa::*;
use crate::operand::{self, Operand};
use std::collections::HashMap;

/// A class's result for an instruction: its operation, `None` if the mnemonic is another class's, or why decoding failed.
pub type Decoded = Result<Option<Op>, String>;

/// Modifiers that compare floating-point numbers; those that end with U are true for a NaN.
#[rustfmt::skip]
const COMPARISONS: [(&str, Cmp); 16] = {
    use Cmp::*;
    [
        ("F", F), ("LT", Lt), ("EQ", Eq), ("LE", Le), ("GT", Gt), ("NE", Ne), ("GE", Ge), ("NUM", Num), ("NAN", Nan),
        ("LTU", Ltu), ("EQU", Equ), ("LEU", Leu), ("GTU", Gtu), ("NEU", Neu), ("GEU", Geu), ("T", T),
    ]
};

/// An instruction being decoded: its mnemonic in parts, its operands from left to right, and what is known of it.
pub struct Decoder<'a> {
    raw: &'a RawInst,
    /// the mnemonic up to its first dot; ops::uniform replaces a uniform instruction's by that of its vector twin
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
        everywhere: 0, // writes in active threads only
        dst: RZ,
        pred_dst: [PT; 2],
        src: [Src::ZERO; 3],
        pred_src: [PredOp::TRUE; 3],
        mem: MemRef::ZERO,
        bank: 0,                 // constant bank, of instructions that load from one
        target: u32::MAX,        // no branch
        ctrl: Ctrl::of(raw.enc), // stall cycles and scoreboards, from the encoding: nvdisasm prints none
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
    /// Reads an instruction's text. `labels`: pc of each label, for branch targets.
    pub fn new(raw: &'a RawInst, labels: &HashMap<String, u32>) -> Result<Self, String> {
        let (guard, text) = guard(&raw.text).ok_or_else(|| failure(raw, "guard"))?;
        let (mnemonic, rest) = text.split_once(' ').unwrap_or((text, ""));
        let mnemonic = mnemonic.trim();
        let mut parts = mnemonic.split('.');
        let base = parts.next().unwrap_or("");
        let texts = operand::split(&operand::separated(base, rest)); // separated(): with commas, which nvdisasm leaves out of BRX
        let mut operands = vec![];
        for (i, o) in texts.iter().enumerate() {
            let p = operand::parse(o, raw.enc, labels).ok_or_else(|| failure(raw, &format!("operand `{o}`")))?;
            // nvdisasm prints two half immediates, which are one 32-bit immediate of the encoding: drop the second
            if !(base.starts_with('H') && i > 0 && operand::is_float(o) && operand::is_float(&texts[i - 1])) {
                operands.push(p);
            }
        }
        let inst = Inst { guard, mnemonic: mnemonic.to_string(), ..blank(raw) };
        Ok(Decoder { raw, base, mods: parts.collect(), operands: operands.into_iter().peekable(), inst })
    }

    /// Returns an error with the reason why this instruction cannot be decoded.
    pub fn fail(&self, why: &str) -> String {
        failure(self.raw, why)
    }

    // ---- modifiers -------------------------------------------------------------------

    /// Returns whether the mnemonic has this part, without its dot.
    pub fn has(&self, modifier: &str) -> bool {
        self.mods.contains(&modifier)
    }
    /// Rejects modifiers other than these.
    pub fn allow(&mut self, known: &[&str]) -> Result<&mut Self, String> {
        match self.mods.iter().find(|m| !known.contains(m)) {
            Some(m) => Err(self.fail(&format!("modifier .{m}"))),
            None => Ok(self),
        }
    }
    /// Returns the value of the first modifier that is one of these.
    pub fn one_of<T: Copy>(&self, known: &[(&str, T)]) -> Option<T> {
        self.mods.iter().find_map(|m| operand::look_up(known, m))
    }
    pub fn ftz(&self) -> bool {
        self.has("FTZ")
    }
    pub fn sat(&self) -> bool {
        self.has("SAT")
    }
    /// Integers are signed unless .U32 says otherwise.
    pub fn signed(&self) -> bool {
        !self.has("U32")
    }
    /// Returns the comparison; those with U (LTU, ...) are also true if an operand is NaN.
    pub fn cmp(&self) -> Result<Cmp, String> {
        self.one_of(&COMPARISONS).ok_or_else(|| self.fail("comparison"))
    }
    /// Fails for a modifier that is no comparison of floating-point numbers, does not combine predicates, and is not in `others`.
    pub fn allow_comparison(&mut self, others: &[&str]) -> Result<&mut Self, String> {
        let known: Vec<&str> = COMPARISONS.iter().map(|c| c.0).chain(["AND", "OR", "XOR"]).chain(others.iter().copied()).collect();
        self.allow(&known)
    }
    /// Returns how a predicate is combined with another.
    pub fn bop(&self) -> BoolOp {
        self.one_of(&[("OR", BoolOp::Or), ("XOR", BoolOp::Xor)]).unwrap_or(BoolOp::And)
    }
    /// Returns the rounding mode: toward zero, -inf or +inf, else to nearest even.
    pub fn round(&self) -> Round {
        self.one_of(&[("RZ", Round::Rz), ("RM", Round::Rm), ("RP", Round::Rp)]).unwrap_or(Round::Rn)
    }

    // ---- operands: each call reads the next one that is printed, and returns the decoder for another call --------------

    pub fn on(&mut self, unit: Unit) -> &mut Self {
        self.inst.unit = unit;
        self
    }
    /// Returns whether the instruction reads a constant at an address in a register, `c[0x0][UR4+0x160]`.
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
    /// Reads the destination register.
    pub fn dst(&mut self) -> Result<&mut Self, String> {
        match self.next() {
            Some(Operand::Src(s, _)) if s.kind == SrcKind::Reg => self.inst.dst = s.val as Reg, // _: .COL, of matrices alone
            _ => return Err(self.fail("destination register expected")),
        }
        Ok(self)
    }
    /// Reads source `i`.
    pub fn src(&mut self, i: usize) -> Result<&mut Self, String> {
        match self.next() {
            Some(Operand::Src(s, _)) => self.inst.src[i] = s,
            _ => return Err(self.fail("source operand expected")),
        }
        Ok(self)
    }
    pub fn srcs(&mut self, n: usize) -> Result<&mut Self, String> {
        (0..n).try_fold(self, |d, i| d.src(i))
    }
    pub fn imm(&mut self) -> Result<u32, String> {
        self.opt_imm().ok_or_else(|| self.fail("immediate expected"))
    }
    /// Reads an immediate if the next operand is one.
    pub fn opt_imm(&mut self) -> Option<u32> {
        let &Operand::Src(Src { kind: SrcKind::Imm, val, .. }, _) = self.operands.peek()? else { return None };
        self.operands.next();
        Some(val)
    }
    /// Reads a predicate if the next operand is one.
    pub fn opt_pred(&mut self) -> Option<PredOp> {
        let &Operand::Pred(p) = self.operands.peek()? else { return None };
        self.operands.next();
        Some(p)
    }
    /// Reads up to `most` predicates as destinations.
    pub fn opt_pred_dsts(&mut self, most: usize) -> &mut Self {
        for n in 0..most {
            let Some(p) = self.opt_pred() else { break };
            self.inst.pred_dst[n] = p.idx;
        }
        self
    }
    /// Reads up to three predicates as sources.
    pub fn opt_pred_srcs(&mut self) -> &mut Self {
        for n in 0..3 {
            let Some(p) = self.opt_pred() else { break };
            self.inst.pred_src[n] = p;
        }
        self
    }
    /// Reads up to three predicates as carries into a sum: absent ones are false.
    pub fn opt_carries(&mut self) -> &mut Self {
        self.inst.pred_src = [PredOp::FALSE; 3];
        self.opt_pred_srcs()
    }
    /// Reads `[...]`. Modifier .E makes the base a register pair, or the uniform register if there is one; .64 makes the base a pair too.
    pub fn address(&mut self) -> Result<&mut Self, String> {
        let Some(Operand::Mem(m)) = self.next() else { return Err(self.fail("address")) };
        let (extended, uniform) = (self.has("E"), m.uniform != RZ);
        self.inst.mem = MemRef { wide: m.wide | (extended & !uniform), uniform_wide: extended & uniform, ..m };
        Ok(self)
    }
}
