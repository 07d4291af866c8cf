//! Symbols between the core library and a shim: the core leaves functions undefined, and each shim exports exactly these.

use anyhow::{bail, Context, Result};
use object::elf::{FileHeader64, STT_FUNC};
use object::read::elf::ElfFile;
use object::{Endianness, Object, ObjectSymbol};
use std::collections::BTreeSet;
use std::path::Path;

/// Returns the dynamic symbols of an ELF library that `keep` accepts, given the symbol and whether it has a version.
fn dynamic_symbols(
    library: &Path,
    keep: impl Fn(&object::read::elf::ElfSymbol<FileHeader64<Endianness>>, bool) -> bool,
) -> Result<BTreeSet<String>> {
    let data = std::fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
    let file = ElfFile::<FileHeader64<Endianness>>::parse(&*data).with_context(|| format!("{} is no ELF library", library.display()))?;
    let endian = file.endian();
    let versions = file.elf_section_table().versions(endian, &*data)?;
    let mut names = BTreeSet::new();
    for symbol in file.dynamic_symbols() {
        let version = versions.as_ref().map(|versions| versions.version_index(endian, symbol.index()));
        if keep(&symbol, version.is_some_and(|index| !index.is_local() && !index.is_global())) {
            names.insert(symbol.name()?.to_string());
        }
    }
    Ok(names)
}

/// Returns the functions that the core library expects a shim to define.
pub fn needed_from_shim(core: &Path) -> Result<BTreeSet<String>> {
    // Functions of the C library have a version, as memcpy@GLIBC_2.14. Weak symbols may stay undefined.
    let needed = dynamic_symbols(core, |symbol, versioned| symbol.is_undefined() && !symbol.is_weak() && !versioned)?;
    if needed.is_empty() {
        bail!("{} needs no function of a shim: is it the core library?", core.display());
    }
    Ok(needed)
}

/// Returns the version script that exports these functions and nothing else.
pub fn version_script(exports: &BTreeSet<String>) -> String {
    let names: Vec<&str> = exports.iter().map(String::as_str).collect();
    format!("{{ global: {}; local: *; }};\n", names.join("; "))
}

/// Fails, and removes the shim, if it does not export all of `needed`.
pub fn check_exports(shim: &Path, needed: &BTreeSet<String>) -> Result<()> {
    let exported = dynamic_symbols(shim, |symbol, _| symbol.is_definition() && symbol.elf_symbol().st_type() == STT_FUNC)?;
    let missing: Vec<&str> = needed.difference(&exported).map(String::as_str).collect();
    if !missing.is_empty() {
        std::fs::remove_file(shim)?;
        bail!("Rust calls functions that torch_ops/ does not define: {}", missing.join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn compile(source: &str, library: &Path, flags: &[String]) {
        let file = library.with_extension("c");
        std::fs::write(&file, source).unwrap();
        assert!(Command::new("g++")
            .args(["-x", "c", "-shared", "-fPIC", "-o"])
            .args([library, &file])
            .args(flags)
            .status()
            .unwrap()
            .success());
    }

    #[test]
    fn names_functions_that_the_shim_lacks_or_hides() {
        let folder = std::env::temp_dir().join(format!("volta-fa-symbols-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (core, shim, exports) = (folder.join("core.so"), folder.join("shim.so"), folder.join("exports.map"));
        // malloc has a version, optional is weak: neither is a function of a shim
        let calls = "void *at_there(void), *at_here(void), *malloc(unsigned long), *optional(void) __attribute__((weak));";
        compile(&format!("{calls} void *core(void) {{ return at_there() ? at_here() : optional ? optional() : malloc(1); }}"), &core, &[]);
        let needed = needed_from_shim(&core).unwrap();
        assert_eq!(needed.iter().collect::<Vec<_>>(), ["at_here", "at_there"]);
        std::fs::write(&exports, version_script(&needed)).unwrap();

        let flags = [format!("-Wl,--version-script={}", exports.display())];
        let (here, there) = ("void *at_here(void) { return 0; }", "void *at_there(void) { return 0; } void inner(void) {}");
        for source in [here.to_string(), format!("{here} __attribute__((visibility(\"hidden\"))) {there}")] {
            compile(&source, &shim, &flags);
            let error = check_exports(&shim, &needed).unwrap_err().to_string();
            assert!(error.ends_with(": at_there"), "{error}");
            assert!(!shim.exists());
        }
        compile(&format!("{here} {there}"), &shim, &flags);
        check_exports(&shim, &needed).unwrap();
        let exported = dynamic_symbols(&shim, |symbol, _| symbol.is_definition()).unwrap();
        assert_eq!(exported, needed);

        assert!(needed_from_shim(&shim).unwrap_err().to_string().contains("is it the core library?"));
        assert!(needed_from_shim(&shim.with_extension("c")).unwrap_err().to_string().contains("is no ELF library"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
