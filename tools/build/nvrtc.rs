//! Compiles one kernel variant of csrc/ to a cubin and PTX with NVRTC 12.9, the last release that knows sm_70. tools/build/embed.rs calls
//! it for each row of the tables in src/kernels: the row's numbers become macros. Needs no CUDA toolkit and no GPU.
//!
//! Binds NVRTC by hand, because the crate `cudarc` opens the first on the loader's search path: that of an installed CUDA toolkit would win
//! over the pinned one.

use crate::tables::formats::{FormatInfo, FORMATS};
use crate::tables::variants::{CacheFormat, Feature, FeatureSet, ParamBlock, Pass, Variant, SPLIT_TOKENS};
use anyhow::{bail, Context, Result};
use libloading::{Library, Symbol};
use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::{Path, PathBuf};
use std::process::Command;

// Types of nvrtc.h.
type Program = *mut c_void;
type CreateProgram =
    unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;

/// A compiled kernel.
pub struct Binary {
    pub cubin: Vec<u8>,
    /// PTX of the lowest version that has all its instructions.
    pub ptx: Vec<u8>,
    /// Registers per thread, from ptxas.
    pub registers: u32,
    /// Bytes of spill stores and loads, from ptxas.
    pub spill_bytes: u32,
}

/// NVRTC, opened, and what every compilation needs.
pub struct Compiler {
    library: Library,
    include_dirs: Vec<PathBuf>,
    params: ParamsHeader,
    /// NVRTC's major and minor version.
    pub version: (i32, i32),
}

/// The file that NVRTC compiles for every variant, below csrc/.
pub const ENTRY: &str = "entry.cu";

/// Name under which the sources include the generated header of parameter blocks: the structs that Rust fills for a launch (src/params/).
const PARAMS_HEADER: &CStr = c"volta_fa_params.h";

/// Fixed-width types for the generated header: NVRTC has no standard headers.
const PRELUDE: &str =
    "typedef unsigned short uint16_t;\ntypedef int int32_t;\ntypedef unsigned int uint32_t;\ntypedef long long int64_t;\ntypedef unsigned long long uint64_t;\n";

/// PTX instructions that are newer than their targets, and the PTX ISA that introduced them (NVIDIA's "Release Notes" of the ISA). A row is
/// an opcode with the deciding modifier, or a modifier of any opcode. Part of each variant's cache key.
///
/// With a missing row no driver compiles the PTX, so the tests assemble embedded PTX with ptxas.
pub const PTX_VERSIONS: &[(&str, (u32, u32))] = &[
    ("activemask", (6, 2)),
    ("red.noftz", (6, 2)),
    ("nanosleep", (6, 3)),
    ("mma.m8n8k4", (6, 4)),
    ("mma.m16n8k8", (6, 5)),
    ("ldmatrix", (6, 5)),
    ("abs.f16", (6, 5)),
    ("abs.f16x2", (6, 5)),
    ("ex2.f16", (7, 0)),
    ("ex2.f16x2", (7, 0)),
    ("tanh", (7, 0)),
    (".L1::no_allocate", (7, 4)),
    (".L2::128B", (7, 4)),
    ("bmsk", (7, 6)),
    ("szext", (7, 6)),
    ("movmatrix", (7, 8)),
];

/// Returns the PTX ISA that introduced a target: that of a kernel family (sm_70 volta, sm_75 turing), or sm_80 for a later one.
fn first_version_of(sm: u32) -> (u32, u32) {
    match sm {
        ..=72 => (6, 0),
        75 => (6, 3),
        _ => (7, 0),
    }
}

/// Returns the PTX with the lowest `.version` that has all its instructions. NVRTC writes its own version, and drivers reject versions
/// newer than themselves.
fn for_old_drivers(ptx: &str, sm: u32) -> Result<String> {
    // removes hints about used bytes of vector loads: most drivers are older than this directive
    let kept: Vec<&str> = ptx.lines().filter(|line| !line.trim_start().starts_with(".pragma \"used_bytes_mask")).collect();
    let code = kept.iter().map(|line| line.split("//").next().unwrap_or(""));
    let words = code.flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || "_.:".contains(c))));
    let (major, minor) = words
        .flat_map(|word| PTX_VERSIONS.iter().filter(move |(newer, _)| is_instance(word, newer)))
        .map(|&(_, version)| version)
        .fold(first_version_of(sm), std::cmp::max);
    let version = kept.iter().position(|line| line.starts_with(".version ")).context("NVRTC's PTX names no version")?;
    let lowest = format!(".version {major}.{minor}");
    Ok(kept.iter().enumerate().map(|(i, line)| if i == version { &lowest } else { *line }).collect::<Vec<_>>().join("\n") + "\n")
}

/// Returns true if a row of [`PTX_VERSIONS`] matches `instruction`, for example `mma.sync.aligned.m8n8k4.row.col`.
fn is_instance(instruction: &str, row: &str) -> bool {
    let (opcode, modifiers) = row.split_once('.').unwrap_or((row, ""));
    let mut words = instruction.split('.');
    let found = words.next().unwrap_or("");
    (opcode.is_empty() || opcode == found) && (modifiers.is_empty() || words.any(|word| word == modifiers))
}

/// Returns C++ that defines the bits of the macro `FEATURES` that sources name (csrc/features.cuh), `kFeatureLengths` and so on, and
/// `kScoreFeatures`, the set of those that change scores. Enumerators leave no addresses in the cubin, variables would.
fn feature_bits(named: &HashSet<&str>) -> String {
    let features = Feature::ALL.map(|feature| (format!("kFeature{feature:?}"), FeatureSet::of(&[feature])));
    let sets = [("kScoreFeatures".to_string(), FeatureSet::of(&Feature::OF_SCORES))];
    let constants = features.into_iter().chain(sets).map(|(name, set)| (name, set.bits()));
    let kept = constants.filter(|(name, _)| named.contains(name.as_str()));
    kept.map(|(name, bits)| format!("enum : unsigned {{ {name} = {bits}u }};\n")).collect()
}

/// Name of the table of cache formats in C++.
const FORMAT_INFO: &str = "CacheFormatInfo";

/// Returns C++ that defines `CacheFormatInfo<Format>`, the row of each format of a KV cache, and `QUANTIZED_FORMATS(use)`, which is
/// `use(Format)` of each quantized one. Kernels get a pair (keys and values in different formats) as two formats, so it has no row.
fn cache_formats() -> String {
    let rows = FORMATS.iter().filter(|row| !row.format.is_pair()).map(FormatInfo::cpp).collect::<String>();
    let quantized =
        CacheFormat::quantized().filter(|format| !format.is_pair()).map(|format| format!(" use({format:?})")).collect::<String>();
    format!("template <CacheFormat> struct {FORMAT_INFO};\n{rows}#define QUANTIZED_FORMATS(use){quantized}\n")
}

/// The types of src/params/ in C++. A kernel gets only those that its sources name, so changes of others do not recompile it.
struct ParamsHeader {
    /// Name and definition; each type comes after the types of its members.
    types: Vec<(String, String)>,
}

impl ParamsHeader {
    /// Reads the header that cbindgen wrote. Each definition ends with a line `};`.
    fn read(header: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(header)?;
        let types = text.split_inclusive("\n};\n").filter_map(|item| {
            let start = item
                .match_indices('\n')
                .map(|(at, _)| at + 1)
                .find(|&at| ["struct ", "enum class "].iter().any(|k| item[at..].starts_with(k)))?;
            let name = identifiers(&item[start..]).find(|word| !["struct", "enum", "class"].contains(word))?;
            Some((name.to_string(), item[start..].to_string()))
        });
        Ok(ParamsHeader { types: types.collect() })
    }

    /// Returns the types that `sources` name, the types of their members, and the table of cache formats if they name it.
    fn of(&self, sources: &str) -> String {
        let mut named: HashSet<&str> = identifiers(sources).collect();
        let has_formats = named.contains(FORMAT_INFO);
        let features = feature_bits(&named);
        let mut kept = Vec::new();
        for (name, definition) in self.types.iter().rev() {
            if named.contains(name.as_str()) {
                named.extend(identifiers(definition));
                kept.push(definition.as_str());
            }
        }
        kept.reverse();
        let formats = if has_formats { cache_formats() } else { String::new() };
        format!("#pragma once\n{PRELUDE}{features}{}{formats}", kept.concat())
    }
}

/// Returns the words of C++ code.
fn identifiers(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

impl Compiler {
    /// Opens NVRTC, from the toolkit at $VOLTA_FA_CUDA_HOME or else from the PyPI wheel.
    pub fn load(python: &Environment, params_header: &Path) -> Result<Self> {
        println!("cargo:rerun-if-env-changed=VOLTA_FA_CUDA_HOME");
        let (nvrtc, mut include_dirs) = match std::env::var_os("VOLTA_FA_CUDA_HOME") {
            Some(home) => {
                let home = PathBuf::from(home);
                let nvrtc = ["lib64", "lib"].iter().map(|l| home.join(l).join("libnvrtc.so.12")).find(|p| p.exists());
                let nvrtc = nvrtc.with_context(|| {
                    format!("VOLTA_FA_CUDA_HOME={} has no lib64/libnvrtc.so.12: point it at a CUDA 12 toolkit", home.display())
                })?;
                (nvrtc, vec![home.join("include")])
            }
            None => {
                let nvrtc = python.nvrtc.clone().context(
                    "NVRTC 12.9 is not installed: pip install nvidia-cuda-nvrtc-cu12==12.9.86 \
                     nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-nvcc-cu12==12.9.86 (or set VOLTA_FA_CUDA_HOME)",
                )?;
                (nvrtc, python.cuda_includes.clone())
            }
        };
        include_dirs.insert(0, PathBuf::from("csrc"));
        // SAFETY: NVRTC's initializers have no preconditions.
        let library = unsafe { Library::new(&nvrtc) }.with_context(|| format!("cannot open {}", nvrtc.display()))?;
        let params = ParamsHeader::read(params_header)?;
        let mut compiler = Compiler { library, include_dirs, params, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is NVRTC's.
        unsafe {
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int> = compiler.library.get(b"nvrtcVersion")?;
            version(&mut major, &mut minor);
        }
        if major != 12 {
            bail!("{} is NVRTC {major}.{minor}: sm_70 needs 12.x (12.9 is the last)", nvrtc.display());
        }
        compiler.version = (major, minor);
        Ok(compiler)
    }

    /// Returns the generated header for a kernel of these sources: part of its cache key.
    pub fn params_header(&self, sources: &str) -> String {
        self.params.of(sources)
    }

    /// Returns the command line of one variant, without machine paths: part of its cache key.
    pub fn options(variant: &Variant) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture=sm_{}", variant.family.sm),
            "--std=c++17".into(),
            // registers and spills, in the program log
            "--ptxas-options=-v".into(),
            format!("-DKERNEL_NAME={}", variant.name),
            // entry.cu's kernel calls KERNEL::run(ARGUMENTS): a type of the included headers, and what it takes of the parameter block
            format!("-DKERNEL={}", variant.source.kernel),
            format!("-DPARAMS={}", variant.params().name()),
            format!("-DARGUMENTS={}", variant.source.arguments),
        ];
        options.extend(variant.source.headers.iter().map(|header| format!("--pre-include={header}")));
        // what a main kernel of the backward pass does with dq: adds it up, stores it, or leaves it to another kernel
        options.extend(variant.pass.dq_mode().map(|mode| format!("-DDQ_MODE={mode}")));
        // HEADDIM, HEADDIM_V: the largest that the kernel takes. BLOCK_ROWS: rows of a block (queries, keys or tokens). STEP: rows of the
        // other kind that an iteration of the main loop takes (decoding: rows of a warp). REQUIRED_FEATURES: every problem must use them
        for (name, value) in [
            ("HEADDIM", variant.headdim),
            ("HEADDIM_V", variant.headdim_v),
            ("BLOCK_ROWS", variant.block_rows),
            ("STEP", variant.step),
            ("THREADS", variant.threads),
            ("SHARED_BYTES", variant.shared_bytes),
            ("BLOCKS_PER_SM", variant.blocks_per_sm),
            ("FEATURES", variant.features.bits()),
            ("REQUIRED_FEATURES", variant.required_features.bits()),
        ] {
            options.push(format!("-D{name}={value}"));
        }
        let decodes = variant.pass.info().params == ParamBlock::Decode || variant.pass == Pass::SparseMla;
        if decodes || variant.pass == Pass::Append {
            let [keys, values] = variant.cache.parts();
            options.push(format!("-DKEY_FORMAT={keys:?}"));
            options.push(format!("-DVALUE_FORMAT={values:?}"));
        }
        if decodes {
            options.push(format!("-DIS_BF16={}", variant.is_bf16));
            options.push(format!("-DIS_LATENTS={}", matches!(variant.pass, Pass::DecodeMla | Pass::SparseMla)));
            options.push(format!("-DSPLIT_TOKENS={SPLIT_TOKENS}")); // of batch-invariant kernels
        }
        if variant.is_batch_invariant {
            options.push("-DBATCH_INVARIANT".into());
        }
        // Layout of the row statistics that backward kernels keep in scratch memory: -lse/scale and -delta (delta: the row sum of
        // out * dout). GROUP_ROWS queries have theirs in GROUP_FLOATS floats, at these offsets. Sequences are padded to a multiple of
        // ROW_ROUNDING rows. The layout is the family's (volta, turing), because Rust and kernels need the same.
        if let (ParamBlock::Backward | ParamBlock::BackwardStreamK | ParamBlock::BackwardStored, Some(scratch)) =
            (variant.pass.info().params, variant.family.scratch)
        {
            let list = |at: &[u32]| at.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            options.push(format!("-DROW_ROUNDING={}", scratch.row_rounding));
            options.push(format!("-DSTATS_GROUP_ROWS={}", scratch.group_rows));
            options.push(format!("-DSTATS_GROUP_FLOATS={}", scratch.group_floats));
            options.push(format!("-DSTATS_NEG_LSE_OFFSETS={}", list(scratch.neg_lse_offsets)));
            options.push(format!("-DSTATS_NEG_DELTA_OFFSETS={}", list(scratch.neg_delta_offsets)));
        }
        options
    }

    /// Compiles a variant with the header from [`Compiler::params_header`].
    pub fn compile(&self, variant: &Variant, params_header: &str) -> Result<Binary> {
        let params_header = CString::new(params_header)?;
        let path = format!("csrc/{ENTRY}");
        let source = CString::new(std::fs::read_to_string(&path).with_context(|| path.clone())?)?;
        let mut options = Self::options(variant);
        options.extend(self.include_dirs.iter().map(|d| format!("-I{}", d.display())));
        let options: Vec<CString> = options.into_iter().map(CString::new).collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let name = CString::new(path.clone())?;

        // SAFETY: the signatures are those of nvrtc.h; every pointer outlives its call.
        unsafe {
            let lib = &self.library;
            let create: Symbol<CreateProgram> = lib.get(b"nvrtcCreateProgram")?;
            let compile: Symbol<unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int> = lib.get(b"nvrtcCompileProgram")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> c_int> = lib.get(b"nvrtcDestroyProgram")?;
            let mut program: Program = std::ptr::null_mut();
            let headers = [params_header.as_ptr()];
            let names = [PARAMS_HEADER.as_ptr()];
            if create(&mut program, source.as_ptr(), name.as_ptr(), 1, headers.as_ptr(), names.as_ptr()) != 0 {
                bail!("nvrtcCreateProgram failed for {path}");
            }
            let status = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.blob(program, b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
            if status != 0 {
                bail!("{} ({}) does not compile:\n{log}", variant.name, variant.source.headers[0]);
            }
            let cubin = self.blob(program, b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN")?;
            let ptx = self.blob(program, b"nvrtcGetPTXSize", b"nvrtcGetPTX")?;
            let ptx = std::str::from_utf8(&ptx).context("NVRTC's PTX is no text")?.trim_end_matches('\0');
            let ptx = for_old_drivers(ptx, variant.family.sm)?.into_bytes();
            destroy(&mut program);
            let registers = number_before(&log, " registers").with_context(|| format!("no register count in ptxas' log:\n{log}"))?;
            let spill_bytes =
                number_before(&log, " bytes spill stores").unwrap_or(0) + number_before(&log, " bytes spill loads").unwrap_or(0);
            Ok(Binary { cubin, ptx, registers, spill_bytes })
        }
    }

    /// Returns an output of NVRTC, from a pair of functions for its size and its contents.
    ///
    /// # Safety
    /// `program` is a live program, and the names are such a pair.
    unsafe fn blob(&self, program: Program, size: &[u8], get: &[u8]) -> Result<Vec<u8>> {
        let size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> c_int> = self.library.get(size)?;
        let get: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> c_int> = self.library.get(get)?;
        let mut n = 0usize;
        if size(program, &mut n) != 0 {
            bail!("NVRTC gave no size for its output");
        }
        let mut data = vec![0u8; n];
        if get(program, data.as_mut_ptr().cast()) != 0 {
            bail!("NVRTC gave no output");
        }
        Ok(data)
    }
}

/// Returns the decimal number directly before `marker`.
fn number_before(text: &str, marker: &str) -> Option<u32> {
    let head = &text[..text.find(marker)?];
    let digits = head.len() - head.chars().rev().take_while(char::is_ascii_digit).count();
    head[digits..].parse().ok()
}

/// Finds NVRTC and its headers in the PyPI wheels of the active Python, without importing any package.
const QUERY: &str = r"
import pathlib, sys
for root in [pathlib.Path(p) / 'nvidia' for p in sys.path]:
    for f in (root / 'cuda_nvrtc/lib').glob('libnvrtc.so.12'):
        print(f'nvrtc={f}')
    for package in ('cuda_runtime', 'cuda_nvcc'):
        if (root / package / 'include').is_dir():
            print('cuda_include=' + str(root / package / 'include'))
";

/// Paths of NVRTC and its headers, as installed in the active Python by PyPI wheels (nvidia-cuda-nvrtc-cu12 and others). build.rs queries
/// them for [`Compiler::load`], which ignores them if $VOLTA_FA_CUDA_HOME names a CUDA toolkit.
pub struct Environment {
    /// path of `libnvrtc.so.12`; None if no wheel has it
    pub nvrtc: Option<PathBuf>,
    /// `include` folders of the wheels of the CUDA runtime and of nvcc, whose headers csrc/ includes
    pub cuda_includes: Vec<PathBuf>,
}

impl Environment {
    /// Runs [`QUERY`] by `python` of an active virtual environment, else by `python3`, which Conda environments have too.
    pub fn query() -> Result<Self> {
        // A change of these runs the build again. PATH is not among them, because it differs between shells.
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let python = if std::env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
        let output = Command::new(python)
            .args(["-c", QUERY])
            .output()
            .with_context(|| format!("no `{python}` on PATH: install Python 3.10 or newer"))?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr);
            bail!("`{python}` failed: {}", log.lines().last().unwrap_or("no message"));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let all = |key: &str| -> Vec<PathBuf> {
            text.lines().filter_map(|l| l.split_once('=')).filter(|(k, _)| *k == key).map(|(_, v)| v.into()).collect()
        };
        Ok(Environment { nvrtc: all("nvrtc").into_iter().next(), cuda_includes: all("cuda_include") })
    }
}
