//! Runs nvdisasm, NVIDIA's disassembler, and divides its output into kernels and instructions for `module`.
//!
//! nvdisasm takes up to a second for a large kernel. `$VOLTA_SIM_LISTINGS` names a folder that keeps its output for other processes.

use std::collections::hash_map::DefaultHasher;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::hash::{Hash, Hasher};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// One instruction as printed by nvdisasm: its address in the kernel in bytes, its text, and its 128-bit encoding.
pub struct RawInst {
    pub pc: u32,
    pub text: String,
    pub enc: u128,
}

/// One kernel's part of nvdisasm's output.
#[derive(Default)]
pub struct Listing {
    /// in the order of their pc
    pub insts: Vec<RawInst>,
    /// pc by label, as `.L_x_1`
    pub labels: HashMap<String, u32>,
    /// the printed section without the encodings
    pub text: String,
}

/// Returns $VOLTA_SIM_NVDISASM, else the first nvdisasm on PATH.
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
                // left over from a dead process that had the same process ID
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

/// Disassembles `cubin` with the given nvdisasm, or the one that is found. Returns listings by kernel name.
pub fn disassemble(cubin: &[u8], nvdisasm: Option<&Path>) -> Result<HashMap<String, Listing>, String> {
    let exe = nvdisasm.map_or_else(find_nvdisasm, |p| Ok(p.to_path_buf()))?;
    let folder = std::env::var_os("VOLTA_SIM_LISTINGS").filter(|f| !f.is_empty());
    let kept = folder.map(|folder| Path::new(&folder).join(format!("{:016x}.sass", identity(cubin, &exe))));
    if let Some(text) = kept.as_deref().and_then(|path| std::fs::read_to_string(path).ok()) {
        return Ok(parse_listing(&text));
    }
    let text = run(cubin, &exe)?;
    if let Some(path) = kept {
        keep(&path, &text);
    }
    Ok(parse_listing(&text))
}

/// Hashes a cubin, and path, size and time of the program that disassembles it. It names the kept listing.
fn identity(cubin: &[u8], exe: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    (cubin, exe).hash(&mut hasher);
    if let Ok(metadata) = exe.metadata() {
        (metadata.len(), metadata.modified().ok()).hash(&mut hasher);
    }
    hasher.finish()
}

fn run(cubin: &[u8], exe: &Path) -> Result<String, String> {
    let file = TempFile::new(cubin)?;
    // -c: code sections only; -hex: with encodings
    let out = Command::new(exe).arg("-c").arg("-hex").arg(&file.0).output().map_err(|e| format!("{}: {e}", exe.display()))?;
    if !out.status.success() {
        return Err(format!("nvdisasm failed: {}", String::from_utf8_lossy(&out.stderr)));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Writes a listing for other processes. A rename makes it appear whole. A failure costs time only, so it is no error.
fn keep(path: &Path, text: &str) {
    let unfinished = path.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    let written = path.parent().map(std::fs::create_dir_all).transpose().and_then(|_| std::fs::write(&unfinished, text));
    if written.and_then(|()| std::fs::rename(&unfinished, path)).is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
}

/// Parses the output of `nvdisasm -c -hex`. A kernel is a section `.text.NAME`. An instruction has two lines, one per half of its encoding:
/// ```text
/// .L_x_1:
///         /*0010*/   @!P0 IADD3 R1, R1, 0x1, RZ ;   /* 0x0000000101018810 */
///                                                   /* 0x000fe40007ffe0ff */
/// ```
fn parse_listing(text: &str) -> HashMap<String, Listing> {
    let mut all: HashMap<String, Listing> = HashMap::new();
    let mut kernel: Option<&str> = None;
    let mut pending: Vec<String> = vec![]; // labels of the next instruction
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
            let first_half = body[semi..].split("/* 0x").nth(1).and_then(|hex| hex.split("*/").next());
            let enc = first_half.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
            // without an opening brace and the targets of a BRX: (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)
            let text = body[..semi].trim().trim_start_matches('{').split("(*").next().unwrap_or("").trim();
            l.labels.extend(pending.drain(..).map(|label| (label, pc)));
            l.insts.push(RawInst { pc, text: text.to_string(), enc: enc as u128 });
        } else if t.ends_with(':') && !t.contains(' ') {
            pending.push(t[..t.len() - 1].to_string());
        }
    }
    all
}
