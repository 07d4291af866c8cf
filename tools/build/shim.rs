//! Compiles `torch_ops/`: the schemas and dispatch keys, in C++ because TORCH_LIBRARY is.

use crate::python::Environment;
use anyhow::{Context, Result};
use std::path::Path;

pub fn build(python: &Environment, generated: &Path) -> Result<()> {
    let mut sources: Vec<_> = std::fs::read_dir("torch_ops")?
        .map(|entry| entry.map(|e| e.path()))
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "cpp"))
        .collect();
    sources.sort();
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .files(&sources)
        .include(generated)
        // torch's own headers are not ours to warn about
        .flags(python.torch_includes.iter().map(|d| format!("-isystem{}", d.display())))
        .define("_GLIBCXX_USE_CXX11_ABI", python.cxx11_abi.as_str())
        // the shared option list names parameters that not every registration reads
        .flag("-Wno-unused-parameter")
        .cargo_metadata(false)
        .try_compile("volta_fa_torch_ops")
        .context("torch_ops/ does not compile: is g++ 11 or newer installed?")?;
    println!("cargo:rustc-link-search=native={}", generated.display());
    // Nothing refers to the registrations by name: without +whole-archive the linker would drop them.
    println!("cargo:rustc-link-lib=static:+whole-archive=volta_fa_torch_ops");
    println!("cargo:rustc-link-lib=dylib=stdc++");
    for lib in &python.torch_libs {
        println!("cargo:rustc-link-search=native={}", lib.display());
        // Test programs start without Python, which would have loaded libtorch for them.
        println!("cargo:rustc-link-arg-tests=-Wl,-rpath,{}", lib.display());
    }
    Ok(())
}
