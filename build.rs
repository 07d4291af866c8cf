//! Cargo's build script. Compiles the CUDA kernels of the tables in src/kernels/ with NVRTC, and embeds them, compressed, in the library.
//! Writes the C++ header of everything that Rust shares with the shims (`torch_ops/`, built afterwards by `tools/build_shims.py`).

#[path = "tools/build/embed.rs"]
mod embed; // compiles kernels in parallel, and embeds them
#[path = "tools/build/nvrtc.rs"]
mod nvrtc; // compiles one kernel

// The kernel tables, from the library's own source, so that build and library have one list. The build uses a part of their code.
#[allow(dead_code)]
#[path = "src/kernels/tables.rs"]
mod tables;

// Parameter blocks, the structs that kernels take as arguments: the tables name their types.
#[allow(dead_code, unused_imports)]
#[path = "src/params/mod.rs"]
mod params;

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use tables::variants::ParamBlock;

/// Files of the types and functions that the library shares with its C++ shims.
const ABI_SOURCES: [&str; 4] = ["src/ffi.rs", "src/operators.rs", "src/shim.rs", "src/value.rs"];

fn run() -> Result<()> {
    let out = PathBuf::from(std::env::var("OUT_DIR").context("OUT_DIR is not set: run this through cargo")?);
    for path in ["build.rs", "tools/build", "csrc", "src/params", "src/kernels"].iter().chain(&ABI_SOURCES) {
        println!("cargo:rerun-if-changed={path}");
    }
    let target = target_folder(&out)?;
    let python = nvrtc::Environment::query()?;

    // the structs that kernels take as arguments; a change of one recompiles the kernels that name it
    let params = out.join("volta_fa_params.h");
    let blocks = ["shared", "cache", "forward", "decode", "backward", "merge_cast"].map(|name| format!("src/params/{name}.rs"));
    c_header(&blocks.each_ref().map(|path| path.as_str()), &params)?;
    let compiler = nvrtc::Compiler::load(&python, &params)?;
    // compiles what the cache, `volta-fa-kernels`, lacks; writes embedded.rs into `out`, which src/kernels/mod.rs includes
    embed::embed(&compiler, &tables::tables().concat(), &target.join("volta-fa-kernels"), &out)?;

    let headers = target.join("volta-fa-headers");
    std::fs::create_dir_all(&headers)?;
    c_header(&ABI_SOURCES, &headers.join("volta_fa_abi.h"))?;

    // Name under which the package installs the library, and shims link it. The library links no shim, because there is one per torch
    // release: the shim that the package opens defines the functions that are undefined here (src/shim.rs).
    println!("cargo:rustc-link-arg-cdylib=-Wl,-soname,libvolta_fa_core.so");
    Ok(())
}

/// Returns cargo's target folder, which all profiles, targets and features share and `cargo clean -p` keeps. `out` is
/// `[<triple>/]<profile>/build/<package>/out` in it.
fn target_folder(out: &Path) -> Result<&Path> {
    let folder = out.ancestors().nth(4).context("OUT_DIR has an unexpected form")?;
    let triple = std::env::var_os("TARGET").context("TARGET is not set: run this through cargo")?;
    match folder.file_name() == Some(&triple) {
        true => folder.parent().context("OUT_DIR has an unexpected form"),
        false => Ok(folder),
    }
}

/// Writes a C header with `#[repr(C)]` types and `extern "C"` functions of Rust files.
fn c_header(sources: &[&str], header: &Path) -> Result<()> {
    let config = cbindgen::Config {
        language: cbindgen::Language::Cxx,
        pragma_once: true,
        no_includes: true,
        // NVRTC has no <cstdint>: the prelude in tools/build/nvrtc.rs defines fixed-width types
        sys_includes: vec![],
        usize_is_size_t: true,
        // without comments, so that an edited comment does not recompile kernels
        documentation: false,
        // no exported function mentions the parameter blocks, so cbindgen needs their names
        export: cbindgen::ExportConfig { include: ParamBlock::ALL.iter().map(|block| block.name().into()).collect(), ..Default::default() },
        ..Default::default()
    };
    sources
        .iter()
        .fold(cbindgen::Builder::new(), |builder, source| builder.with_src(source))
        .with_config(config)
        .with_after_include("\n// generated from the Rust source by cbindgen: do not edit\n")
        .generate()
        .with_context(|| format!("cbindgen could not read {sources:?}"))?
        .write_to_file(header);
    Ok(())
}

fn main() {
    if let Err(e) = run() {
        // one line for the user; cargo frames it
        eprintln!("volta_fa build: {e:#}");
        std::process::exit(1);
    }
}
