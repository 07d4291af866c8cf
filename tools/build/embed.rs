//! Compiles all kernel variants in parallel, for build.rs. A variant is a row of the tables in src/kernels: a kernel with its tile sizes
//! and features. Compiled code is cached by the hash of all that it depends on, in target/volta-fa-kernels. Writes `embedded.rs` in
//! OUT_DIR, which src/kernels/mod.rs includes: one `Image` per variant in the order of the tables, with machine code (cubin) and PTX.

// ENTRY: the file of csrc/ that NVRTC compiles for every variant. PTX_VERSIONS: the PTX ISA that newer instructions need.
use crate::nvrtc::{Binary, Compiler, ENTRY, PTX_VERSIONS};
use crate::tables::variants::Variant;
use anyhow::{Context, Result};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Compression level of zstd, from 1 (fast) to 22 (small): a build compresses once, a process decompresses each kernel once.
const ZSTD_LEVEL: i32 = 19;

/// Compiles the variants that `cache` lacks, and writes `embedded.rs` into `out`. A build with all kernels also writes `cache/complete`.
/// Until it exists, the Makefile's `make run` on a machine without a GPU compiles the demo's kernels alone.
pub fn embed(compiler: &Compiler, variants: &[Variant], cache: &Path, out: &Path) -> Result<()> {
    println!("cargo:rerun-if-env-changed={ONLY}");
    let only = std::env::var(ONLY).ok();
    let is_wanted = |v: &Variant| only.as_ref().is_none_or(|parts| parts.split(',').any(|part| v.name.contains(part)));
    std::fs::create_dir_all(cache)?;
    let entries: Vec<Entry> = variants.iter().map(|v| Entry::of(compiler, v, cache)).collect::<Result<_>>()?;
    let missing: Vec<_> = variants.iter().zip(&entries).filter(|(v, entry)| is_wanted(v) && !entry.facts().exists()).collect();
    let progress = Progress::begin(missing.len());
    missing.par_iter().try_for_each(|(variant, entry)| {
        entry.compile(compiler, variant)?;
        progress.iter().for_each(|progress| progress.lock().expect("no thread panics while it writes a line").advance());
        anyhow::Ok(())
    })?;

    let mut left_out = 0;
    let mut table = String::from("/// The machine code of every variant, in the order of the tables.\nstatic IMAGES: &[Image] = &[\n");
    for (variant, entry) in variants.iter().zip(&entries) {
        let image = entry.image().unwrap_or_else(|| {
            left_out += 1;
            "cubin: &[], ptx: &[], registers: 0, spill_bytes: 0".into()
        });
        writeln!(table, "    Image {{ name: {:?}, {image} }},", variant.name)?;
    }
    table.push_str("];\n");
    std::fs::write(out.join("embedded.rs"), table)?;
    match left_out {
        0 => std::fs::write(cache.join("complete"), "")?,
        _ => println!("cargo:warning={ONLY}: the library is without {left_out} of {} kernels", variants.len()),
    }
    Ok(())
}

/// Environment variable with parts of kernels' names, separated by commas. Compiles only kernels with one of them; others that are not in
/// the cache are left out of the library.
const ONLY: &str = "VOLTA_FA_COMPILE_ONLY";

/// Environment variable with a file for progress, which tools/heartbeat.py sets. Cargo hides the output of build scripts.
const PROGRESS: &str = "VOLTA_FA_PROGRESS";

/// The cache folder of one variant, which may not exist yet: NAME-HASH with `cubin.zst`, `ptx.zst` and `facts`, which has the numbers of
/// `Image` as Rust text: `registers: 128, spill_bytes: 0`.
struct Entry {
    folder: PathBuf,
    /// Structs of src/params/ in C++ that the variant's sources name.
    params_header: String,
}

impl Entry {
    /// Returns the entry of a variant, by the hash of its sources and options.
    fn of(compiler: &Compiler, variant: &Variant, cache: &Path) -> Result<Self> {
        let sources = include_closure(variant.source.headers.iter().chain(&[ENTRY]).map(PathBuf::from).collect())?;
        // with the name of the variant's parameter block: entry.cu has it as the macro PARAMS, and the header needs its struct
        let code = sources.values().map(String::as_str).chain([variant.params().name()]).collect::<String>();
        let params_header = compiler.params_header(&code);
        let folder = cache.join(format!("{}-{}", variant.name, key(compiler, variant, &params_header, &sources)));
        Ok(Entry { folder, params_header })
    }

    /// Returns the file that marks a complete entry.
    fn facts(&self) -> PathBuf {
        self.folder.join("facts")
    }

    /// Returns the fields of `Image` but the name, as Rust text; None: the kernel is not compiled.
    fn image(&self) -> Option<String> {
        let facts = std::fs::read_to_string(self.facts()).ok()?;
        let bytes = |file| format!("include_bytes!({:?})", self.folder.join(file));
        Some(format!("cubin: {}, ptx: {}, {}", bytes("cubin.zst"), bytes("ptx.zst"), facts.trim()))
    }

    fn compile(&self, compiler: &Compiler, variant: &Variant) -> Result<()> {
        let Binary { cubin, ptx, registers, spill_bytes } = compiler.compile(variant, &self.params_header)?;
        std::fs::create_dir_all(&self.folder)?;
        for (name, data) in [("cubin.zst", &cubin), ("ptx.zst", &ptx)] {
            std::fs::write(self.folder.join(name), zstd::encode_all(&data[..], ZSTD_LEVEL)?)?;
        }
        // last, because it marks the entry as complete
        Ok(std::fs::write(self.facts(), format!("registers: {registers}, spill_bytes: {spill_bytes}\n"))?)
    }
}

/// Returns the hash of everything that affects machine code and PTX: compiler, options, PTX versions, parameter blocks, sources.
fn key(compiler: &Compiler, variant: &Variant, params_header: &str, sources: &BTreeMap<PathBuf, String>) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{:?} {:?} {PTX_VERSIONS:?}", compiler.version, Compiler::options(variant)));
    hash.update(params_header);
    for (file, text) in sources {
        hash.update(file.to_string_lossy().as_bytes());
        hash.update(text);
    }
    hash.finalize().iter().take(12).map(|b| format!("{b:02x}")).collect()
}

/// Returns a source without `//` comments and the blanks before them (no string of csrc/ holds `//`): an edited comment compiles nothing.
fn without_comments(text: &str) -> String {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default().trim_end())
        .filter(|line| !line.is_empty())
        .fold(String::with_capacity(text.len()), |code, line| code + line + "\n")
}

/// Returns these files and all files below csrc/ that they include, directly or not, without comments. Paths are relative to csrc/.
fn include_closure(mut todo: Vec<PathBuf>) -> Result<BTreeMap<PathBuf, String>> {
    let mut seen = BTreeMap::new();
    while let Some(file) = todo.pop() {
        if seen.contains_key(&file) {
            continue;
        }
        let text = std::fs::read_to_string(Path::new("csrc").join(&file)).with_context(|| format!("csrc/{}", file.display()))?;
        let text = without_comments(&text);
        for line in text.lines() {
            let Some(name) = line.trim().strip_prefix("#include \"").and_then(|r| r.split('"').next()) else { continue };
            let beside = file.parent().unwrap_or(Path::new("")).join(name);
            // the generated parameter header lies outside csrc/ and is hashed on its own
            if let Some(found) = [PathBuf::from(name), beside].into_iter().find(|p| Path::new("csrc").join(p).exists()) {
                todo.push(found);
            }
        }
        seen.insert(file, text);
    }
    Ok(seen)
}

/// Writes how many kernels are compiled: at the begin, about every ten seconds, and at the end. Lines serve a pipe and a log too.
struct Progress {
    done: usize,
    total: usize,
    last_line: Instant,
    file: File,
}

impl Progress {
    /// Begins the compilation of `total` kernels by several threads, if [`PROGRESS`] names a file. Writes nothing for no kernels.
    fn begin(total: usize) -> Option<Mutex<Progress>> {
        let file = File::options().append(true).open(std::env::var_os(PROGRESS)?).ok()?;
        let mut progress = Progress { done: 0, total, last_line: Instant::now(), file };
        if total > 0 {
            progress.write_line();
        }
        Some(Mutex::new(progress))
    }

    fn advance(&mut self) {
        self.done += 1;
        if self.done == self.total || self.last_line.elapsed() >= Duration::from_secs(10) {
            self.write_line();
        }
    }

    fn write_line(&mut self) {
        self.last_line = Instant::now();
        // Begins with a carriage return, because the cursor may be at the end of cargo's bar. A failed write must not fail the build.
        let _ = self.file.write_all(format!("\r\x1b[Kvolta_fa: compiled {} of {} kernels\n", self.done, self.total).as_bytes());
    }
}
