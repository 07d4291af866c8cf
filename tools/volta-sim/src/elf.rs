//! Reads cubins, CUDA's ELF files of machine code, for `module`: sections, symbols, relocations (by the crate `object`), and kernels'
//! metadata (`.nv.info.KERNEL`).

use object::elf::{FileHeader64, EM_CUDA, SHT_NOBITS, SHT_SYMTAB};
use object::read::elf::{FileHeader, Rel, Rela, SectionHeader, Sym};
use object::LittleEndian;
use serde::Serialize;
use std::collections::HashMap;

#[derive(Clone, Debug)]
pub struct Section {
    pub name: String,
    /// ELF's sh_info; of a `.text` section, the upper 8 bits are the kernel's registers
    pub info: u32,
    /// empty for sections without content in the file
    pub data: Vec<u8>,
    /// size in memory, in bytes
    pub size: u64,
}

/// A relocation of a 64-bit address at a byte `offset` of its section.
#[derive(Clone, Copy, Debug)]
pub struct Relocation {
    pub offset: u64,
    /// index into [`Cubin::symbols`]
    pub symbol: usize,
    /// CUDA's number of the type, as R_CUDA_64 (2)
    pub kind: u32,
    pub addend: i64,
}

#[derive(Clone, Debug)]
pub struct Symbol {
    pub name: String,
    /// index into [`Cubin::sections`]
    pub section: u16,
    /// byte offset in the section
    pub value: u64,
}

/// One kernel parameter as recorded in EIATTR_KPARAM_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Param {
    /// position in the parameter list
    pub ordinal: u32,
    /// byte offset in the parameter space
    pub offset: u32,
    pub size: u32,
}

/// What the cubin records about a kernel. Sizes are in bytes.
#[derive(Clone, Debug)]
pub struct KernelMeta {
    pub name: String,
    pub regs: u32,
    pub static_smem: u32,
    pub param_size: u32,
    pub params: Vec<Param>,
    /// local memory that a thread needs: the frames of the kernel and of the functions it calls (EIATTR_MIN_STACK)
    pub min_stack: u32,
    /// the kernel's own frame in it (EIATTR_FRAME_SIZE): spills, arrays
    pub frame: u32,
    /// of a CTA; 0: not recorded
    pub max_threads: u32,
}

pub struct Cubin {
    /// architecture, 70 for sm_70
    pub sm: u32,
    pub sections: Vec<Section>,
    pub symbols: Vec<Symbol>,
    pub kernels: Vec<KernelMeta>,
    /// by the name of the section with the relocations, as `.rela.nv.constant4`
    relocations: HashMap<String, Vec<Relocation>>,
}

/// Returns `n` bytes at offset `o`, or an error past the end.
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

/// Byte offset of kernel parameters in constant bank 0, on sm_70 and sm_75.
pub const PARAM_BASE: u32 = 0x160;

// Attributes of `.nv.info`, as cuobjdump names them.
const EIATTR_FRAME_SIZE: u8 = 0x11;
const EIATTR_MIN_STACK: u8 = 0x12;
const EIATTR_KPARAM_INFO: u8 = 0x17;
const EIATTR_MAX_THREADS: u8 = 0x05;

/// Calls `f(attribute, payload)` for each entry of a `.nv.info` section. An entry has a byte for its format, one for its attribute, and 2
/// bytes: the payload, or for format 4 the size in bytes of the payload, which follows.
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
        if !b.starts_with(b"\x7fELF") {
            return Err("not an ELF file".into());
        }
        Cubin::read(b).map_err(|e| format!("truncated or invalid cubin: {e}"))?
    }

    /// The outer error is the parser's, the inner one that of an ELF file that is no cubin for a known GPU.
    fn read(b: &[u8]) -> Result<Result<Cubin, String>, object::Error> {
        let e = LittleEndian; // of all fields
        let header = FileHeader64::parse(b)?;
        if header.e_machine(e) != EM_CUDA {
            return Ok(Err("not a CUDA cubin (e_machine != EM_CUDA)".into()));
        }
        // CUDA 13 writes ABI version 8, which has the architecture in the second byte
        let sm = (header.e_flags(e).0 >> if header.e_ident.abi_version < 8 { 0 } else { 8 }) & 0xff;
        if ![70, 75].contains(&sm) {
            return Ok(Err(format!("cubin is for sm_{sm}, this simulator knows sm_70 and sm_75")));
        }
        let table = header.sections(e, b)?;
        let (mut sections, mut relocations) = (vec![], HashMap::new());
        let relocation = |offset, symbol: u32, kind, addend| Relocation { offset, symbol: symbol as usize, kind, addend };
        for s in table.iter() {
            let name = String::from_utf8_lossy(table.section_name(e, s)?).into_owned();
            if let Some((entries, _)) = s.rel(e, b)? {
                let entries = entries.iter().map(|r| relocation(r.r_offset(e), r.r_sym(e), r.r_type(e).0, 0));
                relocations.insert(name.clone(), entries.collect());
            }
            if let Some((entries, _)) = s.rela(e, b)? {
                // false: not in the format of MIPS
                let entries = entries.iter().map(|r| relocation(r.r_offset(e), r.r_sym(e, false), r.r_type(e, false).0, r.r_addend(e)));
                relocations.insert(name.clone(), entries.collect());
            }
            let data = if s.sh_type(e) == SHT_NOBITS { vec![] } else { s.data(e, b)?.to_vec() };
            sections.push(Section { name, info: s.sh_info(e), data, size: s.sh_size(e) });
        }
        let table = table.symbols(e, b, SHT_SYMTAB)?;
        let mut symbols = vec![];
        for s in table.iter() {
            let name = String::from_utf8_lossy(table.symbol_name(e, s)?).into_owned();
            symbols.push(Symbol { name, section: s.st_shndx(e).0, value: s.st_value(e) });
        }
        Ok(Cubin::with_kernels(sm, sections, symbols, relocations))
    }

    /// Adds what `.nv.info` records about the kernels.
    fn with_kernels(
        sm: u32,
        sections: Vec<Section>,
        symbols: Vec<Symbol>,
        relocations: HashMap<String, Vec<Relocation>>,
    ) -> Result<Cubin, String> {
        let by_name: HashMap<&str, &Section> = sections.iter().map(|s| (s.name.as_str(), s)).collect();
        let (mut min_stack, mut frame) = (HashMap::new(), HashMap::new()); // bytes by kernel
        if let Some(info) = by_name.get(".nv.info") {
            walk_info(&info.data, |attr, p| {
                let of_kernels = match attr {
                    EIATTR_FRAME_SIZE if p.len() >= 8 => &mut frame,
                    EIATTR_MIN_STACK if p.len() >= 8 => &mut min_stack,
                    _ => return Ok(()),
                };
                if let Some(kernel) = symbols.get(u32le(p, 0)? as usize) {
                    of_kernels.insert(kernel.name.as_str(), u32le(p, 4)?);
                }
                Ok(())
            })?;
        }
        let mut kernels = vec![];
        for s in &sections {
            let Some(name) = s.name.strip_prefix(".text.") else { continue };
            let of_kernel = |kind: &str| by_name.get(format!("{kind}.{name}").as_str());
            let Some(constants) = of_kernel(".nv.constant0") else { continue };
            let mut params = vec![];
            let mut max_threads = 0;
            if let Some(info) = of_kernel(".nv.info") {
                walk_info(&info.data, |attr, p| {
                    match attr {
                        EIATTR_KPARAM_INFO if p.len() >= 12 => {
                            // the size, in bytes, is in the word's upper 14 bits
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
            kernels.push(KernelMeta {
                name: name.to_string(),
                regs: s.info >> 24,
                static_smem: of_kernel(".nv.shared").map_or(0, |s| s.size as u32),
                param_size: (constants.size as u32).saturating_sub(PARAM_BASE),
                params,
                min_stack: min_stack.get(name).copied().unwrap_or(0),
                frame: frame.get(name).copied().unwrap_or(0),
                max_threads,
            });
        }
        Ok(Cubin { sm, sections, symbols, kernels, relocations })
    }

    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// Returns the relocations of the section of this name.
    pub fn relocations(&self, name: &str) -> Vec<Relocation> {
        [".rel", ".rela"].iter().filter_map(|kind| self.relocations.get(&format!("{kind}{name}"))).flatten().copied().collect()
    }
}
