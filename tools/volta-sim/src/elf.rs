//! Minimal cubin (ELF64) reader: sections, symbols, `.nv.info` attributes, kernel metadata.

use serde::Serialize;
use std::collections::HashMap;

#[derive(Clone, Debug)]
pub struct Section {
    pub name: String,
    pub kind: u32,
    pub info: u32,
    pub data: Vec<u8>,
    pub size: u64,
}

#[derive(Clone, Debug)]
pub struct Symbol {
    pub name: String,
    pub section: u16,
    pub value: u64,
}

/// One kernel parameter as recorded in EIATTR_KPARAM_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// position in the parameter list
    pub ordinal: u32,
    /// byte offset in the parameter space
    pub offset: u32,
    /// size in bytes
    pub size: u32,
}

/// What the cubin records about a kernel.
#[derive(Clone, Debug)]
pub struct KernelMeta {
    pub name: String,
    pub regs: u32,
    pub static_smem: u32,
    pub param_size: u32,
    pub params: Vec<Param>,
    pub min_stack: u32,
    pub frame: u32,
    /// 0: not recorded
    pub max_threads: u32,
}

pub struct Cubin {
    /// architecture, 70 for sm_70
    pub sm: u32,
    pub sections: Vec<Section>,
    pub symbols: Vec<Symbol>,
    pub kernels: Vec<KernelMeta>,
}

/// `n` bytes at offset `o`.
fn span(b: &[u8], o: u64, n: u64) -> Result<&[u8], String> {
    let end = o.checked_add(n).filter(|&end| end <= b.len() as u64).ok_or("truncated cubin")?;
    Ok(&b[o as usize..end as usize])
}
fn uint(b: &[u8], o: usize, n: usize) -> Result<u64, String> {
    Ok(span(b, o as u64, n as u64)?.iter().rev().fold(0, |v, &x| v << 8 | x as u64))
}
fn u16le(b: &[u8], o: usize) -> Result<u16, String> {
    Ok(uint(b, o, 2)? as u16)
}
fn u32le(b: &[u8], o: usize) -> Result<u32, String> {
    Ok(uint(b, o, 4)? as u32)
}
fn u64le(b: &[u8], o: usize) -> Result<u64, String> {
    uint(b, o, 8)
}
fn cstr(b: &[u8], o: usize) -> String {
    let s = b.get(o..).unwrap_or(&[]);
    String::from_utf8_lossy(s.split(|&c| c == 0).next().unwrap_or(&[])).into_owned()
}

/// Base offset of kernel parameters in constant bank 0.
pub const PARAM_BASE: u32 = 0x160;

const EIATTR_FRAME_SIZE: u8 = 0x11;
const EIATTR_MIN_STACK: u8 = 0x12;
const EIATTR_KPARAM_INFO: u8 = 0x17;
const EIATTR_MAX_THREADS: u8 = 0x05;

/// Walk `.nv.info*` attributes, calling `f(attr, payload)`.
fn walk_info(data: &[u8], mut f: impl FnMut(u8, &[u8]) -> Result<(), String>) -> Result<(), String> {
    let mut o = 0;
    while o + 4 <= data.len() {
        let (fmt, attr) = (data[o], data[o + 1]);
        if fmt == 4 {
            let n = u16le(data, o + 2)? as usize;
            f(attr, span(data, o as u64 + 4, n as u64)?)?;
            o += 4 + n;
        } else {
            f(attr, &data[o + 2..o + 4])?;
            o += 4;
        }
    }
    Ok(())
}

impl Cubin {
    pub fn parse(b: &[u8]) -> Result<Cubin, String> {
        if b.len() < 64 || !b.starts_with(b"\x7fELF") {
            return Err("not an ELF file".into());
        }
        if u16le(b, 18)? != 190 {
            return Err("not a CUDA cubin (e_machine != EM_CUDA)".into());
        }
        let flags = u32le(b, 48)?;
        let sm = flags & 0xff;
        if ![70, 75].contains(&sm) {
            return Err(format!("cubin is for sm_{sm}, this simulator knows sm_70 and sm_75"));
        }
        let shoff = u64le(b, 40)?;
        let (shentsize, shnum, shstrndx) = (u16le(b, 58)? as u64, u16le(b, 60)? as u64, u16le(b, 62)? as usize);
        let mut raw = vec![];
        for i in 0..shnum {
            let h = span(b, shoff.saturating_add(i * shentsize), 64)?;
            // name, type, offset, size, link, info
            raw.push((u32le(h, 0)?, u32le(h, 4)?, u64le(h, 24)?, u64le(h, 32)?, u32le(h, 40)?, u32le(h, 44)?));
        }
        let strs = raw.get(shstrndx).ok_or("truncated cubin")?;
        let strtab = span(b, strs.2, strs.3)?;
        let mut sections: Vec<Section> = vec![];
        for r in &raw {
            let data = if r.1 == 8 || r.1 == 0 { vec![] } else { span(b, r.2, r.3)?.to_vec() };
            sections.push(Section { name: cstr(strtab, r.0 as usize), kind: r.1, info: r.5, data, size: r.3 });
        }
        let mut symbols = vec![];
        for (i, s) in sections.iter().enumerate() {
            if s.kind == 2 {
                let st = &sections.get(raw[i].4 as usize).ok_or("truncated cubin")?.data;
                for e in s.data.chunks_exact(24) {
                    symbols.push(Symbol { name: cstr(st, u32le(e, 0)? as usize), section: u16le(e, 6)?, value: u64le(e, 8)? });
                }
            }
        }
        let by_name: HashMap<&str, usize> = sections.iter().enumerate().map(|(i, s)| (s.name.as_str(), i)).collect();
        let mut stack: HashMap<String, (u32, u32)> = HashMap::new();
        if let Some(&i) = by_name.get(".nv.info") {
            walk_info(&sections[i].data, |attr, p| {
                if (attr == EIATTR_FRAME_SIZE || attr == EIATTR_MIN_STACK) && p.len() >= 8 {
                    let sym = u32le(p, 0)? as usize;
                    if let Some(s) = symbols.get(sym) {
                        let e = stack.entry(s.name.clone()).or_default();
                        if attr == EIATTR_MIN_STACK {
                            e.0 = u32le(p, 4)?
                        } else {
                            e.1 = u32le(p, 4)?
                        }
                    }
                }
                Ok(())
            })?;
        }
        let mut kernels = vec![];
        for s in &sections {
            let Some(name) = s.name.strip_prefix(".text.") else { continue };
            let Some(&ci) = by_name.get(format!(".nv.constant0.{name}").as_str()) else { continue };
            let mut params = vec![];
            let mut max_threads = 0;
            if let Some(&ii) = by_name.get(format!(".nv.info.{name}").as_str()) {
                walk_info(&sections[ii].data, |attr, p| {
                    match attr {
                        EIATTR_KPARAM_INFO if p.len() >= 12 => {
                            params.push(Param { ordinal: u16le(p, 4)?.into(), offset: u16le(p, 6)?.into(), size: u32le(p, 8)? >> 18 })
                        }
                        EIATTR_MAX_THREADS if p.len() >= 12 => {
                            max_threads = u32le(p, 0)?.saturating_mul(u32le(p, 4)?).saturating_mul(u32le(p, 8)?)
                        }
                        _ => {}
                    }
                    Ok(())
                })?;
            }
            params.sort_by_key(|p| p.ordinal);
            let st = stack.get(name).copied().unwrap_or_default();
            kernels.push(KernelMeta {
                name: name.to_string(),
                regs: s.info >> 24,
                static_smem: by_name.get(format!(".nv.shared.{name}").as_str()).map_or(0, |&i| sections[i].size as u32),
                param_size: (sections[ci].size as u32).saturating_sub(PARAM_BASE),
                params,
                min_stack: st.0,
                frame: st.1,
                max_threads,
            });
        }
        Ok(Cubin { sm, sections, symbols, kernels })
    }

    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// Relocations of section `name`: (offset, symbol index, type, addend).
    pub fn relocs(&self, name: &str) -> Result<Vec<(u64, usize, u32, i64)>, String> {
        let mut out = vec![];
        for s in &self.sections {
            if s.kind == 9 && s.name == format!(".rel{name}") {
                for e in s.data.chunks_exact(16) {
                    let info = u64le(e, 8)?;
                    out.push((u64le(e, 0)?, (info >> 32) as usize, info as u32, 0));
                }
            } else if s.kind == 4 && s.name == format!(".rela{name}") {
                for e in s.data.chunks_exact(24) {
                    let info = u64le(e, 8)?;
                    out.push((u64le(e, 0)?, (info >> 32) as usize, info as u32, u64le(e, 16)? as i64));
                }
            }
        }
        Ok(out)
    }
}
