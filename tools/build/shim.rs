//! Compiles `torch_ops/`: the schemas and dispatch keys, in C++ because TORCH_LIBRARY is, and the C functions under tch.
//! All that knows a release of torch is compiled here.

use crate::python::Environment;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

const LIBRARY: &str = "volta_fa_torch_ops";
/// What its objects refer to. tch would link libtorch_cuda too, where torch has it.
const LIBTORCH: [&str; 2] = ["torch_cpu", "c10"];

pub fn build(python: &Environment, generated: &Path) -> Result<()> {
    let (sources, headers): (Vec<_>, Vec<_>) = files("torch_ops")?.into_iter().partition(|p| p.extension().is_some_and(|e| e == "cpp"));
    // cargo runs build.rs again for every changed kernel; torch's headers take g++ a minute.
    let mut hash = Sha256::new();
    let others = [generated.join("volta_fa_abi.h"), generated.join("volta_fa_options.h"), PathBuf::from("tools/build/shim.rs")];
    for input in sources.iter().chain(&headers).chain(&others) {
        hash.update(std::fs::read(input)?);
    }
    hash.update(format!("{:?} {}", python.torch_includes, python.cxx11_abi));
    let key: Vec<u8> = hash.finalize().to_vec();
    let stamp = generated.join("shim.sha256");
    if std::fs::read(&stamp).ok().as_ref() != Some(&key) {
        compile(python, generated, &sources)?;
        std::fs::write(&stamp, &key)?;
    }
    println!("cargo:rustc-link-search=native={}", generated.display());
    // Nothing refers to the registrations by name: without +whole-archive the linker would drop them.
    println!("cargo:rustc-link-lib=static:+whole-archive={LIBRARY}");
    println!("cargo:rustc-link-lib=dylib=stdc++");
    for lib in LIBTORCH {
        println!("cargo:rustc-link-lib=dylib={lib}");
    }
    // A function of tch's that torch_ops/tch.cpp lacks fails here, with its name, and not when the library is loaded.
    println!("cargo:rustc-link-arg-cdylib=-Wl,-z,defs");
    for lib in &python.torch_libs {
        println!("cargo:rustc-link-search=native={}", lib.display());
        // Test programs start without Python, which would have loaded libtorch for them.
        println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{}", lib.display());
    }
    Ok(())
}

fn files(folder: &str) -> Result<Vec<PathBuf>> {
    let mut files = std::fs::read_dir(folder)?.map(|entry| entry.map(|e| e.path())).collect::<Result<Vec<_>, _>>()?;
    files.sort();
    Ok(files)
}

fn compile(python: &Environment, generated: &Path, sources: &[PathBuf]) -> Result<()> {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .files(sources)
        // the generated headers include our own
        .includes([generated, Path::new("torch_ops")])
        // torch's own headers are not ours to warn about
        .flags(python.torch_includes.iter().map(|d| format!("-isystem{}", d.display())))
        .define("_GLIBCXX_USE_CXX11_ABI", python.cxx11_abi.as_str())
        // the shared option list names parameters that not every registration reads
        .flag("-Wno-unused-parameter")
        .cargo_metadata(false)
        .out_dir(generated)
        .try_compile(LIBRARY)
        .context("torch_ops/ does not compile: is g++ 11 or newer installed?")
}
