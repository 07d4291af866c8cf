//! Compiles the CUDA kernels with NVRTC and embeds them, compressed.
//! Writes the C++ headers of everything that Rust shares with the shims (`torch_ops/`, built by `tools/shims`).

#[path = "tools/build/embed.rs"]
mod embed;
#[path = "tools/build/nvrtc.rs"]
mod nvrtc;
#[path = "tools/build/options.rs"]
mod options_header;
#[path = "tools/build/python.rs"]
mod python;

// The kernel tables are the library's own source: one list of variants for build and run time, of which either uses a part.
#[allow(dead_code)]
#[path = "src/kernels/tables.rs"]
mod tables;

// ... whose rows name types of the parameter blocks,
#[allow(dead_code)]
#[path = "src/params.rs"]
mod params;

// ... and so is the list of the ops' options.
#[allow(dead_code)]
#[path = "src/options.rs"]
mod options;

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use tables::variants::ParamBlock;

fn run() -> Result<()> {
    let out = PathBuf::from(std::env::var("OUT_DIR").context("OUT_DIR is not set: run this through cargo")?);
    for path in
        ["build.rs", "tools/build", "csrc", "src/params.rs", "src/ffi.rs", "src/info.rs", "src/shim.rs", "src/options.rs", "src/kernels"]
    {
        println!("cargo:rerun-if-changed={path}");
    }
    let target = target_folder(&out)?;
    let python = python::Environment::query()?;

    let params = out.join("volta_fa_params.h");
    c_header(&["src/params.rs"], &params)?;
    let compiler = nvrtc::Compiler::load(&python, &params)?;
    embed::embed(&compiler, &tables::tables().concat(), &target.join("volta-fa-kernels"), &out)?;

    let headers = target.join("volta-fa-headers");
    std::fs::create_dir_all(&headers)?;
    c_header(&["src/ffi.rs", "src/info.rs", "src/shim.rs"], &headers.join("volta_fa_abi.h"))?;
    options_header::write_header(&headers.join("volta_fa_options.h"))?;

    // The name under which the package has the library, and the shims need it. It is not linked with a shim, of which there is one
    // for each release of torch: the shim that is opened brings the functions that are undefined here.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-soname,libvolta_fa_core.so");
    Ok(())
}

/// What all profiles, targets and features share, and what survives `cargo clean -p`: cargo's target folder, of which `out` is
/// `[<triple>/]<profile>/build/<package>/out`.
fn target_folder(out: &Path) -> Result<&Path> {
    let folder = out.ancestors().nth(4).context("OUT_DIR has an unexpected form")?;
    let triple = std::env::var_os("TARGET").context("TARGET is not set: run this through cargo")?;
    match folder.file_name() == Some(&triple) {
        true => folder.parent().context("OUT_DIR has an unexpected form"),
        false => Ok(folder),
    }
}

/// The C view of Rust files' `#[repr(C)]` types and `extern "C"` functions.
fn c_header(sources: &[&str], header: &Path) -> Result<()> {
    let config = cbindgen::Config {
        language: cbindgen::Language::Cxx,
        pragma_once: true,
        no_includes: true,
        // NVRTC has no <cstdint>: the sources' own prelude names the fixed-width types
        sys_includes: vec![],
        usize_is_size_t: true,
        // a kernel is compiled again when its parameters change, not when what is said about them does
        documentation: false,
        // the parameter blocks: no Rust function mentions them, so cbindgen must be told
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
